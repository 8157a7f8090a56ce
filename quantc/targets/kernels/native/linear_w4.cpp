// Rows of float32 by groups of 4-bit weights: y = Σ s · (Σ x · (q − z)) + b, summed in float32.
//
// A block is a record for each group of inputs: the scales of all outputs of the block (float32, or bfloat16 where that
// holds them all), their zero points in bytes, less 8, if there are any, and for each eight inputs a word an output, whose
// nibbles are the levels plus 8, the lowest bits first.
#include "blocks.h"

namespace {

constexpr int64_t AHEAD = 5; // records, read ahead by hand


// A nibble n at bit P of a word, under the exponent of 2^(23 − P), is the float 2^(23 − P) + n.
constexpr int32_t mask_of(int P) { return 15 << P; }
constexpr int32_t exponent_of(int P) { return (127 + 23 - P) << 23; }
constexpr float base_of(int P) { return (float)(1 << (23 - P)); }

template <int P, int ROWS, int VECTORS>
INLINE void step(Lanes (&sum)[ROWS][VECTORS], int v, Words words, Lanes base, const float *x, int64_t stride) {
    const Lanes level = sub(picked(words, mask_of(P), exponent_of(P)), base);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) sum[r][v] = fma(level, every(x[r * stride]), sum[r][v]);
}

template <bool HAS_ZERO, bool SHORT>
struct Record {
    int64_t width;
    const uint8_t *at;
    static int64_t size(int64_t width, int64_t group) {
        return width * ((SHORT ? 2 : 4) + (HAS_ZERO ? 1 : 0) + group / 2);
    }
    Lanes scale(int output) const {
        return SHORT ? from_bfloats((const uint16_t *)at + output) : load((const float *)at + output);
    }
    Lanes zero(int output) const {
        return HAS_ZERO ? from_bytes((const int8_t *)at + width * (SHORT ? 2 : 4) + output) : every(8.0f);
    }
    const uint8_t *words() const { return at + width * ((SHORT ? 2 : 4) + (HAS_ZERO ? 1 : 0)); }
};

// Sums of some vectors of outputs over one group.
template <int ROWS, int VECTORS, class R>
INLINE void add_group(Lanes (&total)[ROWS][4], int first, const R &record, const float *x, int64_t stride, int64_t group) {
    Lanes sum[ROWS][VECTORS], base0[VECTORS], base4[VECTORS], base8[VECTORS];
    for (int v = 0; v < VECTORS; v++) {
        const Lanes zero = record.zero((first + v) * LANES);
        base0[v] = add(zero, every(base_of(0)));
        base4[v] = add(zero, every(base_of(4)));
        base8[v] = add(zero, every(base_of(8)));
        for (int r = 0; r < ROWS; r++) sum[r][v] = zeros();
    }
    const uint8_t *words = record.words() + first * LANES * 4;
    for (int64_t k = 0; k < group; k += 8, words += record.width * 4) {
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            const Words low = load_words(words + v * LANES * 4);
            step<0>(sum, v, low, base0[v], x + k, stride);
            step<4>(sum, v, low, base4[v], x + k + 1, stride);
            step<8>(sum, v, low, base8[v], x + k + 2, stride);
            const Words middle = shifted<12>(low);
            step<0>(sum, v, middle, base0[v], x + k + 3, stride);
            step<4>(sum, v, middle, base4[v], x + k + 4, stride);
            step<8>(sum, v, middle, base8[v], x + k + 5, stride);
            const Words high = shifted<24>(low);
            step<0>(sum, v, high, base0[v], x + k + 6, stride);
            step<4>(sum, v, high, base4[v], x + k + 7, stride);
        }
    }
    for (int v = 0; v < VECTORS; v++) {
        const Lanes scale = record.scale((first + v) * LANES);
        for (int r = 0; r < ROWS; r++) total[r][first + v] = fma(scale, sum[r][v], total[r][first + v]);
    }
}

template <int ROWS, int VECTORS, class R> bool some_rows(const Product &p, int64_t row, int64_t output, int64_t width) {
    const float *x = p.x + row * p.inputs;
    const int64_t size = R::size(width, p.group);
    const int vectors = (int)(width / LANES);
    Lanes total[ROWS][4];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < 4; v++) total[r][v] = zeros();
    R record{width, p.w + output / BLOCK * R::size(BLOCK, p.group) * (p.inputs / p.group)};
    for (int64_t k = 0; k < p.inputs; k += p.group, record.at += size) {
        for (int64_t line = 0; line < size; line += 64)
            _mm_prefetch((const char *)record.at + AHEAD * size + line, _MM_HINT_T0);
        int v = 0;
        for (; v + VECTORS <= vectors; v += VECTORS) add_group<ROWS, VECTORS>(total, v, record, x + k, p.inputs, p.group);
        for (; v < vectors; v++) add_group<ROWS, 1>(total, v, record, x + k, p.inputs, p.group);
    }
    bool finite = true;
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < vectors; v++) finite &= finish(p, row + r, output + v * LANES, total[r][v]);
    return finite;
}

