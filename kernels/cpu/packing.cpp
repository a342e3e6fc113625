// Weights to their packed layout and back.

#include <algorithm>

#include "kernels.h"
#include "packed.h"
#include "pool.h"

namespace pd {
namespace {

// Where element (col, k) of the weight lies in the packed one.
template <class T>
int64_t packed_index(int64_t col, int64_t k, int64_t depth) {
    constexpr int kDepth = Format<T>::kDepth;
    return col / kCols * group_size<T>(depth) +
           (k / kDepth * kCols + col % kCols) * kDepth + k % kDepth;
}

template <class T>
void pack(const PdPack& p) {
    const T* from = static_cast<const T*>(p.weight);
    T* to = static_cast<T*>(p.packed);
    const int64_t end_col = p.first_col + p.num_cols, first_group = p.first_col / kCols;
    const int64_t num_groups = (end_col + kCols - 1) / kCols - first_group;
    parallel_for(num_groups, 1, true, p.num_threads, [&](int64_t begin, int64_t end) {
        const int64_t last = std::min((first_group + end) * kCols, end_col);
        for (int64_t col = std::max((first_group + begin) * kCols, p.first_col); col < last; col++) {
            const T* row = from + (col - p.first_col) * p.stride;
            for (int64_t k = 0; k < p.depth; k++) to[packed_index<T>(col, k, p.depth)] = row[k];
        }
    });
}

template <class T>
void unpack_row(const T* from, int64_t col, int64_t depth, T* to) {
    for (int64_t k = 0; k < depth; k++) to[k] = from[packed_index<T>(col, k, depth)];
}

template <class T>
void unpack(const PdPack& p) {
    T* to = static_cast<T*>(p.weight);
    for (int64_t i = 0; i < p.num_cols; i++) {
        unpack_row(static_cast<const T*>(p.packed), p.first_col + i, p.depth, to + i * p.stride);
    }
}

template <class T>
void take_rows(const PdTakeRows& p) {
    constexpr int64_t kChunk = 16;
    T* to = static_cast<T*>(p.y);
    const int num_threads = p.rows <= kChunk ? 1 : p.num_threads;
    parallel_for(p.rows, kChunk, false, num_threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            const int64_t col = p.ids[i] - p.first_id;
            if (col >= 0 && col < p.num_cols) {
                unpack_row(static_cast<const T*>(p.packed), col, p.depth, to + i * p.depth);
            } else {
                std::fill(to + i * p.depth, to + (i + 1) * p.depth, T{});
            }
        }
    });
}

}  // namespace
}  // namespace pd

extern "C" {

// Bytes of a packed weight, which wants 64-byte alignment.
int64_t pd_packed_bytes(int64_t num_cols, int64_t depth, PdType type) {
    const int64_t num_groups = (num_cols + pd::kCols - 1) / pd::kCols;
    return pd::with_type(type, [&](auto kind) {
        using T = decltype(kind);
        return static_cast<int64_t>(num_groups * pd::group_size<T>(depth) * sizeof(T));
    });
}

void pd_pack(const PdPack* p) {
    pd::with_type(p->type, [&](auto kind) { pd::pack<decltype(kind)>(*p); });
}

void pd_unpack(const PdPack* p) {
    pd::with_type(p->type, [&](auto kind) { pd::unpack<decltype(kind)>(*p); });
}

int32_t pd_take_rows(const PdTakeRows* p) {
    for (int64_t i = 0; i < p->rows; i++) {
        if (p->ids[i] < 0 || p->ids[i] >= p->num_ids) return kBadId;
    }
    pd::with_type(p->type, [&](auto kind) { pd::take_rows<decltype(kind)>(*p); });
    return kOk;
}
}
