// y = x W^T + b, with W packed once (packed.h).
//
// Batch invariance: an element of y is one fp32 accumulator that starts at zero and takes the steps
// in order, whatever it is computed beside: lanes of vectors, or tiles (amx.h), whose own order
// within a step is fixed too. Vectors and tiles differ in that order, so a process keeps to one of
// the two for all products of bf16: tiles, where the CPU and the operating system have them. One or
// two rows are then multiplied by vectors that do what tiles do, bit for bit.

#include <unistd.h>

#include <algorithm>
#include <type_traits>

#include "kernels.h"
#include "linear_tiles.h"
#include "linear_vectors.h"
#include "pool.h"

namespace pd {
namespace {

// Products of T are those of tiles.
template <class T>
bool by_tiles() {
    return std::is_same_v<T, Bf16> && have_tiles();
}

// How the rows of x and the groups of columns become pieces of work: all groups for a panel of
// rows, which start at multiples of `unit`, then all groups for the next one.
struct Cut {
    int64_t num_groups, num_panels, rows, unit;

    int64_t size() const { return num_groups * num_panels; }
    int64_t group(int64_t item) const { return item % num_groups; }
    int64_t panel(int64_t item) const { return item / num_groups; }
    int64_t start(int64_t panel) const {
        return panel == num_panels ? rows : rows * panel / num_panels / unit * unit;
    }
};

// At most so many bytes of x stay in L2 while the weights pass by, and the sums of so many rows.
constexpr int64_t kMostPanelBytes = 768 << 10, kPanelRows = 512;

// What this CPU's L2 holds of them beside the weights.
int64_t panel_bytes() {
    static const int64_t bytes = [] {
        const int64_t l2 = sysconf(_SC_LEVEL2_CACHE_SIZE);
        return l2 > 0 ? std::min(kMostPanelBytes, l2 / 4 * 3) : kMostPanelBytes;
    }();
    return bytes;
}

// Fewer rows do not use a group of weights often enough to bring it from L2.
constexpr int64_t kFewRows = 64;

// Enough pieces to keep the threads level, each large enough to use its group of weights often.
template <class T>
Cut cut(int64_t rows, int64_t band, int64_t depth, int64_t num_groups, int num_threads) {
    const int64_t row_bytes =
        std::max<int64_t>(depth * int64_t{sizeof(typename Format<T>::Input)}, 1);
    const int64_t at_once = std::min(kPanelRows, std::max(kFewRows, panel_bytes() / row_bytes));
    int64_t num_panels = (rows + at_once - 1) / at_once;
    while (num_threads > 1 && num_groups * num_panels < 4 * num_threads &&
           rows / num_panels >= 2 * kFewRows) {
        num_panels *= 2;
    }
    return {num_groups, num_panels, rows, by_tiles<T>() ? kTileRows : band};
}

// Calls of(item) for the product of each piece of work in [begin, end), of `size` in all, and
// computes it. Behind a thread's piece mostly lies its next one.
template <class T, class Out, class Of>
void multiply_items(int64_t begin, int64_t end, int64_t size, Of&& of) {
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
    for (; begin < end; begin++) {
        Product<T, Out> product = of(begin);
        if (begin + 1 < size) product.next = of(begin + 1).w;
        multiply_by_vectors(product);
    }
}

// Rows of x that lie side by side as the kernels read them: for vectors in bands, for tiles one by
// one, which is a band of one row.
template <class T>
int64_t band_of(int64_t rows) {
    return by_tiles<T>() ? 1 : band_rows(rows);
}

// Whether the kernels read x as it lies, if its rows are contiguous.
template <class T>
bool as_it_lies(int64_t band, int64_t depth) {
    return std::is_same_v<T, typename Format<T>::Input> && band == 1 &&
           depth == padded_depth<T>(depth);
}

// Rows of x in bands, zero padded as the weights are.
template <class T>
void lay_out(const T* x, int64_t x_stride, int64_t rows, int64_t band, int64_t depth,
             typename Format<T>::Input* to, int num_threads) {
    const int64_t padded = padded_depth<T>(depth);
    parallel_for((rows + band - 1) / band, 4, false, num_threads, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin * band; row < std::min(end * band, rows); row += band) {
            pack_band(x + row * x_stride, x_stride, std::min(band, rows - row), depth, padded,
                      to + row * padded);
        }
    });
}

// x of a product as the kernels read it, in a buffer of this thread where it does not lie so.
template <class T>
const typename Format<T>::Input* input_of(const PdLinear& p, int64_t band) {
    using Input = typename Format<T>::Input;
    if (as_it_lies<T>(band, p.depth)) return static_cast<const Input*>(p.x);
    const int64_t num_bytes = p.rows * padded_depth<T>(p.depth) * int64_t{sizeof(Input)};
    auto* bands = static_cast<Input*>(scratch(Scratch::kInput, num_bytes));
    lay_out(static_cast<const T*>(p.x), p.depth, p.rows, band, p.depth, bands, p.num_threads);
    return bands;
}

