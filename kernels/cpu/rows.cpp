// Operations on one token at a time: norms, gated activation, rotation with the cache write.
//
// Each row is computed by one thread, start to end, in an order that its length alone decides.

#include <algorithm>
#include <cmath>

#include "kernels.h"
#include "pool.h"
#include "rows.h"

namespace pd {
namespace {

// Elements under which waking a second thread costs more than it saves.
constexpr int64_t kWorthSplitting = 8192;

// Calls body(begin, end) over the rows, on several threads if there is enough to do.
template <class Body>
void for_rows(int64_t rows, int64_t width, int num_threads, Body&& body) {
    const int64_t chunk = std::max<int64_t>(1, kWorthSplitting / 4 / std::max<int64_t>(width, 1));
    parallel_for(rows, chunk, false, rows * width < kWorthSplitting ? 1 : num_threads, body);
}

// y = round(weight * round(x / rms(x))); weights of fp32 leave out the inner rounding. A residual,
// if there is one, becomes round(residual + x) and takes the place of x.
template <class T, class W>
void norm_row(const T* x, T* residual, const W* weight, T* y, int64_t width, float eps) {
    F16 squares = zero();
    for_lanes(width, [&](int64_t i, int count) {
        F16 a = load_some(x + i, count);
        if (residual != nullptr) {
            a = rounded_to<T>(a + load_some(residual + i, count));
            store_some(residual + i, a, count);
        }
        squares = fma(a, a, squares);
    });
    const float mean = sum_lanes(squares) / static_cast<float>(width);
    const F16 scale = splat(1.0f / std::sqrt(mean + eps));
    const T* source = residual == nullptr ? x : residual;
    for_lanes(width, [&](int64_t i, int count) {
        const F16 normed = rounded_to<W>(load_some(source + i, count) * scale);
        store_some(y + i, normed * load_some(weight + i, count), count);
    });
}

// Rotates one head from x to y. cos and sin: [half], already rounded to T.
template <class T>
void rotate_head(const T* x, T* y, const float* cos, const float* sin, int64_t half,
                 int64_t head_dim) {
    for_lanes(half, [&](int64_t i, int count) {
        const F16 low = load_some(x + i, count), high = load_some(x + half + i, count);
        const F16 c = load_some(cos + i, count), s = load_some(sin + i, count);
        const F16 turned_low = rounded_to<T>(low * c) - rounded_to<T>(high * s);
        const F16 turned_high = rounded_to<T>(high * c) + rounded_to<T>(low * s);
        store_some(y + i, turned_low, count);
        store_some(y + half + i, turned_high, count);
    });
    std::copy(x + 2 * half, x + head_dim, y + 2 * half);
}

template <class T, class W>
void rope_and_cache(const PdRopeAndCache& p, int64_t begin, int64_t end) {
    const int64_t half = p.rotary_dim / 2;
    const int64_t head_stride = p.block_size * p.head_dim;  // between KV heads of a block
    auto* cos = static_cast<float*>(
        scratch(Scratch::kTile, (p.rotary_dim + p.head_dim) * static_cast<int64_t>(sizeof(float))));
    float* sin = cos + half;
    T* normed = reinterpret_cast<T*>(sin + half);
    const auto turn = [&](const T* from, const void* norm, T* to) {
        if (norm != nullptr) {
            norm_row<T, W>(from, nullptr, static_cast<const W*>(norm), normed, p.head_dim, p.eps);
            from = normed;
        }
        rotate_head(from, to, cos, sin, half, p.head_dim);
    };
    for (int64_t row = begin; row < end; row++) {
        const float* table = p.cos_sin + p.positions[row] * p.rotary_dim;
        for_lanes(p.rotary_dim, [&](int64_t i, int count) {
            store_some(cos + i, rounded_to<T>(load_some(table + i, count)), count);
        });
        const T* from = static_cast<const T*>(p.qkv) +
                        row * (p.num_heads + 2 * p.num_kv_heads) * p.head_dim;
        T* to = static_cast<T*>(p.q) + row * p.num_heads * p.head_dim;
        for (int64_t head = 0; head < p.num_heads; head++, from += p.head_dim, to += p.head_dim) {
            turn(from, p.q_norm, to);
        }
        if (p.slots[row] < 0) continue;
        T* keys = static_cast<T*>(p.kv) + p.slots[row] / p.block_size * p.block_stride +
                  p.slots[row] % p.block_size * p.head_dim;
        T* values = keys + p.num_kv_heads * head_stride;
        for (int64_t head = 0; head < p.num_kv_heads; head++, from += p.head_dim) {
            turn(from, p.k_norm, keys + head * head_stride);
            const T* value = from + p.num_kv_heads * p.head_dim;
            std::copy(value, value + p.head_dim, values + head * head_stride);
        }
    }
}

template <class T>
void rope_and_latent(const PdRopeAndLatent& p, int64_t begin, int64_t end) {
    const int64_t half = p.rotary_dim / 2, wide = p.latent_dim + p.rotary_dim;
    auto* cos = static_cast<float*>(
        scratch(Scratch::kTile, p.rotary_dim * static_cast<int64_t>(sizeof(float))));
    float* sin = cos + half;
    for (int64_t row = begin; row < end; row++) {
        const float* table = p.cos_sin + p.positions[row] * p.rotary_dim;
        for_lanes(p.rotary_dim, [&](int64_t i, int count) {
            store_some(cos + i, rounded_to<T>(load_some(table + i, count)), count);
        });
        const T* q = static_cast<const T*>(p.q) + (row * p.num_heads + 1) * p.head_dim;
        T* to = static_cast<T*>(p.queries) + row * p.num_heads * wide + p.latent_dim;
        for (int64_t head = 0; head < p.num_heads; head++, q += p.head_dim, to += wide) {
            rotate_head(q - p.rotary_dim, to, cos, sin, half, p.rotary_dim);
        }
        if (p.slots[row] < 0) continue;
        const T* latent = static_cast<const T*>(p.latent) + row * wide;
        T* key = static_cast<T*>(p.kv) + p.slots[row] / p.block_size * p.block_stride +
                 p.slots[row] % p.block_size * wide;
        norm_row<T, T>(latent, nullptr, static_cast<const T*>(p.norm), key, p.latent_dim, p.eps);
        rotate_head(latent + p.latent_dim, key + p.latent_dim, cos, sin, half, p.rotary_dim);
    }
}

// Calls body with values of the types of a row and of its weights.
template <class Body>
void with_types(PdType type, PdType weight_type, Body&& body) {
    with_type(type, [&](auto kind) {
        if (weight_type == type) body(kind, kind);
        else body(kind, float{});
    });
}

// Whether each position is in the table and each slot in the cache.
PdStatus places_status(const int64_t* positions, const int64_t* slots, int64_t rows,
                       int64_t num_positions, int64_t num_slots) {
    for (int64_t row = 0; row < rows; row++) {
        if (positions[row] < 0 || positions[row] >= num_positions) return kBadPosition;
        if (slots[row] >= num_slots) return kBadSlot;
    }
    return kOk;
}

}  // namespace
}  // namespace pd

