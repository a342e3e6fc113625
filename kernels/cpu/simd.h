// Sixteen fp32 lanes, and the storage formats they are loaded from and rounded to.
//
// Two implementations of one interface: AVX-512, and GCC vector extensions, which any target
// compiles (two ymm registers per value on AVX2). All arithmetic of the kernels goes through here,
// so a lane's result never depends on its neighbours.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define PD_AVX512 1
#endif

// Pairs of bf16 products summed into fp32 in one instruction.
#if defined(PD_AVX512) && defined(__AVX512BF16__)
#define PD_DPBF16 1
#endif

namespace pd {

constexpr int kLanes = 16;
constexpr float kMinusInf = -std::numeric_limits<float>::infinity();

struct Bf16 {
    uint16_t bits;
};
struct Fp16 {
    uint16_t bits;
};

inline float bits_to_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline uint32_t float_to_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

#ifdef PD_AVX512

struct F16 {
    __m512 v;
};

inline F16 zero() { return {_mm512_setzero_ps()}; }
inline F16 splat(float x) { return {_mm512_set1_ps(x)}; }
inline F16 operator+(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F16 operator-(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F16 operator*(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F16 operator/(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F16 max(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }
// a * b + c
inline F16 fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// *x * w + sum
inline F16 add_product(F16 sum, const float* x, F16 w) { return fma(splat(*x), w, sum); }

inline __mmask16 first_lanes(int count) {
    return static_cast<__mmask16>((1u << count) - 1u);
}

inline F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline F16 load(const float* p, int count) {
    return {_mm512_maskz_loadu_ps(first_lanes(count), p)};
}
inline F16 widen(__m256i bits, Bf16) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
}
inline F16 widen(__m256i bits, Fp16) { return {_mm512_cvtph_ps(bits)}; }
template <class T>
inline F16 load(const T* p) {
    return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), T{});
}
template <class T>
inline F16 load(const T* p, int count) {
    return widen(_mm256_maskz_loadu_epi16(first_lanes(count), p), T{});
}

// Sixteen pairs, as floats.
struct Pair {
    F16 even, odd;
};

inline Pair load_pairs(const Bf16* p) {
    const __m512i pairs = _mm512_loadu_si512(p);
    const __m512i odd_half = _mm512_set1_epi32(static_cast<int>(0xffff0000));
    return {{_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))},
            {_mm512_castsi512_ps(_mm512_and_si512(pairs, odd_half))}};
}

inline __m256i narrow(F16 a, Fp16) {
    return _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline __m256i narrow(F16 a, Bf16) {
#ifdef PD_DPBF16
    const __m256bh rounded = _mm512_cvtneps_pbh(a.v);
    __m256i bits;
    std::memcpy(&bits, &rounded, sizeof bits);
    return bits;
#else
    const __m512i raw = _mm512_castps_si512(a.v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(raw, 16), _mm512_set1_epi32(1));
    const __m512i nearest = _mm512_add_epi32(raw, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
    const __m512i kept = _mm512_mask_or_epi32(nearest, nan, raw, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16));
#endif
}
inline void store(float* p, F16 a) { _mm512_storeu_ps(p, a.v); }
inline void store(float* p, F16 a, int count) { _mm512_mask_storeu_ps(p, first_lanes(count), a.v); }
template <class T>
inline void store(T* p, F16 a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(a, T{}));
}
template <class T>
inline void store(T* p, F16 a, int count) {
    _mm256_mask_storeu_epi16(p, first_lanes(count), narrow(a, T{}));
}
template <class T>
inline F16 rounded_to(F16 a) {
    return widen(narrow(a, T{}), T{});
}

// The pairing of lanes in both reductions is fixed: 8 apart, then 4, 2, 1.
inline float sum_lanes(F16 a) {
    const __m256 high = _mm512_extractf32x8_ps(a.v, 1);
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a.v), high);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float max_lanes(F16 a) { return _mm512_reduce_max_ps(a.v); }
inline F16 with_lane(F16 a, int lane, float x) {
    const __mmask16 one = static_cast<__mmask16>(1u << lane);
    return {_mm512_mask_broadcastss_ps(a.v, one, _mm_set_ss(x))};
}