template <class T, class Out>
void multiply(const PdLinear& p, Out* y) {
    const int64_t depth = padded_depth<T>(p.depth), band = band_of<T>(p.rows);
    const auto* x = input_of<T>(p, band);
    const int64_t num_groups = (p.num_cols + kCols - 1) / kCols;
    const Cut pieces = cut<T>(p.rows, band, depth, num_groups, p.num_threads);
    const auto product_of = [&](int64_t item) {
        const int64_t group = pieces.group(item), panel = pieces.panel(item);
        const int64_t col = group * kCols, row = pieces.start(panel);
        return Product<T, Out>{x + row * depth,
                               depth,
                               pieces.start(panel + 1) - row,
                               band,
                               static_cast<const T*>(p.weight) + group * group_size<T>(p.depth),
                               depth,
                               p.bias == nullptr ? nullptr : p.bias + col,
                               static_cast<int>(std::min<int64_t>(kCols, p.num_cols - col)),
                               y + row * p.num_cols + col,
                               p.num_cols};
    };
    parallel_for(pieces.size(), 1, true, p.num_threads, [&](int64_t begin, int64_t end) {
        multiply_items<T, Out>(begin, end, pieces.size(), product_of);
    });
}

// A group of gates and the group of what they let through are multiplied one after the other, by
// one thread, which makes one of both as it completes the second.
template <class T>
void multiply_gated(const PdLinear& p, T* y) {
    constexpr int64_t kBoth = 2 * kCols;
    const int64_t depth = padded_depth<T>(p.depth), band = band_of<T>(p.rows);
    const auto* x = input_of<T>(p, band);
    const int64_t width = p.num_cols / 2, num_pairs = width / kCols;
    const Cut pieces = cut<T>(p.rows, band, depth, num_pairs, p.num_threads);
    parallel_for(pieces.size(), 1, true, p.num_threads, [&](int64_t begin, int64_t end) {
        for (int64_t item = begin; item < end; item++) {
            const int64_t pair = pieces.group(item), row = pieces.start(pieces.panel(item));
            const int64_t rows = pieces.start(pieces.panel(item) + 1) - row;
            auto* both = static_cast<T*>(
                scratch(Scratch::kPair, rows * kBoth * static_cast<int64_t>(sizeof(T))));
            multiply_items<T, T>(0, 2, 2, [&](int64_t half) {
                const int64_t group = pair + half * num_pairs;
                return Product<T, T>{
                    x + row * depth,
                    depth,
                    rows,
                    band,
                    static_cast<const T*>(p.weight) + group * group_size<T>(p.depth),
                    depth,
                    p.bias == nullptr ? nullptr : p.bias + group * kCols,
                    kCols,
                    both + half * kCols,
                    kBoth,
                    nullptr,
                    half == 0 ? nullptr : y + row * width + pair * kCols,
                    width};
            });
        }
    });
}

// Rows of x that are laid out at a time, where the kernels do not read it as it lies.
constexpr int64_t kRowsAtOnce = 512;

template <class T>
void multiply_heads(const PdHeadLinear& p) {
    using Input = typename Format<T>::Input;
    const int64_t depth = padded_depth<T>(p.depth);
    const bool as_is = as_it_lies<T>(band_of<T>(p.rows), p.depth);
    const int64_t num_groups = (p.num_cols + kCols - 1) / kCols;
    const int64_t head_size = num_groups * group_size<T>(p.depth);
    const int64_t rows_at_once = as_is ? p.rows : kRowsAtOnce;
    for (int64_t first = 0; first < p.rows; first += rows_at_once) {
        const int64_t rows = std::min(rows_at_once, p.rows - first), band = band_of<T>(rows);
        const T* from = static_cast<const T*>(p.x) + first * p.x_stride;
        const auto* x = reinterpret_cast<const Input*>(from);
        int64_t x_stride = p.x_stride, x_head_stride = p.x_head_stride;
        if (!as_is) {
            x_stride = depth, x_head_stride = rows * depth;
            auto* bands = static_cast<Input*>(
                scratch(Scratch::kInput, p.num_heads * x_head_stride * int64_t{sizeof(Input)}));
            for (int64_t h = 0; h < p.num_heads; h++) {
                lay_out(from + h * p.x_head_stride, p.x_stride, rows, band, p.depth,
                        bands + h * x_head_stride, p.num_threads);
            }
            x = bands;
        }
        T* y = static_cast<T*>(p.y) + first * p.y_stride;
        const Cut pieces = cut<T>(rows, band, depth, p.num_heads * num_groups, p.num_threads);
        const auto product_of = [&](int64_t item) {
            const int64_t head = pieces.group(item) / num_groups;
            const int64_t group = pieces.group(item) % num_groups, panel = pieces.panel(item);
            const int64_t col = group * kCols, row = pieces.start(panel);
            return Product<T, T>{
                x + row * x_stride + head * x_head_stride,
                x_stride,
                pieces.start(panel + 1) - row,
                band,
                static_cast<const T*>(p.weight) + head * head_size + group * group_size<T>(p.depth),
                depth,
                nullptr,
                static_cast<int>(std::min<int64_t>(kCols, p.num_cols - col)),
                y + row * p.y_stride + head * p.y_head_stride + col,
                p.y_stride};
        };
        parallel_for(pieces.size(), 1, true, p.num_threads, [&](int64_t begin, int64_t end) {
            multiply_items<T, T>(begin, end, pieces.size(), product_of);
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

void pd_gated_linear(const PdLinear* p) {
    pd::with_type(p->type, [&](auto kind) {
        using T = decltype(kind);
        pd::multiply_gated<T>(*p, static_cast<T*>(p->y));
    });
}

void pd_head_linear(const PdHeadLinear* p) {
    if (p->rows == 0) return;
    pd::with_type(p->type, [&](auto kind) { pd::multiply_heads<decltype(kind)>(*p); });
}
}
