// How a packed weight lies.
//
// Groups of 32 columns (rows of W), each group holding for k = 0, 1, ... the 32 weights of step k
// side by side, so a group is read as one stream. A step is one k, or in the interleaved order of
// product.h (that of bf16) a pair of them: [N / 32][K][32] or [N / 32][K / 2][32][2], padded with zeros.

#pragma once

#include "product.h"

namespace pd {

constexpr int kCols = 32;  // per group

// k's of a packed weight, with the padding.
template <class T>
int64_t padded_depth(int64_t depth) {
    return (depth + Format<T>::kPadding - 1) / Format<T>::kPadding * Format<T>::kPadding;
}

template <class T>
int64_t group_size(int64_t depth) {
    return padded_depth<T>(depth) * kCols;
}

}  // namespace pd
