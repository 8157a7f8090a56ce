// Products of rows with blocks of outputs, on one thread or several.
//
// Outputs come in blocks of 64, the last one rounded up to 16. A block is computed by one thread, all of its sums in
// the same order whatever the number of rows and threads: bits depend on neither.
#pragma once

#include <atomic>

#include "lanes.h"

constexpr int64_t BLOCK = 64;
constexpr int64_t WORTH_THREADS = 1 << 17; // multiply-adds

// GNU OpenMP's entry to a parallel region, of the pool that torch uses: function, argument, threads, flags.
using Parallel = void (*)(void (*)(void *), void *, unsigned, unsigned);

struct Product {
    const float *x;       // rows × inputs
    const uint8_t *w;     // packed
    const float *scale;   // by output, rounded up to 16; null for formats that have it inside
    const float *zero;    // likewise; null if there is none
    const float *bias;    // likewise; null if there is none
    float *y;             // rows × outputs
    int64_t rows, inputs, outputs;
    int64_t group;        // inputs that share a scale
};

INLINE int64_t width_of(const Product &p, int64_t first) {
    const int64_t left = p.outputs - first;
    return left >= BLOCK ? BLOCK : (left + LANES - 1) / LANES * LANES;
}

// Whether all that is stored is finite.
INLINE bool finish(const Product &p, int64_t row, int64_t output, Lanes total) {
    if (p.scale) total = mul(total, load(p.scale + output));
    if (p.bias) total = add(total, load(p.bias + output));
    store_some(p.y + row * p.outputs + output, total, p.outputs - output);
    return is_finite(total);
}

using OneBlock = bool (*)(const Product &, int64_t first, int64_t width);

struct Shared {
    const Product *product;
    OneBlock run;
    std::atomic<int64_t> next;
    std::atomic<bool> finite;
};

inline void take_blocks(void *given) {
    Shared &shared = *(Shared *)given;
    const Product &p = *shared.product;
    for (int64_t first; (first = BLOCK * shared.next.fetch_add(1)) < p.outputs;)
        if (!shared.run(p, first, width_of(p, first))) shared.finite = false;
}

// 1 if all results are finite, else 0.
inline int run_blocks(const Product &p, OneBlock run, int threads, Parallel parallel) {
    Shared shared{&p, run, {0}, {true}};
    if (threads > 1 && parallel && p.rows * p.inputs * p.outputs >= WORTH_THREADS && p.outputs > BLOCK)
        parallel(take_blocks, &shared, (unsigned)threads, 0);
    else
        take_blocks(&shared);
    return shared.finite;
}
