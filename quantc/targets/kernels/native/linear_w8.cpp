// Rows of float32 by int8 weights: y = (Σ x · (q − z)) · s + b, summed in float32.
//
// A block is `inputs` × width bytes: for each input the levels of all outputs of the block.
#include "blocks.h"

namespace {

constexpr int64_t STRETCH = 64; // inputs that are summed before they are added to the total: keeps rounding small
constexpr int64_t AHEAD = 8192; // bytes: processors do not look beyond a page by themselves

template <int ROWS, int VECTORS, bool HAS_ZERO>
bool tile(const Product &p, const int8_t *w, int64_t width, int64_t row, int64_t output) {
    const float *x = p.x + row * p.inputs;
    Lanes total[ROWS][VECTORS], zero[VECTORS];
    for (int v = 0; v < VECTORS; v++) {
        if (HAS_ZERO) zero[v] = load(p.zero + output + v * LANES);
        for (int r = 0; r < ROWS; r++) total[r][v] = zeros();
    }
    for (int64_t start = 0; start < p.inputs; start += STRETCH) {
        const int64_t stop = start + STRETCH < p.inputs ? start + STRETCH : p.inputs;
        Lanes sum[ROWS][VECTORS];
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VECTORS; v++) sum[r][v] = zeros();
        for (int64_t k = start; k < stop; k++) {
            const int8_t *levels = w + k * width;
            _mm_prefetch((const char *)(levels + AHEAD), _MM_HINT_T0);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) {
                Lanes level = from_bytes(levels + v * LANES);
                if (HAS_ZERO) level = sub(level, zero[v]);
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; r++) sum[r][v] = fma(level, every(x[r * p.inputs + k]), sum[r][v]);
            }
        }
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VECTORS; v++) total[r][v] = add(total[r][v], sum[r][v]);
    }
    bool finite = true;
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++)
            if (output + v * LANES < p.outputs) finite &= finish(p, row + r, output + v * LANES, total[r][v]);
    return finite;
}

template <int ROWS, int VECTORS, bool HAS_ZERO>
bool tiles(const Product &p, int64_t row, int64_t first, int64_t width) {
    const int8_t *w = (const int8_t *)p.w + first * p.inputs;
    bool finite = true;
    int64_t at = 0;
    for (; at + VECTORS * LANES <= width; at += VECTORS * LANES)
        finite &= tile<ROWS, VECTORS, HAS_ZERO>(p, w + at, width, row, first + at);
    for (; at < width; at += LANES) finite &= tile<ROWS, 1, HAS_ZERO>(p, w + at, width, row, first + at);
    return finite;
}

#ifdef __AVX512F__
constexpr int FEW = 4, SOME = 4, MANY = 2;
#else
constexpr int FEW = 4, SOME = 2, MANY = 1;
#endif

template <bool HAS_ZERO> bool block(const Product &p, int64_t first, int64_t width) {
    bool finite = true;
    int64_t row = 0;
#ifdef __AVX512F__
    for (; row + 8 <= p.rows; row += 8) finite &= tiles<8, MANY, HAS_ZERO>(p, row, first, width);
#endif
    for (; row + 4 <= p.rows; row += 4) finite &= tiles<4, MANY, HAS_ZERO>(p, row, first, width);
    for (; row + 2 <= p.rows; row += 2) finite &= tiles<2, SOME, HAS_ZERO>(p, row, first, width);
    for (; row < p.rows; row++) finite &= tiles<1, FEW, HAS_ZERO>(p, row, first, width);
    return finite;
}

} // namespace

EXPORT int linear_w8(const float *x, const uint8_t *w, const float *scale, const float *zero, const float *bias, float *y,
                     int64_t rows, int64_t inputs, int64_t outputs, int threads, Parallel parallel) {
    const Product p{x, w, scale, zero, bias, y, rows, inputs, outputs, 0};
    return run_blocks(p, zero ? block<true> : block<false>, threads, parallel);
}
