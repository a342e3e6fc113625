// What attention keeps of rows (a query token and head) between tiles of positions.

#pragma once

#include <algorithm>

#include "kernels.h"

namespace pd {

constexpr int kTile = 64;
constexpr int kVectors = kTile / kLanes;
constexpr int kPartition = 512;

// Consecutive query tokens of one request.
struct Block {
    int32_t request;
    int32_t first_token;     // in q
    int32_t num_tokens;
    int32_t first_position;  // in the request's context

    int64_t end_position() const { return first_position + num_tokens; }
    int64_t low_position(int64_t window) const {
        return window == 0 ? 0 : std::max<int64_t>(0, first_position - window + 1);
    }
    int64_t first_partition(int64_t window) const { return low_position(window) / kPartition; }
    int64_t num_partitions(int64_t window) const {
        return (end_position() - 1) / kPartition - first_partition(window) + 1;
    }
};

// Running softmax of some rows.
struct State {
    float* sum;  // [rows][16]: sums of weights, by lane
    float* out;  // [rows][Dv]: weighted sums of values
    float* top;  // [rows]: largest score, to which weights and values are relative

    static int64_t size(int64_t rows, int64_t value_dim) {
        return (rows * (kLanes + value_dim + 1) + kLanes - 1) / kLanes * kLanes;
    }
    static State at(float* memory, int64_t rows, int64_t value_dim) {
        return {memory, memory + rows * kLanes, memory + rows * (kLanes + value_dim)};
    }
    void clear(int64_t rows) const {
        std::fill(sum, top, 0.0f);
        std::fill(top, top + rows, kMinusInf);
    }
};

// exp2(top - m) for rows whose maximum becomes m; rows that have seen nothing yet count nothing.
inline F16 rescale(F16 top, F16 m) { return exp2_of(top - m); }

}  // namespace pd
