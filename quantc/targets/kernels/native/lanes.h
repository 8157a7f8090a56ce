// Sixteen float32 lanes, one for each of sixteen neighbouring outputs: one register with AVX-512, two with AVX2.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include <immintrin.h>

#define INLINE static inline __attribute__((always_inline))
#define EXPORT extern "C" __attribute__((visibility("default")))

constexpr int LANES = 16;

#ifdef __AVX512F__

struct Lanes {
    __m512 v;
};
struct Words {
    __m512i v;
};

INLINE Lanes zeros() { return {_mm512_setzero_ps()}; }
INLINE Lanes every(float value) { return {_mm512_set1_ps(value)}; }
INLINE Lanes load(const float *from) { return {_mm512_loadu_ps(from)}; }
INLINE Lanes add(Lanes a, Lanes b) { return {_mm512_add_ps(a.v, b.v)}; }
INLINE Lanes sub(Lanes a, Lanes b) { return {_mm512_sub_ps(a.v, b.v)}; }
INLINE Lanes mul(Lanes a, Lanes b) { return {_mm512_mul_ps(a.v, b.v)}; }
INLINE Lanes fma(Lanes a, Lanes b, Lanes c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
INLINE void store(float *to, Lanes a) { _mm512_storeu_ps(to, a.v); }
INLINE bool is_finite(Lanes a) {
    return _mm512_cmp_ps_mask(_mm512_sub_ps(a.v, a.v), _mm512_setzero_ps(), _CMP_NEQ_UQ) == 0;
}
INLINE Lanes from_bytes(const int8_t *from) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)))};
}
INLINE Lanes from_bfloats(const uint16_t *from) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
INLINE Words load_words(const void *from) { return {_mm512_loadu_si512(from)}; }
template <int BITS> INLINE Words shifted(Words a) { return {_mm512_srli_epi32(a.v, BITS)}; }
// (a & mask) | bits, as a float
INLINE Lanes picked(Words a, int32_t mask, int32_t bits) {
    return {_mm512_castsi512_ps(_mm512_ternarylogic_epi32(a.v, _mm512_set1_epi32(mask), _mm512_set1_epi32(bits), 0xEA))};
}

#else

struct Lanes {
    __m256 a, b;
};
struct Words {
    __m256i a, b;
};

INLINE Lanes zeros() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
INLINE Lanes every(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
INLINE Lanes load(const float *from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
INLINE Lanes add(Lanes x, Lanes y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
INLINE Lanes sub(Lanes x, Lanes y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
INLINE Lanes mul(Lanes x, Lanes y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
INLINE Lanes fma(Lanes x, Lanes y, Lanes z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
INLINE void store(float *to, Lanes x) {
    _mm256_storeu_ps(to, x.a);
    _mm256_storeu_ps(to + 8, x.b);
}
INLINE bool is_finite(Lanes x) {
    const Lanes none = sub(x, x);
    const __m256 zero = _mm256_setzero_ps();
    const __m256 wrong = _mm256_or_ps(_mm256_cmp_ps(none.a, zero, _CMP_NEQ_UQ), _mm256_cmp_ps(none.b, zero, _CMP_NEQ_UQ));
    return _mm256_movemask_ps(wrong) == 0;
}
INLINE __m256 from_eight(const int8_t *from) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)));
}
INLINE Lanes from_bytes(const int8_t *from) { return {from_eight(from), from_eight(from + 8)}; }
INLINE __m256 from_eight_bfloats(const uint16_t *from) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from)), 16));
}
INLINE Lanes from_bfloats(const uint16_t *from) { return {from_eight_bfloats(from), from_eight_bfloats(from + 8)}; }
INLINE Words load_words(const void *from) {
    return {_mm256_loadu_si256((const __m256i *)from), _mm256_loadu_si256((const __m256i *)from + 1)};
}
template <int BITS> INLINE Words shifted(Words x) { return {_mm256_srli_epi32(x.a, BITS), _mm256_srli_epi32(x.b, BITS)}; }
INLINE Lanes picked(Words x, int32_t mask, int32_t bits) {
    const __m256i m = _mm256_set1_epi32(mask), o = _mm256_set1_epi32(bits);
    return {
        _mm256_castsi256_ps(_mm256_or_si256(_mm256_and_si256(x.a, m), o)),
        _mm256_castsi256_ps(_mm256_or_si256(_mm256_and_si256(x.b, m), o)),
    };
}

#endif

// The first `count` lanes.
INLINE void store_some(float *to, Lanes a, int64_t count) {
    if (count >= LANES) {
        store(to, a);
        return;
    }
    float all[LANES];
    store(all, a);
    std::memcpy(to, all, sizeof(float) * (size_t)count);
}