// Lanes i with low <= i <= high keep their value, the others become minus infinity.
inline F16 keep_lanes(F16 a, int low, int high) {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __mmask16 kept = _mm512_cmple_epi32_mask(_mm512_set1_epi32(low), lane) &
                           _mm512_cmple_epi32_mask(lane, _mm512_set1_epi32(high));
    return {_mm512_mask_blend_ps(kept, _mm512_set1_ps(kMinusInf), a.v)};
}

// 2^n * a for integral n and a near 1; underflows to zero. Without the mask a vector of results that
// underflow, as masked positions' do, takes a microcode assist: hundreds of cycles.
inline F16 scale_by_power(F16 a, F16 n) {
    const __mmask16 normal = _mm512_cmp_ps_mask(n.v, _mm512_set1_ps(-125.0f), _CMP_GE_OQ);
    return {_mm512_maskz_scalef_ps(normal, a.v, n.v)};
}
inline F16 round_to_integer(F16 a) {
    return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}

#else  // GCC vector extensions

typedef float V8 __attribute__((vector_size(32)));
typedef int32_t I8 __attribute__((vector_size(32)));
typedef uint32_t U8 __attribute__((vector_size(32)));
typedef uint16_t H8 __attribute__((vector_size(16)));

struct F16 {
    V8 v[2];
};

inline V8 splat8(float x) { return V8{x, x, x, x, x, x, x, x}; }
inline F16 splat(float x) { return {{splat8(x), splat8(x)}}; }
inline F16 zero() { return splat(0.0f); }
inline F16 operator+(F16 a, F16 b) { return {{a.v[0] + b.v[0], a.v[1] + b.v[1]}}; }
inline F16 operator-(F16 a, F16 b) { return {{a.v[0] - b.v[0], a.v[1] - b.v[1]}}; }
inline F16 operator*(F16 a, F16 b) { return {{a.v[0] * b.v[0], a.v[1] * b.v[1]}}; }
inline F16 operator/(F16 a, F16 b) { return {{a.v[0] / b.v[0], a.v[1] / b.v[1]}}; }
inline F16 max(F16 a, F16 b) {
    return {{a.v[0] > b.v[0] ? a.v[0] : b.v[0], a.v[1] > b.v[1] ? a.v[1] : b.v[1]}};
}
// a * b + c, rounded once where the target has FMA. On x86 by intrinsics: GCC, which contracts what is
// written out (-ffp-contract=fast), leaves out some of a chain for Zen 1 to 3 (-mtune), and so rounds
// a row in one loop unlike a row in another.
inline V8 fma(V8 a, V8 b, V8 c) {
#ifdef __FMA__
    return _mm256_fmadd_ps(a, b, c);
#else
    return a * b + c;
#endif
}
inline F16 fma(F16 a, F16 b, F16 c) {
    return {{fma(a.v[0], b.v[0], c.v[0]), fma(a.v[1], b.v[1], c.v[1])}};
}
// *x * w + sum. As one: with 12 sums in 16 registers, GCC otherwise loads inputs early or sums into
// them, and for some CPUs (-mtune) spills sums, which takes half as long again.
inline F16 add_product(F16 sum, const float* x, F16 w) {
#ifdef __FMA__
    V8 input;
    asm("vbroadcastss %3, %2\n\tvfmadd231ps %4, %2, %0\n\tvfmadd231ps %5, %2, %1"
        : "+&x"(sum.v[0]), "+x"(sum.v[1]), "=&x"(input)
        : "m"(*x), "x"(w.v[0]), "x"(w.v[1]));
    return sum;
#else
    return fma(splat(*x), w, sum);
#endif
}

inline float widen_one(float x) { return x; }
inline float widen_one(Bf16 x) { return bits_to_float(static_cast<uint32_t>(x.bits) << 16); }
inline float widen_one(Fp16 x) {
    const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16;
    const uint32_t magnitude = x.bits & 0x7fff;
    if (magnitude >= 0x7c00) return bits_to_float(sign | 0x7f800000 | (magnitude << 13));
    // Rebias the exponent by a product: exact, for subnormals too.
    const float scaled = bits_to_float(magnitude << 13) * bits_to_float((254 - 15) << 23);
    return bits_to_float(sign | float_to_bits(scaled));
}

