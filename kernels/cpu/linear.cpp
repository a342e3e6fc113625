// y = x W^T + b, with W packed once.
//
// Packed layout: groups of 32 columns (rows of W), each group holding for k = 0, 1, ... the 32
// weights of step k side by side, so a group is read as one stream. A step is one k, or with
// dpbf16 a pair of them: [N / 32][K][32] or [N / 32][K / 2][32][2], padded with zeros.
//
// Batch invariance: an element of y is one fp32 accumulator that starts at zero and takes the steps
// in order, whatever the tile it is computed in. Tiles differ in height (rows of x) only.

#include <algorithm>
#include <type_traits>
#include <utility>

#include "kernels.h"
#include "pool.h"
#include "product.h"

namespace pd {
namespace {

constexpr int kCols = 32;  // per group

#ifdef PD_AVX512
// 24 accumulators, 2 weights and 1 activation of 32 registers.
constexpr int kMaxRows = 12;
#else
constexpr int kMaxRows = 3;
#endif

// Bytes of the weight stream to ask for ahead of use: 1024 reads a third slower on Zen 4, 8192 no
// faster.
constexpr int kAhead = 4096;

template <class T>
int64_t num_steps(int64_t depth) {
    return (depth + Format<T>::kDepth - 1) / Format<T>::kDepth;
}

template <class T>
int64_t group_size(int64_t depth) {
    return num_steps<T>(depth) * Format<T>::kDepth * kCols;
}

// One tile: kRows rows of x times one group of columns.
template <class T, class Out, int kRows>
void tile(const typename Format<T>::Input* x, int64_t x_stride, const T* w, int64_t steps,
          const float* bias, Out* y, int64_t y_stride, int cols) {
    constexpr int kDepth = Format<T>::kDepth;
    constexpr int kStepBytes = kDepth * kCols * sizeof(T);
    F16 sum[kRows][2];
#pragma GCC unroll 12
    for (int r = 0; r < kRows; r++) sum[r][0] = sum[r][1] = zero();
    for (int64_t s = 0; s < steps; s++) {
        for (int line = 0; line < kStepBytes; line += 64) {
            prefetch(reinterpret_cast<const char*>(w) + kAhead + line);
        }
#pragma GCC unroll 12
        for (int r = 0; r < kRows; r++) {
            const auto* at = x + r * x_stride + s * kDepth;
            sum[r][0] = Format<T>::step(sum[r][0], w, at);
            sum[r][1] = Format<T>::step(sum[r][1], w + kDepth * kLanes, at);
        }
        w += kDepth * kCols;
    }
    for (int half = 0; half < 2; half++) {
        const int count = std::min(cols - half * kLanes, kLanes);
        if (count <= 0) break;
        const F16 offset = bias == nullptr ? zero() : load(bias + half * kLanes, count);
        for (int r = 0; r < kRows; r++) {
            const F16 value = bias == nullptr ? sum[r][half] : sum[r][half] + offset;
            store(y + r * y_stride + half * kLanes, value, count);
        }
    }
}

template <class T, class Out>
using Tile = void (*)(const typename Format<T>::Input*, int64_t, const T*, int64_t, const float*,
                      Out*, int64_t, int);

template <class T, class Out, int... kHeights>
constexpr auto tiles_of(std::integer_sequence<int, kHeights...>) {
    struct Table {
        Tile<T, Out> of_height[sizeof...(kHeights) + 1];
    };
    return Table{{nullptr, tile<T, Out, kHeights + 1>...}};
}

// One row as the kernels read it, zero padded to `stride` elements.
template <class T>
void widen_row(const T* from, int64_t depth, int64_t stride, typename Format<T>::Input* to) {
    using Input = typename Format<T>::Input;
    if constexpr (std::is_same_v<T, Input>) {
        std::copy(from, from + depth, to);
    } else {
        int64_t k = 0;
        for (; k + kLanes <= depth; k += kLanes) store(to + k, load(from + k));
        if (k < depth) store(to + k, load(from + k, depth - k), depth - k);
    }
    std::fill(to + depth, to + stride, Input{});
}

// x as the kernels read it: [rows][stride], zero padded to whole steps.
template <class T>
std::pair<const typename Format<T>::Input*, int64_t> prepare(const T* x, int64_t rows,
                                                             int64_t depth) {
    using Input = typename Format<T>::Input;
    if constexpr (std::is_same_v<T, Input>) {
        if (depth % Format<T>::kDepth == 0) return {x, depth};
    }
    const int64_t stride = num_steps<T>(depth) * Format<T>::kDepth;
    auto* copy = static_cast<Input*>(scratch(Scratch::kInput, rows * stride * sizeof(Input)));
    for (int64_t r = 0; r < rows; r++) {
        widen_row(x + r * depth, depth, stride, copy + r * stride);
    }
    return {copy, stride};
}

template <class T, class Out>
void multiply(const PdLinear& p, Out* y) {
    static constexpr auto kTiles = tiles_of<T, Out>(std::make_integer_sequence<int, kMaxRows>{});
    const auto [x, x_stride] = prepare(static_cast<const T*>(p.x), p.rows, p.depth);
    const int64_t steps = num_steps<T>(p.depth);
    const int64_t num_groups = (p.num_cols + kCols - 1) / kCols;
    const T* packed = static_cast<const T*>(p.weight);

    // Rows are cut into bands of nearly equal height, and bands into pieces: enough of them to keep
    // the threads level, each large enough to use its group of weights (in L2) many times.
    const int64_t num_bands = (p.rows + kMaxRows - 1) / kMaxRows;
    const int64_t num_pieces = std::max<int64_t>(1, num_bands / 10);
    const auto band_start = [&](int64_t band) { return p.rows * band / num_bands; };
    const auto run = [&, x = x, x_stride = x_stride](int64_t begin, int64_t end) {
        for (int64_t item = begin; item < end; item++) {
            const int64_t group = item / num_pieces, piece = item % num_pieces;
            const int64_t col = group * kCols;
            const T* w = packed + group * group_size<T>(p.depth);
            const float* bias = p.bias == nullptr ? nullptr : p.bias + col;
            const int cols = static_cast<int>(std::min<int64_t>(kCols, p.num_cols - col));
            const int64_t last = num_bands * (piece + 1) / num_pieces;
            for (int64_t band = num_bands * piece / num_pieces; band < last; band++) {
                const int64_t row = band_start(band);
                kTiles.of_height[band_start(band + 1) - row](
                    x + row * x_stride, x_stride, w, steps, bias, y + row * p.num_cols + col,
                    p.num_cols, cols);
            }
        }
    };
    parallel_for(num_groups * num_pieces, 1, true, p.num_threads, run);
}

// Rows of x that are widened at a time, where the kernels do not read it as it lies.
constexpr int64_t kWidenedRows = 512;

template <class T>
void multiply_heads(const PdHeadLinear& p) {
    using Input = typename Format<T>::Input;
    constexpr int kDepth = Format<T>::kDepth;
    static constexpr auto kTiles = tiles_of<T, T>(std::make_integer_sequence<int, kMaxRows>{});
    const bool as_it_lies = std::is_same_v<T, Input> && p.depth % kDepth == 0;
    const int64_t steps = num_steps<T>(p.depth), padded = steps * kDepth;
    const int64_t num_groups = (p.num_cols + kCols - 1) / kCols;
    const int64_t head_size = num_groups * group_size<T>(p.depth);
    const int64_t rows_at_once = as_it_lies ? p.rows : kWidenedRows;
    for (int64_t first = 0; first < p.rows; first += rows_at_once) {
        const int64_t rows = std::min(rows_at_once, p.rows - first);
        const T* from = static_cast<const T*>(p.x) + first * p.x_stride;
        const Input* x = nullptr;
        int64_t x_stride = p.x_stride, x_head_stride = p.x_head_stride;
        if constexpr (std::is_same_v<T, Input>) x = from;
        if (!as_it_lies) {
            x_stride = padded, x_head_stride = rows * padded;
            auto* copy = static_cast<Input*>(
                scratch(Scratch::kInput, p.num_heads * x_head_stride * sizeof(Input)));
            for (int64_t h = 0; h < p.num_heads; h++) {
                for (int64_t r = 0; r < rows; r++) {
                    widen_row(from + r * p.x_stride + h * p.x_head_stride, p.depth, padded,
                              copy + h * x_head_stride + r * x_stride);
                }
            }
            x = copy;
        }
        T* y = static_cast<T*>(p.y) + first * p.y_stride;
        const int64_t num_bands = (rows + kMaxRows - 1) / kMaxRows;
        const auto band_start = [&](int64_t band) { return rows * band / num_bands; };
        const auto run = [&](int64_t begin, int64_t end) {
            for (int64_t item = begin; item < end; item++) {
                const int64_t head = item / num_groups, group = item % num_groups;
                const int64_t col = group * kCols;
                const T* w = static_cast<const T*>(p.weight) + head * head_size +
                             group * group_size<T>(p.depth);
                const int cols = static_cast<int>(std::min<int64_t>(kCols, p.num_cols - col));
                for (int64_t band = 0; band < num_bands; band++) {
                    const int64_t row = band_start(band);
                    kTiles.of_height[band_start(band + 1) - row](
                        x + row * x_stride + head * x_head_stride, x_stride, w, steps, nullptr,
                        y + row * p.y_stride + head * p.y_head_stride + col, p.y_stride, cols);
                }
            }
        };
        parallel_for(p.num_heads * num_groups, 1, true, p.num_threads, run);
    }
}

// Where element (col, k) of the weight lies in the packed one.
template <class T>
int64_t packed_index(int64_t col, int64_t k, int64_t depth) {
    constexpr int kDepth = Format<T>::kDepth;
    return col / kCols * group_size<T>(depth) +
           (k / kDepth * kCols + col % kCols) * kDepth + k % kDepth;
}

template <class T>
void pack(const PdPack& p) {
    const T* from = static_cast<const T*>(p.weight);
    T* to = static_cast<T*>(p.packed);
    const int64_t end_col = p.first_col + p.num_cols, first_group = p.first_col / kCols;
    const int64_t num_groups = (end_col + kCols - 1) / kCols - first_group;
    parallel_for(num_groups, 1, true, p.num_threads, [&](int64_t begin, int64_t end) {
        const int64_t last = std::min((first_group + end) * kCols, end_col);
        for (int64_t col = std::max((first_group + begin) * kCols, p.first_col); col < last; col++) {
            const T* row = from + (col - p.first_col) * p.stride;
            for (int64_t k = 0; k < p.depth; k++) to[packed_index<T>(col, k, p.depth)] = row[k];
        }
    });
}

template <class T>
void unpack_row(const T* from, int64_t col, int64_t depth, T* to) {
    for (int64_t k = 0; k < depth; k++) to[k] = from[packed_index<T>(col, k, depth)];
}

template <class T>
void unpack(const PdPack& p) {
    T* to = static_cast<T*>(p.weight);
    for (int64_t i = 0; i < p.num_cols; i++) {
        unpack_row(static_cast<const T*>(p.packed), p.first_col + i, p.depth, to + i * p.stride);
    }
}

template <class T>
void take_rows(const PdTakeRows& p) {
    constexpr int64_t kChunk = 16;
    T* to = static_cast<T*>(p.y);
    const int num_threads = p.rows <= kChunk ? 1 : p.num_threads;
    parallel_for(p.rows, kChunk, false, num_threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            const int64_t col = p.ids[i] - p.first_id;
            if (col >= 0 && col < p.num_cols) {
                unpack_row(static_cast<const T*>(p.packed), col, p.depth, to + i * p.depth);
            } else {
                std::fill(to + i * p.depth, to + (i + 1) * p.depth, T{});
            }
        }
    });
}

}  // namespace
}  // namespace pd

