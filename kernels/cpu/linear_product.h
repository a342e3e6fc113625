// What products of x with packed weights have in common, by vectors as by tiles.

#pragma once

#include <algorithm>

#include "packed.h"

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
};

// The sums of a row and 32 columns to y.
template <class T, class Out>
void finish_row(const Product<T, Out>& p, int64_t row, const float* sums) {
    for (int half = 0; half < 2; half++) {
        const int count = std::min(p.cols - half * kLanes, kLanes);
        if (count <= 0) return;
        F16 value = load(sums + half * kLanes);
        if (p.bias != nullptr) value = value + load(p.bias + half * kLanes, count);
        Out* y = p.y + row * p.y_stride + half * kLanes;
        if (count == kLanes) store(y, value);
        else store(y, value, count);
    }
}

}  // namespace pd