template <class T>
inline T narrow_one(float x);
template <>
inline float narrow_one<float>(float x) {
    return x;
}
template <>
inline Bf16 narrow_one<Bf16>(float x) {
    const uint32_t raw = float_to_bits(x);
    if (x != x) return {static_cast<uint16_t>((raw >> 16) | 0x40)};
    return {static_cast<uint16_t>((raw + 0x7fff + ((raw >> 16) & 1)) >> 16)};
}
template <>
inline Fp16 narrow_one<Fp16>(float x) {
    const uint32_t raw = float_to_bits(x);
    const uint16_t sign = static_cast<uint16_t>((raw >> 16) & 0x8000);
    const uint32_t magnitude = raw & 0x7fffffff;
    uint32_t bits;
    if (magnitude > 0x7f800000) {
        bits = 0x7e00;
    } else if (magnitude >= 0x477ff000) {  // rounds to 2^16 or more
        bits = 0x7c00;
    } else if (magnitude < 0x38800000) {  // subnormal: let an fp32 addition do the rounding
        bits = float_to_bits(bits_to_float(magnitude) + 0.5f) - float_to_bits(0.5f);
    } else {
        bits = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    }
    return {static_cast<uint16_t>(sign | bits)};
}

// By halves: GCC does not keep in registers what it copies whole.
typedef V8 Unaligned __attribute__((aligned(4), may_alias));

inline F16 load(const float* p) {
    const Unaligned* half = reinterpret_cast<const Unaligned*>(p);
    return {{half[0], half[1]}};
}
inline V8 load_eight(const float* p) { return *reinterpret_cast<const Unaligned*>(p); }
// GCC makes vectors of neither conversion of bf16 by itself.
inline V8 load_eight(const Bf16* p) {
    H8 bits;
    std::memcpy(&bits, p, sizeof bits);
    return reinterpret_cast<V8>(__builtin_convertvector(bits, U8) << 16);
}
// The first `count`, then zeros.
template <class T>
inline V8 load_eight(const T* p, int count = 8) {
    float wide[8] = {};
    for (int i = 0; i < count; i++) wide[i] = widen_one(p[i]);
    V8 a;
    std::memcpy(&a, wide, sizeof a);
    return a;
}
template <class T>
inline F16 load(const T* p) {
    return {{load_eight(p), load_eight(p + 8)}};
}
template <class T>
inline F16 load(const T* p, int count) {
    float wide[kLanes] = {};
    for (int i = 0; i < count; i++) wide[i] = widen_one(p[i]);
    F16 a;
    std::memcpy(&a, wide, sizeof a);
    return a;
}
// Of eight pairs the first ones, or the second ones.
inline V8 load_of_pairs(const Bf16* p, bool odd) {
    I8 bits;
    std::memcpy(&bits, p, sizeof bits);
    return reinterpret_cast<V8>(odd ? bits & static_cast<int32_t>(0xffff0000) : bits << 16);
}
// Sixteen pairs, as floats.
struct Pair {
    F16 even, odd;
};

inline Pair load_pairs(const Bf16* p) {
    return {{{load_of_pairs(p, false), load_of_pairs(p + kLanes, false)}},
            {{load_of_pairs(p, true), load_of_pairs(p + kLanes, true)}}};
}

template <class T>
inline void store(T* p, F16 a, int count) {
    float wide[kLanes];
    std::memcpy(wide, &a, sizeof wide);
    for (int i = 0; i < count; i++) p[i] = narrow_one<T>(wide[i]);
}
template <class T>
inline void store(T* p, F16 a) {
    store(p, a, kLanes);
}
inline void store(Bf16* p, F16 a) {
    for (int half = 0; half < 2; half++) {
        const U8 raw = reinterpret_cast<U8>(a.v[half]);
        const U8 rounded = raw + 0x7fff + ((raw >> 16) & 1);
        const U8 wide = a.v[half] == a.v[half] ? rounded : raw | 0x400000;
        const H8 bits = __builtin_convertvector(wide >> 16, H8);
        std::memcpy(p + 8 * half, &bits, sizeof bits);
    }
}
inline void store(float* p, V8 a) { *reinterpret_cast<Unaligned*>(p) = a; }
inline void store(float* p, F16 a) { store(p, a.v[0]), store(p + 8, a.v[1]); }
template <class T>
inline F16 rounded_to(F16 a) {
    T narrow[kLanes];
    store(narrow, a);
    return load(narrow);
}

inline float sum_lanes(F16 a) {
    const V8 eight = a.v[0] + a.v[1];
    const float four[4] = {eight[0] + eight[4], eight[1] + eight[5], eight[2] + eight[6],
                           eight[3] + eight[7]};
    return (four[0] + four[2]) + (four[1] + four[3]);
}
inline float max_lanes(F16 a) {
    const F16 m = max(a, F16{{a.v[1], a.v[0]}});
    float best = m.v[0][0];
    for (int i = 1; i < 8; i++) best = best > m.v[0][i] ? best : m.v[0][i];
    return best;
}

