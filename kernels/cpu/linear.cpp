// y = x W^T + b, with W packed once (packed.h).
//
// Batch invariance: an element of y is one fp32 accumulator that starts at zero and takes the steps
// in order, whatever it is computed beside: lanes of vectors, or tiles (amx.h), whose own order
// within a step is fixed too. Vectors and tiles differ in that order, so a process keeps to one of
// the two for all products of bf16: tiles, where the CPU and the operating system have them. One or
// two rows are then multiplied by vectors that do what tiles do, bit for bit.

#include <algorithm>
#include <type_traits>
#include <utility>

#include "amx.h"
#include "kernels.h"
#include "packed.h"
#include "pool.h"
#include "product.h"

namespace pd {
namespace {

#ifdef PD_AVX512
// 24 accumulators, 2 weights and 1 activation of 32 registers.
constexpr int kMaxRows = 12;
#else
constexpr int kMaxRows = 3;
#endif

// Bytes of the weight stream to ask for ahead of use: 1024 reads a third slower on Zen 4, 8192 no
// faster.
constexpr int kAhead = 4096;

// Some rows of x times one group of columns.
template <class T, class Out>
struct Product {
    const typename Format<T>::Input* x;
    int64_t x_stride, rows;
    const T* w;
    int64_t depth;  // padded
    const float* bias;
    int cols;  // of the group that there are
    Out* y;
    int64_t y_stride;
};

// The sums of a row and 16 columns to y.
template <class T, class Out>
void finish(const Product<T, Out>& p, int64_t row, int half, F16 value) {
    const int count = std::min(p.cols - half * kLanes, kLanes);
    if (count > 0) {
        if (p.bias != nullptr) value = value + load(p.bias + half * kLanes, count);
        store(p.y + row * p.y_stride + half * kLanes, value, count);
    }
}

template <class T, class Out>
void finish_row(const Product<T, Out>& p, int64_t row, const float* sums) {
    for (int half = 0; half < 2; half++) finish(p, row, half, load(sums + half * kLanes));
}

// kRows of the product's rows, by vectors.
template <class T, class Out, int kRows>
void multiply_band(const Product<T, Out>& p, int64_t row) {
    constexpr int kDepth = Format<T>::kDepth;
    constexpr int kStepBytes = kDepth * kCols * sizeof(T);
    const auto* x = p.x + row * p.x_stride;
    const T* w = p.w;
    F16 sum[kRows][2];
#pragma GCC unroll 12
    for (int r = 0; r < kRows; r++) sum[r][0] = sum[r][1] = zero();
    for (int64_t k = 0; k < p.depth; k += kDepth) {
        for (int line = 0; line < kStepBytes; line += 64) {
            prefetch(reinterpret_cast<const char*>(w) + kAhead + line);
        }
#pragma GCC unroll 12
        for (int r = 0; r < kRows; r++) {
            const auto* at = x + r * p.x_stride + k;
            sum[r][0] = Format<T>::step(sum[r][0], w, at);
            sum[r][1] = Format<T>::step(sum[r][1], w + kDepth * kLanes, at);
        }
        w += kDepth * kCols;
    }
    for (int r = 0; r < kRows; r++) {
        for (int half = 0; half < 2; half++) finish(p, row + r, half, sum[r][half]);
    }
}

template <class T, class Out>
using Band = void (*)(const Product<T, Out>&, int64_t);

template <class T, class Out, int... kHeights>
constexpr auto bands_of(std::integer_sequence<int, kHeights...>) {
    struct Table {
        Band<T, Out> of_height[sizeof...(kHeights) + 1];
    };
    return Table{{nullptr, multiply_band<T, Out, kHeights + 1>...}};
}

// Rows are cut into bands of nearly equal height.
template <class T, class Out>
void multiply_by_vectors(const Product<T, Out>& p) {
    static constexpr auto kBands = bands_of<T, Out>(std::make_integer_sequence<int, kMaxRows>{});
    const int64_t num_bands = (p.rows + kMaxRows - 1) / kMaxRows;
    for (int64_t band = 0; band < num_bands; band++) {
        const int64_t row = p.rows * band / num_bands;
        kBands.of_height[p.rows * (band + 1) / num_bands - row](p, row);
    }
}

#ifdef PD_AMX

// Steps of weights that stay in L1 (18 KB) while all rows of x pass by.
constexpr int64_t kSliceSteps = 9;
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
        num_runs <= 2 ? 1 : std::max<int64_t>(1, (steps + kSliceSteps - 1) / kSliceSteps);
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

// How the rows of x and the groups of columns become pieces of work.
struct Cut {
    int64_t num_groups, num_panels, rows;
    bool by_panel;  // take all groups for a panel of rows, else all panels for a group

