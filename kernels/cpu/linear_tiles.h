// Products of bf16 on tiles (amx.h), and by vectors with the bits that tiles give.

#pragma once

#include <algorithm>

#include "amx.h"
#include "linear_product.h"
#include "pool.h"

namespace pd {

#ifdef PD_AMX

// Steps of weights that stay in L1 (18 KB) while all rows of x pass by.
constexpr int64_t kTileSteps = 9;
constexpr int64_t kRunSize = kTileRows * kCols;

// Tiles ask for 2 KB at a time, vectors for 128 bytes.
constexpr int kFarAhead = 4 * kAhead;

// Rows for which vectors that do what tiles do are as fast as memory. Tiles take a little to start.
constexpr int kVectorRows = 2;

template <class Out>
void multiply_like_tiles(const Product<Bf16, Out>& p) {
    alignas(64) float sums[kVectorRows * kCols];
    (p.rows == 1 ? add_like_tiles<1, kAhead> : add_like_tiles<kVectorRows, kAhead>)(
        p.x, p.x_stride, p.w, p.depth / kTileDepth, sums);
    for (int64_t r = 0; r < p.rows; r++) finish_row(p, r, sums + r * kCols);
}

// A tile's height of rows, or fewer. Sums are finished while the products of the next group run:
// to wait for them each time would leave the memory idle for a twentieth of a decode step.
template <class Out>
class FewRows {
   public:
    explicit FewRows(const Tiles& tiles)
        : tiles_(tiles),
          sums_(static_cast<float*>(scratch(Scratch::kSums, 2 * kRunSize * sizeof(float)))) {}

    void multiply(const Product<Bf16, Out>& p) {
        float* sums = sums_ + (count_ % 2) * kRunSize;
        const int64_t steps = p.depth / kTileDepth;
        tiles_.multiply<1, kFarAhead>({{p.x, nullptr},
                                       p.x_stride,
                                       p.w,
                                       2 * kCols,
                                       steps,
                                       {sums, nullptr},
                                       kCols,
                                       false});
        finish();
        last_ = p;
        count_++;
    }

    void finish() const {
        if (count_ == 0) return;
        const float* sums = sums_ + ((count_ - 1) % 2) * kRunSize;
        for (int64_t r = 0; r < last_.rows; r++) finish_row(last_, r, sums + r * kCols);
    }

   private:
    const Tiles& tiles_;
    float* sums_;
    Product<Bf16, Out> last_ = {};
    int64_t count_ = 0;
};

// Sums lie in memory between slices. Rows are cut into runs of a tile's height; the last one
// overlaps its neighbour instead of having another height: a row that is in both is computed twice,
// with equal results.
//
// The first two runs find a slice of weights in L2: the other runs have brought it there while they
// passed the slice before. Without, all rows wait for memory at each slice, for a tenth to a fifth
// of a prefill's time.
template <class Out>
void multiply_many_rows(const Product<Bf16, Out>& p, const Tiles& tiles) {
    const int64_t num_runs = (p.rows + kTileRows - 1) / kTileRows;
    const int64_t steps = p.depth / kTileDepth;
    const int64_t num_slices =
        num_runs <= 2 ? 1 : std::max<int64_t>(1, (steps + kTileSteps - 1) / kTileSteps);
    auto* sums = static_cast<float*>(
        scratch(Scratch::kSums, num_runs * kRunSize * static_cast<int64_t>(sizeof(float))));
    const auto row_of = [&](int64_t run) { return std::min(run * kTileRows, p.rows - kTileRows); };
    const int64_t num_bringing = std::max<int64_t>(1, (num_runs - 1) / 2);
    const int64_t lines = (kStepLines + num_bringing - 1) / num_bringing;
    for (int64_t slice = 0; slice < num_slices; slice++) {
        const int64_t first = steps * slice / num_slices;
        const int64_t last = steps * (slice + 1) / num_slices;
        // Behind the last slice lies the next group, which mostly is this thread's too.
        const char* coming = reinterpret_cast<const char*>(p.w + last * kTileDepth * kCols);
        for (int64_t run = 0; run < num_runs; run += 2) {
            const int64_t next = std::min(run + 1, num_runs - 1);
            const Bf16* x = p.x + first * kTileDepth;
            const int64_t lines_now = run == 0 ? 0 : lines;
            const TileProduct part = {
                {x + row_of(run) * p.x_stride, x + row_of(next) * p.x_stride},
                p.x_stride,
                p.w + first * kTileDepth * kCols,
                2 * kCols,
                last - first,
                {sums + run * kRunSize, sums + next * kRunSize},
                kCols,
                slice > 0,
                coming,
                lines_now};
            coming += (last - first) * lines_now * 64;
            // Only the first rows find the weights anywhere but in L1.
            if (run == 0) {
                tiles.multiply<2, kAhead>(part);
            } else if (next > run) {
                tiles.multiply<2, 0>(part);
            } else {
                tiles.multiply<1, 0>(part);
            }
            if (last < steps) continue;
            for (int64_t done = run; done <= next; done++) {
                for (int64_t r = 0; r < kTileRows; r++) {
                    finish_row(p, row_of(done) + r, sums + done * kRunSize + r * kCols);
                }
            }
        }
    }
}

#endif

}  // namespace pd