extern "C" {

void pd_rms_norm(const PdRmsNorm* p) {
    pd::with_types(p->type, p->weight_type, [&](auto kind, auto weight_kind) {
        using T = decltype(kind);
        using W = decltype(weight_kind);
        pd::for_rows(p->rows, p->width, p->num_threads, [&](int64_t begin, int64_t end) {
            for (int64_t at = begin * p->width; at < end * p->width; at += p->width) {
                T* residual = p->residual == nullptr ? nullptr : static_cast<T*>(p->residual) + at;
                pd::norm_row(static_cast<const T*>(p->x) + at, residual,
                             static_cast<const W*>(p->weight), static_cast<T*>(p->y) + at,
                             p->width, p->eps);
            }
        });
    });
}

void pd_gate(const PdGate* p) {
    pd::with_type(p->type, [&](auto kind) {
        using T = decltype(kind);
        pd::for_rows(p->rows, 2 * p->width, p->num_threads, [&](int64_t begin, int64_t end) {
            for (int64_t row = begin; row < end; row++) {
                const T* x = static_cast<const T*>(p->x) + row * 2 * p->width;
                T* y = static_cast<T*>(p->y) + row * p->width;
                p->gelu ? pd::gelu_row(x, y, p->width) : pd::silu_row(x, y, p->width);
            }
        });
    });
}

int32_t pd_rope_and_cache(const PdRopeAndCache* p) {
    const PdStatus status = pd::places_status(p->positions, p->slots, p->rows, p->num_positions,
                                              p->num_blocks * p->block_size);
    if (status != kOk) return status;
    const int64_t width = (p->num_heads + 2 * p->num_kv_heads) * p->head_dim;
    pd::with_types(p->type, p->norm_type, [&](auto kind, auto norm_kind) {
        pd::for_rows(p->rows, width, p->num_threads, [&](int64_t begin, int64_t end) {
            pd::rope_and_cache<decltype(kind), decltype(norm_kind)>(*p, begin, end);
        });
    });
    return kOk;
}
int32_t pd_rope_and_latent(const PdRopeAndLatent* p) {
    const PdStatus status = pd::places_status(p->positions, p->slots, p->rows, p->num_positions,
                                              p->num_blocks * p->block_size);
    if (status != kOk) return status;
    const int64_t width = p->num_heads * p->rotary_dim + p->latent_dim;
    pd::with_type(p->type, [&](auto kind) {
        pd::for_rows(p->rows, width, p->num_threads, [&](int64_t begin, int64_t end) {
            pd::rope_and_latent<decltype(kind)>(*p, begin, end);
        });
    });
    return kOk;
}
}
