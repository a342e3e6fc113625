// Attention's products on the CPU's matrix unit (amx.h), with the softmax by vectors.

#pragma once

#include "amx.h"
#include "attention_state.h"

namespace pd {

#ifdef PD_AMX

// Does what RowMath does, for bf16 and dimensions that are multiples of 32. Queries and states have
// rows up to a multiple of a tile's height, unless they are fewer than one; those too many weigh
// nothing. Values lie in strips of 64 dimensions, and a last one of 32.
class TileMath {
   public:
    static bool can_take(const PdPagedAttention& p) {
        return have_tiles() && p.type == kBf16 && p.head_dim % kTileDepth == 0 &&
               p.value_dim % kTileDepth == 0;
    }

    explicit TileMath(const PdPagedAttention& p) : p_(p), softmax_(p) {}

    // Adds one tile to all rows of a block. This thread's Tiles are set to the height of its runs.
    void take_bands(const Tiles& tiles, const Block& block, int64_t start, const Bf16* queries,
                    const Bf16* keys, const Bf16* values, State state) const {
        const int64_t rows = block.num_tokens * softmax_.group();
        for (int64_t row = 0; row < rows; row += 2 * kTileRows) {
            const int64_t count = std::min<int64_t>(2 * kTileRows, rows - row);
            if (softmax_.is_hidden(block, row, count, start)) continue;
            const State at = {state.sum + row * kLanes, state.out + row * p_.value_dim,
                              state.top + row};
            const Bf16* band = queries + row * p_.head_dim;
            if (count > kTileRows) {
                take_band<2>(tiles, block, row, count, start, band, keys, values, at);
            } else {
                take_band<1>(tiles, block, row, count, start, band, keys, values, at);
            }
        }
    }

   private:
    // Adds one tile to `count` rows, in kRuns runs.
    template <int kRuns>
    void take_band(const Tiles& tiles, const Block& block, int64_t row, int64_t count,
                   int64_t start, const Bf16* queries, const Bf16* keys, const Bf16* values,
                   State state) const {
        alignas(64) float scores[kRuns * kTileRows][kTile];
        alignas(64) Bf16 weights[kRuns * kTileRows][kTile];
        for (int half = 0; half < 2; half++) {
            float* to = scores[0] + half * kTile / 2;
            tiles.multiply<kRuns, 0>({{queries, queries + kTileRows * p_.head_dim},
                                      p_.head_dim,
                                      keys + half * kTile,
                                      2 * kTile,
                                      p_.head_dim / kTileDepth,
                                      {to, to + kTileRows * kTile},
                                      kTile,
                                      false});
        }
        for (int64_t r = 0; r < count; r += kTileRows) {
            const int64_t num = std::min<int64_t>(kTileRows, count - r);
            const State at = {state.sum + r * kLanes, state.out + r * p_.value_dim, state.top + r};
            weigh(block, row + r, num, start, scores + r, weights + r, at);
        }
        const int64_t unused = kRuns * kTileRows - count;
        std::fill(weights[count], weights[count] + unused * kTile, Bf16{});
        for (int64_t d = 0; d < p_.value_dim; d += kTileDepth) {
            const int64_t strip = d / kTile * kTile;
            const int64_t width = std::min<int64_t>(kTile, p_.value_dim - strip);
            float* out = state.out + d;
            tiles.multiply<kRuns, 0>({{weights[0], weights[0] + kTileRows * kTile},
                                      kTile,
                                      values + strip * kTile + (d - strip) * 2,
                                      2 * width,
                                      kTile / kTileDepth,
                                      {out, out + kTileRows * p_.value_dim},
                                      p_.value_dim,
                                      true});
        }
    }

    // Scores of up to 16 rows to weights; what the states hold becomes relative to the new maximum.
    void weigh(const Block& block, int64_t row, int64_t count, int64_t start,
               const float (*scores)[kTile], Bf16 (*weights)[kTile], State state) const {
        F16 score[kTileRows][kVectors];
        for (int64_t r = 0; r < count; r++) {
            for (int v = 0; v < kVectors; v++) score[r][v] = load(scores[r] + v * kLanes);
        }
        float shrink[kLanes];
        softmax_.weigh<kVectors>(block, row, count, start, score, state, weights[0], shrink);
        for (int64_t r = 0; r < count; r++) {
            if (shrink[r] == 1.0f) continue;
            float* out = state.out + r * p_.value_dim;
            for (int64_t d = 0; d < p_.value_dim; d += kLanes) {
                store(out + d, load(out + d) * splat(shrink[r]));
            }
        }
    }

    const PdPagedAttention& p_;
    const Softmax softmax_;
};

#endif

}  // namespace pd