inline F16 with_lane(F16 a, int lane, float x) {
    for (int half = 0; half < 2; half++) {
        const I8 lanes = I8{0, 1, 2, 3, 4, 5, 6, 7} + 8 * half;
        a.v[half] = lanes == lane ? splat8(x) : a.v[half];
    }
    return a;
}

inline F16 keep_lanes(F16 a, int low, int high) {
    for (int half = 0; half < 2; half++) {
        const I8 lane = I8{0, 1, 2, 3, 4, 5, 6, 7} + 8 * half;
        a.v[half] = (lane >= low) & (lane <= high) ? a.v[half] : splat8(kMinusInf);
    }
    return a;
}

inline F16 scale_by_power(F16 a, F16 n) {
    for (int half = 0; half < 2; half++) {
        const I8 power = __builtin_convertvector(n.v[half], I8);
        const I8 shifted = reinterpret_cast<I8>(a.v[half]) + (power << 23);
        a.v[half] = power < -125 ? V8{} : reinterpret_cast<V8>(shifted);
    }
    return a;
}
inline F16 round_to_integer(F16 a) {
#ifdef __AVX__
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {{_mm256_round_ps(a.v[0], kNearest), _mm256_round_ps(a.v[1], kNearest)}};
#else
    // Adding 1.5 * 2^23 leaves no fraction bits, for |a| < 2^22.
    const F16 magic = splat(12582912.0f);
    F16 shifted = a + magic;
    // The barrier keeps the pair of operations from being folded away under contraction.
    asm volatile("" : "+m"(shifted));
    return shifted - magic;
#endif
}

#endif

// Two vectors side by side.
template <class T>
inline void store_two(T* p, F16 a, F16 b) {
    store(p, a), store(p + kLanes, b);
}
#ifdef PD_DPBF16
inline void store_two(Bf16* p, F16 a, F16 b) {
    const __m512bh both = _mm512_cvtne2ps_pbh(b.v, a.v);
    std::memcpy(p, &both, sizeof both);
}
#endif

template <>
inline F16 rounded_to<float>(F16 a) {
    return a;
}

// 2^a for a <= 127, where near(r) is 2^r for |r| <= 0.5; exactly 0 at minus infinity.
template <class Near>
inline F16 exp2_by(F16 a, Near&& near) {
#ifndef PD_AVX512
    a = max(a, splat(-160.0f));  // within what integers hold
#endif
    const F16 n = round_to_integer(a);
    return scale_by_power(near(a - n), n);
}

// Within 2 units in the last place, and exactly 1 at 0 (coefficients of Cephes' exp2f).
inline F16 exp2_of(F16 a) {
    return exp2_by(a, [](F16 r) {
        F16 p = splat(1.535336188319500e-4f);
        p = fma(p, r, splat(1.339887440266574e-3f));
        p = fma(p, r, splat(9.618437357674640e-3f));
        p = fma(p, r, splat(5.550332471162809e-2f));
        p = fma(p, r, splat(2.402264791363012e-1f));
        p = fma(p, r, splat(6.931472028550421e-1f));
        return fma(p, r, splat(1.0f));
    });
}

// As exact as a product by T asks. What bf16 keeps of it is off by up to 2e-3: the minimax cubic that
// is 1 at 0 adds 1e-4 at most.
template <class T>
inline F16 exp2_for(F16 a) {
    if constexpr (!std::is_same_v<T, Bf16>) return exp2_of(a);
    return exp2_by(a, [](F16 r) {
        F16 p = splat(5.500893294811249e-2f);
        p = fma(p, r, splat(2.422109693288803e-1f));
        p = fma(p, r, splat(6.932829022407532e-1f));
        return fma(p, r, splat(1.0f));
    });
}

constexpr float kLog2E = 1.4426950408889634f;

inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
// For what is read once: past L2, whose evictions would go to L3 on AMD.
inline void prefetch_once(const void* p) { __builtin_prefetch(p, 0, 0); }
inline void prefetch_to_l2(const void* p) { __builtin_prefetch(p, 0, 2); }
inline void prefetch_to_write(const void* p) { __builtin_prefetch(p, 1, 3); }

}  // namespace pd
