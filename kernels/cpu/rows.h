// Operations on one row, or a part of it.

#pragma once

#include "simd.h"

namespace pd {

// Calls body(offset, count) for whole vectors and then for the rest.
template <class Body>
inline void for_lanes(int64_t size, Body&& body) {
    int64_t at = 0;
    for (; at + kLanes <= size; at += kLanes) body(at, kLanes);
    if (at < size) body(at, static_cast<int>(size - at));
}

template <class T>
inline F16 load_some(const T* p, int count) {
    return count == kLanes ? load(p) : load(p, count);
}
template <class T>
inline void store_some(T* p, F16 a, int count) {
    if (count == kLanes) store(p, a);
    else store(p, a, count);
}

// y = silu(x) * z for x and z of [width], which lie side by side.
template <class T>
void silu_row(const T* x, T* y, int64_t width) {
    for_lanes(width, [&](int64_t i, int count) {
        const F16 gate = load_some(x + i, count);
        // exp(-gate), kept finite.
        const F16 decay = exp2_of(zero() - max(gate * splat(kLog2E), splat(-126.0f)));
        const F16 silu = rounded_to<T>(gate / (splat(1.0f) + decay));
        store_some(y + i, silu * load_some(x + width + i, count), count);
    });
}

// The same with gelu(x) = x * (1 + tanh(u)) / 2 = x * sigmoid(2 u) for
// u = sqrt(2 / pi) * (x + 0.044715 x^3).
template <class T>
void gelu_row(const T* x, T* y, int64_t width) {
    constexpr float kFirst = 1.5957691216f * kLog2E, kThird = 0.044715f * kFirst;
    for_lanes(width, [&](int64_t i, int count) {
        const F16 gate = load_some(x + i, count);
        const F16 steep = gate * fma(gate * gate, splat(kThird), splat(kFirst));
        const F16 decay = exp2_of(zero() - max(steep, splat(-126.0f)));
        const F16 gelu = rounded_to<T>(gate / (splat(1.0f) + decay));
        store_some(y + i, gelu * load_some(x + width + i, count), count);
    });
}

// y = (u + 1) * g * sigmoid(alpha * g) for g and u of [width], side by side at x, once g is at most
// limit and u between -limit and limit. NaN stays NaN.
template <class T>
void clamped_glu_row(const T* x, T* y, int64_t width, float alpha, float limit) {
    const F16 least = splat(-limit), most = splat(limit), one = splat(1.0f);
    const auto at_most = [&](F16 a) { return zero() - max(least, zero() - a); };
    for_lanes(width, [&](int64_t i, int count) {
        const F16 gate = at_most(load_some(x + i, count));
        const F16 up = at_most(max(zero() - most, load_some(x + width + i, count)));
        const F16 decay = exp2_of(zero() - max(gate * splat(alpha * kLog2E), splat(-126.0f)));
        store_some(y + i, (up + one) * (gate / (one + decay)), count);
    });
}

}  // namespace pd
