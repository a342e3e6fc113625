// Products by vectors, of bands of rows.
//
// A band of x lies as [steps][rows][k's of a step], so that a product reads it front to back, as
// it reads the weights. Few rows take a group of weights as one stream, widened in registers. For
// many, a slice of weights stays in L1 while all bands pass by, and sums lie in memory between
// slices. A slice is widened once, but bf16 on AVX2 in registers for each band, by units that are
// free meanwhile. Either way the sum of an element takes the same products in one order.

#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>

#include "linear_product.h"
#include "pool.h"
#include "transpose.h"

namespace pd {
// Of linear.cpp alone: a table of functions in a template would otherwise be one for all libraries
// of a process, be they built for other CPUs.
namespace {

// A group of weights is a stream for at most kStreamBands bands of kStreamRows: more read slices.
#ifdef PD_AVX512
// Of 32 registers 24 hold sums, 2 weights and 1 an input.
constexpr int kBandRows = 12, kSliceHalves = 2, kStreamRows = 12, kStreamBands = 2;
constexpr bool kAsksForOutput = false;
constexpr int64_t kSliceBytes = 18 << 10;  // of weights, beside which a band of x fits L1
#else
// Of 16 registers (two to a vector) 12 hold sums, 2 weights and 1 an input. A stream is read but
// once per band, hence with both halves of its columns.
constexpr int kBandRows = 6, kSliceHalves = 1, kStreamRows = 2, kStreamBands = 1;
// Lines of y are asked for before their sums are complete: on Zen 3 stores would wait for them.
constexpr bool kAsksForOutput = true;
constexpr int64_t kSliceBytes = 12 << 10;
#endif

// Bands of nearly equal height for so many rows of x.
int64_t band_rows(int64_t rows) {
    const int64_t most = rows <= kStreamBands * kStreamRows ? kStreamRows : kBandRows;
    const int64_t num_bands = std::max<int64_t>(1, (rows + most - 1) / most);
    return (rows + num_bands - 1) / num_bands;
}

// A row of x as a band of its own.
template <class T>
void pack_row(const T* x, int64_t depth, int64_t padded, typename Format<T>::Input* to) {
    using Unit = typename Format<T>::Input;
    if constexpr (std::is_same_v<T, Unit>) {
        std::copy(x, x + depth, to);
    } else {
        int64_t k = 0;
        for (; k + kLanes <= depth; k += kLanes) store(to + k, load(x + k));
        const auto left = static_cast<int>(depth - k);
        if (left > 0) store(to + k, load(x + k, left), left);
    }
    std::fill(to + depth, to + padded, Unit{});
}

#ifdef PD_AVX512

// A row's elements k to k + count, as 16 words of Unit, zero padded.
template <class Unit, class T>
F16 words_of(const T* from, int64_t count) {
    constexpr int kDepth = Format<Unit>::kDepth;
    if constexpr (kDepth == 1) {
        return count >= kLanes ? load(from) : load(from, static_cast<int>(count));
    } else {
        static_assert(std::is_same_v<T, Unit> && sizeof(Unit) * kDepth == sizeof(float));
        Unit padded[kLanes * kDepth] = {};
        if (count < kLanes * kDepth) {
            std::copy(from, from + count, padded);
            from = padded;
        }
        return load(reinterpret_cast<const float*>(from));
    }
}

// Rows of x as a band, with zeros from `depth` to `padded`.
template <class T>
void pack_band(const T* x, int64_t x_stride, int64_t rows, int64_t depth, int64_t padded,
               typename Format<T>::Input* to) {
    using Unit = typename Format<T>::Input;
    constexpr int kDepth = Format<Unit>::kDepth;
    if (rows == 1) return pack_row(x, depth, padded, to);
    auto* at = reinterpret_cast<float*>(to);
    const float* end = at + padded / kDepth * rows;
    for (int64_t k = 0; k < padded; k += kLanes * kDepth) {
        F16 words[kLanes];
        for (int r = 0; r < kLanes; r++) {
            words[r] = r < rows ? words_of<Unit>(x + r * x_stride + k, depth - k) : zero();
        }
        transpose(words);
        const auto num_words = static_cast<int>(std::min<int64_t>(kLanes, (padded - k) / kDepth));
        // What a vector has beyond the rows is overwritten by the next one.
        for (int i = 0; i < num_words; i++, at += rows) {
            if (at + kLanes <= end) store(at, words[i]);
            else store(at, words[i], static_cast<int>(rows));
        }
    }
}

#else

// Rows of x as a band, with zeros from `depth` to `padded`.
template <class T>
void pack_band(const T* x, int64_t x_stride, int64_t rows, int64_t depth, int64_t padded,
               float* to) {
    static_assert(kBandRows <= 8);
    if (rows == 1) return pack_row(x, depth, padded, to);
    const float* end = to + padded * rows;
    for (int64_t k = 0; k < padded; k += 8) {
        V8 words[8] = {};
        for (int r = 0; r < rows; r++) {
            const T* from = x + r * x_stride + k;
            words[r] = depth - k >= 8 ? load_eight(from)
                                      : load_eight(from, static_cast<int>(depth - k));
        }
        transpose8(words);
        const auto num_words = static_cast<int>(std::min<int64_t>(8, padded - k));
        // What a vector has beyond the rows is overwritten by the next one.
        for (int i = 0; i < num_words; i++, to += rows) {
            if (to + 8 <= end) store(to, words[i]);
            else std::memcpy(to, &words[i], rows * sizeof(float));
        }
    }
}

#endif

// What one band and one slice of a group's weights add.
template <class W>
struct Part {
    const typename Format<W>::Input* x;  // [steps][rows][k's of a step]
    const W* w;                          // [steps][32][k's of a step]
    int64_t steps;
    float* sums;  // [rows][32]
    bool add;     // to what sums holds; else it need not hold anything
    // Where what will be wanted after this slice lies, and how many bytes of it to ask for in each
    // step.
    const char* coming;
    int64_t coming_bytes;
};

// sum[r][half] += products of one step of weights and of x.
template <class W, int kRows, int kHalves>
inline void take_step(F16 (&sum)[kRows][kHalves], const W* w, const typename Format<W>::Input* x) {
    constexpr int kDepth = Format<W>::kDepth;
    constexpr int kUnitDepth = Format<typename Format<W>::Input>::kDepth;
#ifndef PD_AVX512
    if constexpr (std::is_same_v<W, Bf16>) {
        // One k of all rows, then the other: the weights of both do not fit beside the sums.
#pragma GCC unroll 2
        for (int odd = 0; odd < 2; odd++) {
            F16 weights[kHalves];
#pragma GCC unroll 2
            for (int half = 0; half < kHalves; half++) {
                const W* from = w + 2 * half * kLanes;
                weights[half] = {{load_of_pairs(from, odd), load_of_pairs(from + kLanes, odd)}};
            }
#pragma GCC unroll 12
            for (int r = 0; r < kRows; r++) {
#pragma GCC unroll 2
                for (int half = 0; half < kHalves; half++) {
                    sum[r][half] = add_product(sum[r][half], x + odd * kRows + r, weights[half]);
                }
            }
            asm volatile("" : : : "memory");  // else it loads the weights once, for both
        }
    } else
#endif
#pragma GCC unroll 12
    for (int r = 0; r < kRows; r++) {
#pragma GCC unroll 2
        for (int half = 0; half < kHalves; half++) {
            sum[r][half] = Format<W>::step(sum[r][half], w + half * kLanes * kDepth,
                                           x + r * kUnitDepth, kRows);
        }
    }
}

// kStreamed: w comes from memory, hence its own continuation is asked for, too.
template <class W, int kRows, bool kStreamed>
void multiply_part(const Part<W>& p) {
    using Unit = typename Format<W>::Input;
    constexpr int kDepth = Format<W>::kDepth;
    constexpr int kHalves = kStreamed ? 2 : kSliceHalves;
    constexpr int kStepBytes = kDepth * kCols * sizeof(W);
    const char* coming = p.coming;
    for (int first = 0; first < 2; first += kHalves) {
        F16 sum[kRows][kHalves];
        float* sums = p.sums + first * kLanes;
#pragma GCC unroll 12
        for (int r = 0; r < kRows; r++) {
#pragma GCC unroll 2
            for (int half = 0; half < kHalves; half++) {
                sum[r][half] = p.add ? load(sums + r * kCols + half * kLanes) : zero();
            }
        }
        const Unit* x = p.x;
        const W* w = p.w + first * kLanes * kDepth;
        for (int64_t step = 0; step < p.steps; step++) {
            if constexpr (kStreamed) {
                const char* ahead = reinterpret_cast<const char*>(w) + kAhead;
                for (int line = 0; line < kStepBytes; line += 64) prefetch_once(ahead + line);
            }
            prefetch_to_l2(coming);
            coming += p.coming_bytes;
            take_step<W>(sum, w, x);
            x += kRows * kDepth;
            w += kCols * kDepth;
        }
#pragma GCC unroll 12
        for (int r = 0; r < kRows; r++) {
#pragma GCC unroll 2
            for (int half = 0; half < kHalves; half++) {
                store(sums + r * kCols + half * kLanes, sum[r][half]);
            }
        }
    }
}

template <class W, bool kStreamed, int... kHeights>
constexpr auto parts_of(std::integer_sequence<int, kHeights...>) {
    struct Table {
        void (*of_height[sizeof...(kHeights) + 1])(const Part<W>&);
    };
    return Table{{nullptr, multiply_part<W, kHeights + 1, kStreamed>...}};
}

template <class T, class Out>
void multiply_stream(const Product<T, Out>& p) {
    static constexpr auto kParts =
        parts_of<T, true>(std::make_integer_sequence<int, kStreamRows>{});
    constexpr int kDepth = Format<T>::kDepth;
    const int64_t steps = p.depth / kDepth;
    // All bands bring the next group to L2: the second one of a group would leave memory idle.
    const bool brings = p.next != nullptr && p.rows > p.band_rows;
    const char* coming = reinterpret_cast<const char*>(brings ? p.next : p.w);
    const int64_t coming_bytes = brings ? kDepth * kCols * int64_t{sizeof(T)} / kStreamBands : 0;
    float sums[kStreamRows * kCols];
    for (int64_t row = 0; row < p.rows; row += p.band_rows) {
        const int64_t height = std::min(p.band_rows, p.rows - row);
        kParts.of_height[height]({p.x + row * p.x_stride, p.w, steps, sums, false, coming,
                                  coming_bytes});
        coming += steps * coming_bytes;
        for (int64_t r = 0; r < height; r++) finish_row(p, row + r, sums + r * kCols);
    }
}

// Weights of 32 columns and `depth` k's as units, in the order of those.
template <class T>
void widen_weights(const T* from, int64_t depth, float* to) {
    if constexpr (Format<T>::kDepth == 1) {
        for (int64_t i = 0; i < depth * kCols; i += kLanes) store(to + i, load(from + i));
    } else {
        for (int64_t k = 0; k < depth; k += 2, from += 2 * kCols, to += 2 * kCols) {
            for (int half = 0; half < 2; half++) {
                const Pair pair = load_pairs(from + half * 2 * kLanes);
                store(to + half * kLanes, pair.even);
                store(to + kCols + half * kLanes, pair.odd);
            }
        }
    }
}

// Whether a slice of weights is widened in memory: else in registers, or not at all.
template <class T>
#ifdef PD_AVX512
constexpr bool kWidenedInMemory = !std::is_same_v<T, typename Format<T>::Input>;
#else
constexpr bool kWidenedInMemory = !std::is_same_v<T, float> && !std::is_same_v<T, Bf16>;
#endif

template <class T, class Out>
void multiply_slices(const Product<T, Out>& p) {
    using Unit = typename Format<T>::Input;
    using W = std::conditional_t<kWidenedInMemory<T>, Unit, T>;
    static constexpr auto kParts =
        parts_of<W, false>(std::make_integer_sequence<int, kBandRows>{});
    constexpr int kDepth = Format<T>::kDepth, kStepDepth = Format<W>::kDepth;
    constexpr int64_t kSliceDepth = kSliceBytes / (kCols * sizeof(W));
    const int64_t num_steps = p.depth / kDepth;
    const int64_t num_slices = std::max<int64_t>(
        1, (p.depth + kSliceDepth - 1) / kSliceDepth);
    const int64_t num_bands = (p.rows + p.band_rows - 1) / p.band_rows;
    // Behind the last slice lies the next group, which mostly is this thread's too. The bands but
    // the first bring a slice to L2 for the next one, in kPasses over its steps each.
    constexpr int kPasses = 2 / kSliceHalves;
    const int64_t step_bytes = kStepDepth * kCols * int64_t{sizeof(T)};
    const int64_t passes = kPasses * std::max<int64_t>(1, num_bands - 1);
    const int64_t coming_bytes = (step_bytes + passes - 1) / passes;
    auto* sums = static_cast<float*>(
        scratch(Scratch::kSums, p.rows * kCols * static_cast<int64_t>(sizeof(float))));
    for (int64_t slice = 0; slice < num_slices; slice++) {
        const int64_t first = num_steps * slice / num_slices * kDepth;
        const int64_t last = num_steps * (slice + 1) / num_slices * kDepth;
        const T* from = p.w + first * kCols;
        const W* w;
        if constexpr (!kWidenedInMemory<T>) {
            w = from;
        } else {
            auto* wide = static_cast<float*>(
                scratch(Scratch::kSlice, (last - first) * kCols * int64_t{sizeof(float)}));
            widen_weights(from, last - first, wide);
            w = wide;
        }
        const int64_t steps = (last - first) / kStepDepth;
        const char* coming = reinterpret_cast<const char*>(p.w + last * kCols);
        for (int64_t row = 0; row < p.rows; row += p.band_rows) {
            const int64_t height = std::min(p.band_rows, p.rows - row);
            float* at = sums + row * kCols;
            for (int64_t r = 0; kAsksForOutput && last == p.depth && r < height; r++) {
                prefetch_to_write(p.y + (row + r) * p.y_stride);
            }
            kParts.of_height[height]({p.x + row * p.x_stride + first * height, w, steps, at,
                                      slice > 0, coming, coming_bytes});
            coming += kPasses * steps * coming_bytes;
            if (last < p.depth) continue;
            for (int64_t r = 0; r < height; r++) finish_row(p, row + r, at + r * kCols);
        }
    }
}

template <class T, class Out>
void multiply_by_vectors(const Product<T, Out>& p) {
    if (p.rows <= kStreamBands * p.band_rows && p.band_rows <= kStreamRows) multiply_stream(p);
    else multiply_slices(p);
}

}  // namespace
}  // namespace pd
