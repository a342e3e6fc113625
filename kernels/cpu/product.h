// How a stored operand of type T takes part in a sum of products.

#pragma once

#include "amx.h"
#include "simd.h"

namespace pd {

// `Input` is the type of the other operand. A step adds kDepth products to each of 16 sums:
// w holds [16][kDepth] values of T, and x what all 16 are multiplied by: of Format<Input>::kDepth
// k's side by side, and `next` elements on of those after. Packed operands have a multiple of
// kPadding k's.
template <class T>
struct Format {
    using Input = float;
    static constexpr int kDepth = 1, kPadding = 1;
    static F16 step(F16 sum, const T* w, const float* x, int64_t = 0) {
        return add_product(sum, x, load(w));
    }
};

#ifdef PD_DPBF16
template <>
struct Format<Bf16> {
    using Input = Bf16;
    static constexpr int kDepth = 2;
#ifdef PD_AMX
    static constexpr int kPadding = kTileDepth;
#else
    static constexpr int kPadding = kDepth;
#endif
    static F16 step(F16 sum, const Bf16* w, const Bf16* x, int64_t = 0) {
        int32_t pair;
        std::memcpy(&pair, x, sizeof pair);
        const __m512i weights = _mm512_loadu_si512(w);
        const __m512i inputs = _mm512_set1_epi32(pair);
        return {_mm512_dpbf16_ps(sum.v, (__m512bh)weights, (__m512bh)inputs)};
    }
};
#else
// A shift and a mask widen the weights of two k's.
template <>
struct Format<Bf16> {
    using Input = float;
    static constexpr int kDepth = 2, kPadding = 2;
    static F16 step(F16 sum, const Bf16* w, const float* x, int64_t next) {
        const Pair pair = load_pairs(w);
        return add_product(add_product(sum, x, pair.even), x + next, pair.odd);
    }
};
#endif

}  // namespace pd