extern "C" {

// Bytes of a packed weight, which wants 64-byte alignment.
int64_t pd_packed_bytes(int64_t num_cols, int64_t depth, PdType type) {
    const int64_t num_groups = (num_cols + pd::kCols - 1) / pd::kCols;
    return pd::with_type(type, [&](auto kind) {
        using T = decltype(kind);
        return static_cast<int64_t>(num_groups * pd::group_size<T>(depth) * sizeof(T));
    });
}

void pd_pack(const PdPack* p) {
    pd::with_type(p->type, [&](auto kind) { pd::pack<decltype(kind)>(*p); });
}

void pd_unpack(const PdPack* p) {
    pd::with_type(p->type, [&](auto kind) { pd::unpack<decltype(kind)>(*p); });
}

int32_t pd_take_rows(const PdTakeRows* p) {
    for (int64_t i = 0; i < p->rows; i++) {
        if (p->ids[i] < 0 || p->ids[i] >= p->num_ids) return kBadId;
    }
    pd::with_type(p->type, [&](auto kind) { pd::take_rows<decltype(kind)>(*p); });
    return kOk;
}

void pd_linear(const PdLinear* p) {
    if (p->rows == 0) return;
    pd::with_type(p->type, [&](auto kind) {
        using T = decltype(kind);
        if (p->out_type == kFp32) {
            pd::multiply<T>(*p, static_cast<float*>(p->y));
        } else {
            pd::multiply<T>(*p, static_cast<T*>(p->y));
        }
    });
}
void pd_head_linear(const PdHeadLinear* p) {
    if (p->rows == 0) return;
    pd::with_type(p->type, [&](auto kind) { pd::multiply_heads<decltype(kind)>(*p); });
}
}
