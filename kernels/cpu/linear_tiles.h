// Products of bf16 on tiles (amx.h), and by vectors with the bits that tiles give.

#pragma once

#include <algorithm>

#include "amx.h"
#include "linear_product.h"
#include "pool.h"

namespace pd {

#ifdef PD_AMX

// Steps of weights that stay in L1 (36 of 48 KB) while all rows of x pass by.
constexpr int64_t kTileSteps = 18;
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

// Finishes rows of two runs whose sums are complete, some in each step of the products to come.
template <class Out>
class Finishing {
   public:
    // `later`: the first row of the second run; where there is one run, num_rows is its height.
    void begin(int64_t first, int64_t later, int64_t num_rows, const float* sums) {
        first_ = first, later_ = later, num_rows_ = num_rows, sums_ = sums, done_ = 0;
    }
    // Asks for what is written next: mostly the columns behind these.
    void take(const Product<Bf16, Out>& p, int64_t num) {
        const Out* y = (p.gated == nullptr ? p.y : p.gated) + kCols;
        const int64_t y_stride = p.gated == nullptr ? p.y_stride : p.gated_stride;
        for (const int64_t end = std::min(done_ + num, num_rows_); done_ < end; done_++) {
            const int64_t row = done_ < kTileRows ? first_ + done_ : later_ + done_ - kTileRows;
            finish_row(p, row, sums_ + done_ * kCols);
            prefetch_to_l2(y + row * y_stride);
        }
    }

   private:
    int64_t first_ = 0, later_ = 0, num_rows_ = 0, done_ = 0;
    const float* sums_ = nullptr;
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
        scratch(Scratch::kSums, std::max<int64_t>(4, num_runs + 1) * kRunSize *
                                    static_cast<int64_t>(sizeof(float))));
    const auto row_of = [&](int64_t run) { return std::min(run * kTileRows, p.rows - kTileRows); };
    const int64_t num_bringing = std::max<int64_t>(1, (num_runs - 1) / 2);
    const int64_t lines = (kStepLines + num_bringing - 1) / num_bringing;
    Finishing<Out> finishing;
    for (int64_t slice = 0; slice < num_slices; slice++) {
        const int64_t first = steps * slice / num_slices;
        const int64_t last = steps * (slice + 1) / num_slices;
        const int64_t each = 2 * kTileRows / std::max<int64_t>(1, last - first) + 1;
        // Behind the last slice lies the next group, which mostly is this thread's too.
        const char* coming = reinterpret_cast<const char*>(p.w + last * kTileDepth * kCols);
        for (int64_t run = 0; run < num_runs; run += 2) {
            const bool is_pair = run + 1 < num_runs;
            const int64_t row = row_of(run), later = row_of(is_pair ? run + 1 : run);
            const Bf16* x = p.x + first * kTileDepth;
            const int64_t lines_now = run == 0 ? 0 : lines;
            // What needs no other slice stays in L1: two pairs' sums, as one is finished meanwhile.
            float* at = sums + (num_slices == 1 ? run % 4 : run) * kRunSize;
            const TileProduct part = {{x + row * p.x_stride, x + later * p.x_stride},
                                      p.x_stride,
                                      p.w + first * kTileDepth * kCols,
                                      2 * kCols,
                                      last - first,
                                      {at, at + kRunSize},
                                      kCols,
                                      slice > 0,
                                      coming,
                                      lines_now};
            coming += (last - first) * lines_now * 64;
            const auto aside = [&] { finishing.take(p, each); };
            // Only the first rows find the weights anywhere but in L1.
            if (run == 0) {
                tiles.multiply<2, kAhead, true>(part, aside);
            } else if (is_pair) {
                tiles.multiply<2, 0, true>(part, aside);
            } else {
                tiles.multiply<1, 0, true>(part, aside);
            }
            finishing.take(p, 2 * kTileRows);
            if (last == steps) finishing.begin(row, later, is_pair ? 2 * kTileRows : kTileRows, at);
        }
    }
    finishing.take(p, 2 * kTileRows);
}

#endif

}  // namespace pd
