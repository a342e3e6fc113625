// What attention keeps of rows (a query token and head) between tiles of positions, and how scores
// become weights.

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
    float* top;  // [rows]: largest score, to which weights and values are relative; a vector more

    static int64_t size(int64_t rows, int64_t value_dim) {
        return (rows * (kLanes + value_dim + 1) / kLanes + 2) * kLanes;
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

// The weights of a tile's positions.
class Softmax {
   public:
    explicit Softmax(const PdPagedAttention& p)
        : window_(p.window),
          group_(p.num_heads / p.num_kv_heads),
          log2_scale_(p.scale * kLog2E) {}

    int64_t group() const { return group_; }  // query heads per KV head

    // Whether `rows` of a block, from `row` on, see none of the tile.
    bool is_hidden(const Block& block, int64_t row, int64_t rows, int64_t start) const {
        return position_of(block, row + rows - 1) < start ||
               low_of(position_of(block, row)) >= start + kTile;
    }

    // The position of a block's row.
    int64_t position_of(const Block& block, int64_t row) const {
        return block.first_position + row / group_;
    }

    // Scores of up to 16 rows to weights, [rows][kTile], relative to the rows' new maximum, and adds
    // them up. What was summed before is multiplied by `shrink`, [rows], in `sum` but not in `out`.
    // Of later rows, up to 16, `state.top` is written as it was and `shrink` with anything.
    template <int kUsed, class T>
    void weigh(const Block& block, int64_t row, int64_t rows, int64_t start, F16 (*score)[kUsed],
               State state, T* weights, float* shrink) const {
        const int64_t end = start + kUsed * kLanes;
        const bool all = position_of(block, row) >= end - 1 &&
                         low_of(position_of(block, row + rows - 1)) <= start;
        F16 top = splat(kMinusInf);
        for (int64_t r = 0; r < rows; r++) {
            for (int v = 0; v < kUsed; v++) score[r][v] = score[r][v] * splat(log2_scale_);
            if (!all) hide<kUsed>(score[r], position_of(block, row + r), start);
            F16 most = score[r][0];
            for (int v = 1; v < kUsed; v++) most = max(most, score[r][v]);
            top = with_lane(top, static_cast<int>(r), max_lanes(most));
        }
        const F16 before = load(state.top);
        top = max(top, before);
        store(state.top, top);
        // Rows that have seen nothing yet weigh nothing.
        const F16 base = max(top, splat(std::numeric_limits<float>::lowest()));
        float bases[kLanes];
        store(bases, base);
        store(shrink, rescale(before, base));
        for (int64_t r = 0; r < rows; r++) {
            F16 weight[kVectors] = {zero(), zero(), zero(), zero()};
            for (int v = 0; v < kUsed; v++) {
                weight[v] = exp2_for<T>(score[r][v] - splat(bases[r]));
                store(weights + r * kTile + v * kLanes, weight[v]);
            }
            const F16 added = (weight[0] + weight[1]) + (weight[2] + weight[3]);
            float* sum = state.sum + r * kLanes;
            store(sum, fma(load(sum), splat(shrink[r]), added));
        }
    }

   private:
    // First position that the query at `position` sees.
    int64_t low_of(int64_t position) const {
        return window_ == 0 ? 0 : std::max<int64_t>(0, position - window_ + 1);
    }

    // Scores of what the query at `position` does not see become minus infinity.
    template <int kUsed>
    void hide(F16 (&score)[kUsed], int64_t position, int64_t start) const {
        const int64_t low = low_of(position) - start, high = position - start;
        for (int v = 0; v < kUsed; v++) {
            score[v] = keep_lanes(score[v], clamp(low - v * kLanes), clamp(high - v * kLanes));
        }
    }

    static int clamp(int64_t lane) {
        return static_cast<int>(std::min<int64_t>(std::max<int64_t>(lane, -1), kLanes));
    }

    const int64_t window_, group_;
    const float log2_scale_;  // scores are kept in powers of two
};

}  // namespace pd
