// Attention's products and softmax by vectors.

#pragma once

#include <type_traits>

#include "attention_state.h"
#include "pool.h"
#include "product.h"

namespace pd {

// Rows of a band, and vectors of each that are summed at once: 24 sums for 32 registers, or 6 (of
// two registers each) for 16.
constexpr int kMaxRows = 6;
#ifdef PD_AVX512
constexpr int kAtOnce = 4;
#else
constexpr int kAtOnce = 1;
#endif

template <int kValue>
using Int = std::integral_constant<int, kValue>;

// What packed tiles do to the states of rows; the same for all types with one packed form.
template <class Unit>
class RowMath {
   public:
    static constexpr int kDepth = Format<Unit>::kDepth;

    explicit RowMath(const PdPagedAttention& p) : p_(p), softmax_(p) {}

    // Adds one tile to all rows of a block, in bands of nearly equal height of at most kMaxRows.
    // First all bands meet the keys and then the values, so that L1 need not hold both.
    void take_bands(const Block& block, int64_t start, const Unit* queries, const Unit* keys,
                    const Unit* values, State state) const {
        const int64_t rows = block.num_tokens * softmax_.group();
        constexpr int64_t kRowBytes = kTile * sizeof(Unit) + sizeof(float);
        constexpr int64_t kMore = kLanes * sizeof(float);
        auto* weights = static_cast<Unit*>(scratch(Scratch::kWeights, rows * kRowBytes + kMore));
        auto* shrink = reinterpret_cast<float*>(weights + rows * kTile);
        for_bands(block, start, [&](int64_t row, auto height, auto vectors) {
            const State at = {state.sum + row * kLanes, nullptr, state.top + row};
            weigh<height, vectors>(block, row, start, queries + row * p_.head_dim, keys, at,
                                   {weights + row * kTile, shrink + row});
        });
        for_bands(block, start, [&](int64_t row, auto height, auto vectors) {
            add_values<height, vectors>({weights + row * kTile, shrink + row}, values,
                                        state.out + row * p_.value_dim);
        });
    }

   private:
    // What a tile weighs for some rows.
    struct Weighed {
        Unit* weights;  // [rows][kTile]
        float* shrink;  // [rows], and a vector more: by which what was summed before is multiplied
    };

    // Calls body(first row, rows, vectors of positions) for each band that sees some of a tile.
    template <class Body>
    void for_bands(const Block& block, int64_t start, Body&& body) const {
        const int64_t rows = block.num_tokens * softmax_.group();
        const int64_t bands = (rows + kMaxRows - 1) / kMaxRows;
        for (int64_t band = 0; band < bands; band++) {
            const int64_t row = rows * band / bands;
            const int64_t height = rows * (band + 1) / bands - row;
            if (softmax_.is_hidden(block, row, height, start)) continue;
            const int64_t high = softmax_.position_of(block, row + height - 1);
            const int64_t vectors = std::min<int64_t>(kVectors, (high - start) / kLanes + 1);
            const auto of_height = [&](auto num_rows) {
                switch (vectors) {
                    case 1: return body(row, num_rows, Int<1>{});
                    case 2: return body(row, num_rows, Int<2>{});
                    case 3: return body(row, num_rows, Int<3>{});
                    default: return body(row, num_rows, Int<4>{});
                }
            };
            static_assert(kMaxRows == 6 && kVectors == 4);
            switch (height) {
                case 1: of_height(Int<1>{}); break;
                case 2: of_height(Int<2>{}); break;
                case 3: of_height(Int<3>{}); break;
                case 4: of_height(Int<4>{}); break;
                case 5: of_height(Int<5>{}); break;
                default: of_height(Int<6>{});
            }
        }
    }

    // Weighs the positions of one tile for kRows rows, and adds the weights to the rows' states.
    template <int kRows, int kUsed>
    void weigh(const Block& block, int64_t row, int64_t start, const Unit* queries,
               const Unit* keys, State state, Weighed to) const {
        const int64_t head_dim = p_.head_dim;
        F16 score[kRows][kUsed];
        constexpr int kNum = std::min(kUsed, kAtOnce);
        static_assert(kUsed % kNum == 0);
#pragma GCC unroll 4
        for (int first = 0; first < kUsed; first += kNum) {
            F16 sum[kRows][kNum];
#pragma GCC unroll 6
            for (int r = 0; r < kRows; r++) {
#pragma GCC unroll 4
                for (int v = 0; v < kNum; v++) sum[r][v] = zero();
            }
            const Unit* at = keys + first * kLanes * kDepth;
            for (int64_t k = 0; k < head_dim; k += kDepth) {
#pragma GCC unroll 6
                for (int r = 0; r < kRows; r++) {
#pragma GCC unroll 4
                    for (int v = 0; v < kNum; v++) {
                        sum[r][v] = Format<Unit>::step(
                            sum[r][v], at + k * kTile + v * kLanes * kDepth,
                            queries + r * head_dim + k);
                    }
                }
            }
#pragma GCC unroll 6
            for (int r = 0; r < kRows; r++) {
#pragma GCC unroll 4
                for (int v = 0; v < kNum; v++) score[r][first + v] = sum[r][v];
            }
        }

        softmax_.template weigh<kUsed>(block, row, kRows, start, score, state, to.weights,
                                       to.shrink);
    }

    // Adds the weighed values of one tile to kRows rows of `out`.
    template <int kRows, int kUsed>
    void add_values(Weighed by, const Unit* values, float* out) const {
        int64_t d = 0;
        for (; d + 4 * kLanes <= p_.value_dim; d += 4 * kLanes) {
            for (int v = 0; v < 4; v += kAtOnce) {
                take_values<kRows, kUsed, kAtOnce, 4>(
                    by, values + d * kTile + v * kLanes * kDepth, out + d + v * kLanes);
            }
        }
        for (; d < p_.value_dim; d += kLanes) {
            take_values<kRows, kUsed, 1, 1>(by, values + d * kTile, out + d);
        }
    }

    // out = out * shrink + weights * values, for kRows rows and kCols vectors of dimensions, of
    // kStrip that lie together.
    template <int kRows, int kUsed, int kCols, int kStrip>
    void take_values(Weighed by, const Unit* values, float* out) const {
        const int64_t value_dim = p_.value_dim;
        F16 sum[kRows][kCols];
#pragma GCC unroll 6
        for (int r = 0; r < kRows; r++) {
#pragma GCC unroll 4
            for (int c = 0; c < kCols; c++) {
                sum[r][c] = load(out + r * value_dim + c * kLanes) * splat(by.shrink[r]);
            }
        }
        for (int i = 0; i < kUsed * kLanes; i += kDepth) {
#pragma GCC unroll 6
            for (int r = 0; r < kRows; r++) {
#pragma GCC unroll 4
                for (int c = 0; c < kCols; c++) {
                    sum[r][c] = Format<Unit>::step(
                        sum[r][c], values + (i * kStrip + c * kDepth) * kLanes,
                        by.weights + r * kTile + i);
                }
            }
        }
#pragma GCC unroll 6
        for (int r = 0; r < kRows; r++) {
#pragma GCC unroll 4
            for (int c = 0; c < kCols; c++) store(out + r * value_dim + c * kLanes, sum[r][c]);
        }
    }

    const PdPagedAttention& p_;
    const Softmax softmax_;
};

}  // namespace pd
