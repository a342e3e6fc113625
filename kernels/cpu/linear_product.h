// What products of x with packed weights have in common, by vectors as by tiles.

#pragma once

#include <algorithm>

#include "packed.h"
#include "rows.h"

namespace pd {

// Bytes of the weight stream to ask for ahead of use: 1024 reads a third slower on Zen 4, 8192 no
// faster.
constexpr int kAhead = 4096;

// Some rows of x times one group of columns.
template <class T, class Out>
struct Product {
    const typename Format<T>::Input* x;
    int64_t x_stride;  // elements from row to row, of a band's rows together
    int64_t rows;
    int64_t band_rows;  // by vectors: x lies in bands of so many, see linear_vectors.h
    const T* w;
    int64_t depth;  // padded
    const float* bias;
    int cols;  // of the group that there are
    Out* y;
    int64_t y_stride;
    const T* next = nullptr;  // weights that this thread multiplies next, if it knows
    // If not null, y is the second half of rows whose first 32 columns lie before it, and a row that
    // is complete becomes silu(first half) * second half here, gated_stride elements apart.
    Out* gated = nullptr;
    int64_t gated_stride = 0;
};

// The sums of a row and 32 columns to y.
template <class T, class Out>
void finish_row(const Product<T, Out>& p, int64_t row, const float* sums) {
    Out* y = p.y + row * p.y_stride;
    for (int half = 0; p.cols < kCols && half < 2; half++) {
        const int count = std::min(std::max(p.cols - half * kLanes, 0), kLanes);
        F16 value = load(sums + half * kLanes);
        if (p.bias != nullptr) value = value + load(p.bias + half * kLanes, count);
        store(y + half * kLanes, value, count);
    }
    if (p.cols < kCols) return;
    F16 low = load(sums), high = load(sums + kLanes);
    if (p.bias != nullptr) low = low + load(p.bias), high = high + load(p.bias + kLanes);
    store_two(y, low, high);
    if (p.gated != nullptr) silu_row(y - kCols, p.gated + row * p.gated_stride, kCols);
}

}  // namespace pd