#ifdef __AVX512F__
constexpr int FEW = 4, SOME = 2, MANY = 2;
#else
constexpr int FEW = 4, SOME = 1, MANY = 1;
#endif

#ifndef __AVX512F__

// Many rows: weights are made floats once for all of them, one group and sixteen outputs at a time. With AVX-512 it takes
// about as long to make them anew for each eight rows.
constexpr int64_t MOST_ROWS = 64, ENOUGH_ROWS = 8, MOST_GROUP = 256;

template <int ROWS> INLINE void add_rows(Lanes *total, const float *tile, const float *x, int64_t stride, int64_t group, Lanes scale) {
    Lanes sum[ROWS];
    for (int r = 0; r < ROWS; r++) sum[r] = zeros();
    for (int64_t k = 0; k < group; k++) {
        const Lanes level = load(tile + k * LANES);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) sum[r] = fma(level, every(x[r * stride + k]), sum[r]);
    }
    for (int r = 0; r < ROWS; r++) total[r] = fma(scale, sum[r], total[r]);
}

template <class R> bool many_rows(const Product &p, int64_t row, int64_t rows, int64_t output, int64_t width) {
    const int64_t size = R::size(width, p.group);
    const int vectors = (int)(width / LANES);
    Lanes total[4][MOST_ROWS];
    for (int v = 0; v < vectors; v++)
        for (int64_t r = 0; r < rows; r++) total[v][r] = zeros();
    R record{width, p.w + output / BLOCK * R::size(BLOCK, p.group) * (p.inputs / p.group)};
    for (int64_t k = 0; k < p.inputs; k += p.group, record.at += size)
        for (int v = 0; v < vectors; v++) {
            alignas(64) float tile[MOST_GROUP * LANES];
            const Lanes base = add(record.zero(v * LANES), every(base_of(0))), scale = record.scale(v * LANES);
            const uint8_t *words = record.words() + v * LANES * 4;
            for (int64_t i = 0; i < p.group; i += 8, words += width * 4) {
                Words left = load_words(words);
                for (int n = 0; n < 8; n++, left = shifted<4>(left))
                    store(tile + (i + n) * LANES, sub(picked(left, mask_of(0), exponent_of(0)), base));
            }
            const float *x = p.x + row * p.inputs + k;
            int64_t r = 0;
            for (; r + 4 <= rows; r += 4) add_rows<4>(total[v] + r, tile, x + r * p.inputs, p.inputs, p.group, scale);
            for (; r < rows; r++) add_rows<1>(total[v] + r, tile, x + r * p.inputs, p.inputs, p.group, scale);
        }
    bool finite = true;
    for (int64_t r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) finite &= finish(p, row + r, output + v * LANES, total[v][r]);
    return finite;
}

#endif

template <bool HAS_ZERO, bool SHORT> bool block(const Product &p, int64_t first, int64_t width) {
    using R = Record<HAS_ZERO, SHORT>;
    bool finite = true;
    int64_t row = 0;
#ifdef __AVX512F__
    for (; row + 8 <= p.rows; row += 8) finite &= some_rows<8, 1, R>(p, row, first, width);
#else
    for (int64_t rows; (rows = p.rows - row) >= ENOUGH_ROWS && p.group <= MOST_GROUP; row += rows) {
        rows = rows < MOST_ROWS ? rows : MOST_ROWS;
        finite &= many_rows<R>(p, row, rows, first, width);
    }
#endif
    for (; row + 4 <= p.rows; row += 4) finite &= some_rows<4, MANY, R>(p, row, first, width);
    for (; row + 2 <= p.rows; row += 2) finite &= some_rows<2, SOME, R>(p, row, first, width);
    for (; row < p.rows; row++) finite &= some_rows<1, FEW, R>(p, row, first, width);
    return finite;
}

} // namespace

EXPORT int linear_w4(const float *x, const uint8_t *w, const float *bias, float *y, int64_t rows, int64_t inputs,
                     int64_t outputs, int64_t group, int has_zero, int is_short, int threads, Parallel parallel) {
    const Product p{x, w, nullptr, nullptr, bias, y, rows, inputs, outputs, group};
    const OneBlock run = has_zero ? (is_short ? block<true, true> : block<true, false>)
                                  : (is_short ? block<false, true> : block<false, false>);
    return run_blocks(p, run, threads, parallel);
}