    int64_t size() const { return num_groups * num_panels; }
    int64_t group(int64_t item) const { return by_panel ? item % num_groups : item / num_panels; }
    int64_t panel(int64_t item) const { return by_panel ? item / num_groups : item % num_panels; }
    // First row of a panel; panels start where tiles do.
    int64_t start(int64_t panel) const {
        if (panel == num_panels) return rows;
        return by_panel ? rows * panel / num_panels / kTileRows * kTileRows
                        : rows * panel / num_panels;
    }
};

// Bytes of x that stay in L2 while the weights pass by, and rows that their sums fit beside them.
constexpr int64_t kPanelBytes = 768 << 10, kPanelRows = 512;
// Fewer rows do not use a group of weights often enough to bring it from L2.
constexpr int64_t kFewRows = 64;

// Enough pieces to keep the threads level, each large enough to use its group of weights often.
template <class T>
Cut cut(int64_t rows, int64_t depth, int64_t num_groups, int num_threads) {
    if (!std::is_same_v<T, Bf16> || !have_tiles()) {
        const int64_t num_bands = (rows + kMaxRows - 1) / kMaxRows;
        return {num_groups, std::max<int64_t>(1, num_bands / 10), rows, false};
    }
    const int64_t row_bytes = std::max<int64_t>(depth * int64_t{sizeof(T)}, 1);
    const int64_t at_once = std::min(kPanelRows, std::max(kFewRows, kPanelBytes / row_bytes));
    int64_t num_panels = (rows + at_once - 1) / at_once;
    while (num_threads > 1 && num_groups * num_panels < 4 * num_threads &&
           rows / num_panels >= 2 * kFewRows) {
        num_panels *= 2;
    }
    return {num_groups, num_panels, rows, true};
}

// Calls of(item) for the product of each piece of work in [begin, end), and computes it.
template <class T, class Out, class Of>
void multiply_items(int64_t begin, int64_t end, Of&& of) {
#ifdef PD_AMX
    if constexpr (std::is_same_v<T, Bf16>) {
        if (have_tiles()) {
            // Either all panels have more rows than a tile, or there is one panel.
            const int64_t rows = of(begin).rows;
            if (rows <= kVectorRows) {
                for (; begin < end; begin++) multiply_like_tiles<Out>(of(begin));
                return;
            }
            const Tiles tiles(static_cast<int>(std::min<int64_t>(rows, kTileRows)));
            if (rows > kTileRows) {
                for (; begin < end; begin++) multiply_many_rows<Out>(of(begin), tiles);
            } else {
                FewRows<Out> few(tiles);
                for (; begin < end; begin++) few.multiply(of(begin));
                few.finish();
            }
            return;
        }
    }
#endif
    for (; begin < end; begin++) multiply_by_vectors<T, Out>(of(begin));
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

// x as the kernels read it: [rows][stride], zero padded as the weights are.
template <class T>
std::pair<const typename Format<T>::Input*, int64_t> prepare(const T* x, int64_t rows,
                                                             int64_t depth) {
    using Input = typename Format<T>::Input;
    const int64_t stride = padded_depth<T>(depth);
    if constexpr (std::is_same_v<T, Input>) {
        if (depth == stride) return {x, depth};
    }
    auto* copy = static_cast<Input*>(scratch(Scratch::kInput, rows * stride * sizeof(Input)));
    for (int64_t r = 0; r < rows; r++) {
        widen_row(x + r * depth, depth, stride, copy + r * stride);
    }
    return {copy, stride};
}

template <class T, class Out>
void multiply(const PdLinear& p, Out* y) {
    const auto [x, x_stride] = prepare(static_cast<const T*>(p.x), p.rows, p.depth);
    const int64_t depth = padded_depth<T>(p.depth);
    const Cut pieces = cut<T>(p.rows, depth, (p.num_cols + kCols - 1) / kCols, p.num_threads);
    const auto product_of = [&, x = x, x_stride = x_stride](int64_t item) {
        const int64_t group = pieces.group(item), panel = pieces.panel(item);
        const int64_t col = group * kCols, row = pieces.start(panel);
        return Product<T, Out>{x + row * x_stride,
                               x_stride,
                               pieces.start(panel + 1) - row,
                               static_cast<const T*>(p.weight) + group * group_size<T>(p.depth),
                               depth,
                               p.bias == nullptr ? nullptr : p.bias + col,
                               static_cast<int>(std::min<int64_t>(kCols, p.num_cols - col)),
                               y + row * p.num_cols + col,
                               p.num_cols};
    };
    parallel_for(pieces.size(), 1, true, p.num_threads, [&](int64_t begin, int64_t end) {
        multiply_items<T, Out>(begin, end, product_of);
    });
}

// Rows of x that are widened at a time, where the kernels do not read it as it lies.
constexpr int64_t kWidenedRows = 512;

template <class T>
void multiply_heads(const PdHeadLinear& p) {
    using Input = typename Format<T>::Input;
    const int64_t depth = padded_depth<T>(p.depth);
    const bool as_it_lies = std::is_same_v<T, Input> && p.depth == depth;
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
            x_stride = depth, x_head_stride = rows * depth;
            auto* copy = static_cast<Input*>(
                scratch(Scratch::kInput, p.num_heads * x_head_stride * sizeof(Input)));
            for (int64_t h = 0; h < p.num_heads; h++) {
                for (int64_t r = 0; r < rows; r++) {
                    widen_row(from + r * p.x_stride + h * p.x_head_stride, p.depth, depth,
                              copy + h * x_head_stride + r * x_stride);
                }
            }
            x = copy;
        }
        T* y = static_cast<T*>(p.y) + first * p.y_stride;
        const Cut pieces = cut<T>(rows, depth, p.num_heads * num_groups, p.num_threads);
        const auto product_of = [&](int64_t item) {
            const int64_t head = pieces.group(item) / num_groups;
            const int64_t group = pieces.group(item) % num_groups, panel = pieces.panel(item);
            const int64_t col = group * kCols, row = pieces.start(panel);
            return Product<T, T>{
                x + row * x_stride + head * x_head_stride,
                x_stride,
                pieces.start(panel + 1) - row,
                static_cast<const T*>(p.weight) + head * head_size + group * group_size<T>(p.depth),
                depth,
                nullptr,
                static_cast<int>(std::min<int64_t>(kCols, p.num_cols - col)),
                y + row * p.y_stride + head * p.y_head_stride + col,
                p.y_stride};
        };
        parallel_for(pieces.size(), 1, true, p.num_threads, [&](int64_t begin, int64_t end) {
            multiply_items<T, T>(begin, end, product_of);
        });
    }
}

}  // namespace
}  // namespace pd

extern "C" {

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
