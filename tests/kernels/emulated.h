// AVX-512 and AMX in plain vectors, so that the paths for them run on CPUs that have neither.
//
// Included before the kernels' sources (-include) it takes the place of the intrinsics and tile
// registers that they use, and says that the CPU has what EMULATED_BF16 and EMULATED_AMX name beside
// AVX-512 itself. What it computes is what Intel's manual (SDM, volume 2) gives for each instruction,
// which is not all that they do: no exceptions, and pairs of bf16 keep denormals. Needs AVX2, FMA, F16C.

#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#define __AVX512F__ 1
#define __AVX512BW__ 1
#define __AVX512VL__ 1
#define __AVX512DQ__ 1
#ifdef EMULATED_BF16
#define __AVX512BF16__ 1
#endif
#ifdef EMULATED_AMX
#define __AMX_TILE__ 1
#define __AMX_BF16__ 1
#define PD_TILE_REGISTERS 1
#endif

namespace emulated {

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Shorts __attribute__((vector_size(64)));
typedef uint16_t HalfShorts __attribute__((vector_size(32)));

// Calls make(i) for each lane.
template <class Vector, class Make>
inline Vector lanes(Make&& make) {
    Vector made = {};
    for (unsigned i = 0; i < sizeof made / sizeof made[0]; i++) made[i] = make(i);
    return made;
}
template <class To, class From>
inline To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}
template <class Vector>
inline Vector read(const void* from) {
    Vector vector;
    std::memcpy(&vector, from, sizeof vector);
    return vector;
}
inline __m256 half(Floats a, int which) {
    return read<__m256>(reinterpret_cast<const char*>(&a) + 32 * which);
}
inline Floats joined(__m256 low, __m256 high) {
    const __m256 both[2] = {low, high};
    return read<Floats>(both);
}

inline Floats splat(float x) { return lanes<Floats>([&](int) { return x; }); }
inline Floats max(Floats a, Floats b) {
    return joined(_mm256_max_ps(half(a, 0), half(b, 0)), _mm256_max_ps(half(a, 1), half(b, 1)));
}
inline Floats fma(Floats a, Floats b, Floats c) {
    return joined(_mm256_fmadd_ps(half(a, 0), half(b, 0), half(c, 0)),
                  _mm256_fmadd_ps(half(a, 1), half(b, 1), half(c, 1)));
}
inline Floats load_some(__mmask16 mask, const void* from) {
    Floats loaded = {};
    for (int i = 0; i < 16; i++) {
        if (mask >> i & 1) std::memcpy(&loaded[i], static_cast<const float*>(from) + i, 4);
    }
    return loaded;
}
inline void store_some(void* to, __mmask16 mask, Floats a) {
    for (int i = 0; i < 16; i++) {
        if (mask >> i & 1) std::memcpy(static_cast<float*>(to) + i, &a[i], 4);
    }
}
template <class Vector>
inline Vector load_some_shorts(uint32_t mask, const void* from) {
    Vector loaded = {};
    auto* to = reinterpret_cast<uint16_t*>(&loaded);
    for (unsigned i = 0; i < sizeof loaded / 2; i++) {
        if (mask >> i & 1) std::memcpy(to + i, static_cast<const uint16_t*>(from) + i, 2);
    }
    return loaded;
}
inline void store_some_shorts(void* to, __mmask16 mask, __m256i a) {
    const auto shorts = bits_as<HalfShorts>(a);
    for (int i = 0; i < 16; i++) {
        if (mask >> i & 1) std::memcpy(static_cast<uint16_t*>(to) + i, &shorts[i], 2);
    }
}
template <class Vector, class Holds>
inline __mmask16 mask_of(Vector a, Vector b, Holds&& holds) {
    unsigned mask = 0;
    for (int i = 0; i < 16; i++) mask |= (holds(a[i], b[i]) ? 1u : 0u) << i;
    return static_cast<__mmask16>(mask);
}
template <int kHow>
inline __mmask16 compare(Floats a, Floats b) {
    static_assert(kHow == _CMP_UNORD_Q || kHow == _CMP_GE_OQ);
    return mask_of(a, b, [](float x, float y) {
        return kHow == _CMP_GE_OQ ? x >= y : std::isnan(x) || std::isnan(y);
    });
}
inline Floats blend(__mmask16 mask, Floats a, Floats b) {
    return lanes<Floats>([&](int i) { return mask >> i & 1 ? b[i] : a[i]; });
}
inline Floats scale(__mmask16 mask, Floats a, Floats n) {
    return lanes<Floats>(
        [&](int i) { return mask >> i & 1 ? std::ldexp(a[i], static_cast<int>(n[i])) : 0.0f; });
}
template <int kHow>
inline Floats round(Floats a) {
    return joined(_mm256_round_ps(half(a, 0), kHow), _mm256_round_ps(half(a, 1), kHow));
}
inline float max_lane(Floats a) {
    for (int apart = 8; apart > 0; apart /= 2) {
        for (int i = 0; i < apart; i++) a[i] = a[i] > a[i + apart] ? a[i] : a[i + apart];
    }
    return a[0];
}
// Of each lane of 16 bytes the low half (kHigh = 0) or the high one of both, in turns.
template <int kHigh, class Vector>
inline Vector unpack(Vector a, Vector b) {
    constexpr int kLane = 16 / sizeof(a[0]);
    return lanes<Vector>([&](int i) {
        const int from = i / kLane * kLane + kHigh * kLane / 2 + i % kLane / 2;
        return i % 2 ? b[from] : a[from];
    });
}
template <int kWhich>
inline Floats shuffle_lanes(Floats a, Floats b) {
    return lanes<Floats>([&](int i) {
        const int from = (kWhich >> (i / 4 * 2) & 3) * 4 + i % 4;
        return i < 8 ? a[from] : b[from];
    });
}
inline __m512i permute(__m512i a, __m512i which, __m512i b) {
    const auto low = bits_as<Shorts>(a), high = bits_as<Shorts>(b), at = bits_as<Shorts>(which);
    return bits_as<__m512i>(
        lanes<Shorts>([&](int i) { return at[i] & 32 ? high[at[i] & 31] : low[at[i] & 31]; }));
}
inline __m512i join_masked(__m512i a, __mmask16 mask, __m512i b, __m512i c) {
    const auto from = bits_as<Ints>(a), x = bits_as<Ints>(b), y = bits_as<Ints>(c);
    return bits_as<__m512i>(
        lanes<Ints>([&](int i) { return mask >> i & 1 ? x[i] | y[i] : from[i]; }));
}
inline __m256i narrow_words(__m512i a) {
    return bits_as<__m256i>(__builtin_convertvector(bits_as<Words>(a), HalfShorts));
}
// Nearest, ties to even; denormals count as zero.
inline __m256bh narrow_to_bf16(Floats a) {
    const auto bits = bits_as<Words>(a);
    return bits_as<__m256bh>(lanes<HalfShorts>([&](int i) -> uint16_t {
        const uint32_t raw = bits[i], sign = raw & 0x80000000u, exponent = raw & 0x7f800000u;
        if (exponent == 0) return sign >> 16;
        if (std::isnan(a[i])) return (raw | 0x400000u) >> 16;
        return (raw + 0x7fffu + (raw >> 16 & 1)) >> 16;
    }));
}
// Those of `high` behind those of `low`.
inline __m512bh narrow_both(Floats high, Floats low) {
    const __m256bh halves[2] = {narrow_to_bf16(low), narrow_to_bf16(high)};
    __m512bh both;
    static_assert(sizeof both == sizeof halves);
    std::memcpy(&both, halves, sizeof both);
    return both;
}
inline Floats even_pairs(__m512i pairs) { return bits_as<Floats>(bits_as<Words>(pairs) << 16); }
inline Floats odd_pairs(__m512i pairs) {
    return bits_as<Floats>(bits_as<Words>(pairs) & 0xffff0000u);
}
inline Floats add_pairs(Floats sum, __m512bh a, __m512bh b) {
    const auto x = bits_as<__m512i>(a), y = bits_as<__m512i>(b);
    return fma(even_pairs(x), even_pairs(y), fma(odd_pairs(x), odd_pairs(y), sum));
}
template <class Vector>
inline void write(void* to, Vector a) {
    std::memcpy(to, &a, sizeof a);
}
inline __m512i words(int32_t x) { return bits_as<__m512i>(Ints{} + x); }

}  // namespace emulated

#undef _mm512_extractf32x8_ps
#undef _mm512_cmp_ps_mask
#undef _mm512_roundscale_ps
#undef _mm512_shuffle_f32x4
#undef _mm512_cvtps_ph
#undef _mm512_slli_epi32
#undef _mm512_srli_epi32
#undef _mm512_setr_epi32

#define _mm512_setzero_ps() (emulated::Floats{})
#define _mm512_set1_ps(x) emulated::splat(x)
#define _mm512_add_ps(a, b) ((a) + (b))
#define _mm512_sub_ps(a, b) ((a) - (b))
#define _mm512_mul_ps(a, b) ((a) * (b))
#define _mm512_div_ps(a, b) ((a) / (b))
#define _mm512_max_ps(a, b) emulated::max(a, b)
#define _mm512_fmadd_ps(a, b, c) emulated::fma(a, b, c)
#define _mm512_loadu_ps(p) emulated::read<__m512>(p)
#define _mm512_maskz_loadu_ps(mask, p) emulated::load_some(mask, p)
#define _mm512_storeu_ps(p, a) emulated::write(p, a)
#define _mm512_mask_storeu_ps(p, mask, a) emulated::store_some(p, mask, a)
#define _mm512_castsi512_ps(a) emulated::bits_as<__m512>(a)
#define _mm512_castps_si512(a) emulated::bits_as<__m512i>(a)
#define _mm512_castps_pd(a) emulated::bits_as<__m512d>(a)
#define _mm512_castpd_ps(a) emulated::bits_as<__m512>(a)
#define _mm512_castps512_ps256(a) emulated::half(a, 0)
#define _mm512_extractf32x8_ps(a, which) emulated::half(a, which)
#define _mm512_slli_epi32(a, n) \
    emulated::bits_as<__m512i>(emulated::bits_as<emulated::Words>(a) << (n))
#define _mm512_srli_epi32(a, n) \
    emulated::bits_as<__m512i>(emulated::bits_as<emulated::Words>(a) >> (n))
#define _mm512_and_si512(a, b) ((a) & (b))
#define _mm512_add_epi32(a, b)                                         \
    emulated::bits_as<__m512i>(emulated::bits_as<emulated::Words>(a) + \
                               emulated::bits_as<emulated::Words>(b))
#define _mm512_add_epi16(a, b)                                          \
    emulated::bits_as<__m512i>(emulated::bits_as<emulated::Shorts>(a) + \
                               emulated::bits_as<emulated::Shorts>(b))
#define _mm512_set1_epi32(x) emulated::words(x)
#define _mm512_set1_epi16(x) emulated::words((x) << 16 | (x))
#define _mm512_setr_epi32(...) emulated::bits_as<__m512i>(emulated::Ints{__VA_ARGS__})
#define _mm512_load_si512(p) emulated::read<__m512i>(p)
#define _mm512_loadu_si512(p) emulated::read<__m512i>(p)
#define _mm512_maskz_loadu_epi16(mask, p) emulated::load_some_shorts<__m512i>(mask, p)
#define _mm256_maskz_loadu_epi16(mask, p) emulated::load_some_shorts<__m256i>(mask, p)
#define _mm256_mask_storeu_epi16(p, mask, a) emulated::store_some_shorts(p, mask, a)
#define _mm512_storeu_si512(p, a) emulated::write(p, a)
#define _mm512_cvtepu16_epi32(a)                                                  \
    emulated::bits_as<__m512i>(__builtin_convertvector(                           \
        emulated::bits_as<emulated::HalfShorts>(a), emulated::Words))
#define _mm512_cvtepi32_epi16(a) emulated::narrow_words(a)
#define _mm512_cvtph_ps(a)                                         \
    emulated::joined(_mm256_cvtph_ps(_mm256_castsi256_si128(a)),   \
                     _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1)))
#define _mm512_cvtps_ph(a, how)                                           \
    _mm256_set_m128i(_mm256_cvtps_ph(emulated::half(a, 1), (how) & 7),    \
                     _mm256_cvtps_ph(emulated::half(a, 0), (how) & 7))
#define _mm512_cmp_ps_mask(a, b, how) emulated::compare<how>(a, b)
#define _mm512_cmple_epi32_mask(a, b)                                       \
    emulated::mask_of(emulated::bits_as<emulated::Ints>(a),                 \
                      emulated::bits_as<emulated::Ints>(b), [](int x, int y) { return x <= y; })
#define _mm512_mask_or_epi32(from, mask, a, b) emulated::join_masked(from, mask, a, b)
#define _mm512_mask_blend_ps(mask, a, b) emulated::blend(mask, a, b)
#define _mm512_mask_broadcastss_ps(from, mask, x) \
    emulated::blend(mask, from, emulated::splat(_mm_cvtss_f32(x)))
#define _mm512_maskz_scalef_ps(mask, a, n) emulated::scale(mask, a, n)
#define _mm512_roundscale_ps(a, how) emulated::round<how>(a)
#define _mm512_reduce_max_ps(a) emulated::max_lane(a)
#define _mm512_unpacklo_ps(a, b) emulated::unpack<0>(a, b)
#define _mm512_unpackhi_ps(a, b) emulated::unpack<1>(a, b)
#define _mm512_unpacklo_pd(a, b) emulated::unpack<0>(a, b)
#define _mm512_unpackhi_pd(a, b) emulated::unpack<1>(a, b)
#define _mm512_shuffle_f32x4(a, b, which) emulated::shuffle_lanes<which>(a, b)
#define _mm512_permutex2var_epi16(a, which, b) emulated::permute(a, which, b)
#define _mm512_cvtneps_pbh(a) emulated::narrow_to_bf16(a)
#define _mm512_cvtne2ps_pbh(high, low) emulated::narrow_both(high, low)
#define _mm512_dpbf16_ps(sum, a, b) emulated::add_pairs(sum, a, b)

#ifdef EMULATED_AMX

namespace pd {

// Tile registers of bf16 pairs and of sums; see amx.h for what `add` does in which order.
class TileRegisters {
    struct Tile {
        int rows;
        uint32_t words[16][16];
    };
    struct None {
        uint8_t rows[8] = {};
    };

   public:
    static bool request() { return true; }

    template <class Config>
    static void configure(const Config& config) {
        for (int tile = 0; tile < 8; tile++) of_thread[tile] = {config.rows[tile], {}};
    }
    static void release() { configure(None{}); }

    template <int kTile>
    static void clear() {
        std::memset(of_thread[kTile].words, 0, sizeof of_thread[kTile].words);
    }
    template <int kTile>
    static void load(const void* from, int64_t stride) {
        clear<kTile>();
        for (int row = 0; row < of_thread[kTile].rows; row++) {
            std::memcpy(of_thread[kTile].words[row], static_cast<const char*>(from) + row * stride, 64);
        }
    }
    template <int kTile>
    static void load_once(const void* from, int64_t stride) {
        load<kTile>(from, stride);
    }
    template <int kTile>
    static void store(void* to, int64_t stride) {
        for (int row = 0; row < of_thread[kTile].rows; row++) {
            std::memcpy(static_cast<char*>(to) + row * stride, of_thread[kTile].words[row], 64);
        }
    }
    template <int kSums, int kInput, int kWeight>
    static void add() {
        const unsigned before = _mm_getcsr();
        _mm_setcsr(before | 0x8040);  // denormals count as zero
        add_flushed(of_thread[kSums], of_thread[kInput], of_thread[kWeight]);
        _mm_setcsr(before);
    }

   private:
    [[gnu::noinline]] static void add_flushed(Tile& sums, const Tile& input, const Tile& weight) {
        for (int row = 0; row < sums.rows; row++) {
            emulated::Floats even = {}, odd = {};
            for (int pair = 0; pair < weight.rows; pair++) {
                const __m512i x = emulated::words(static_cast<int32_t>(input.words[row][pair]));
                const __m512i w = emulated::read<__m512i>(weight.words[pair]);
                even = emulated::fma(emulated::even_pairs(x), emulated::even_pairs(w), even);
                odd = emulated::fma(emulated::odd_pairs(x), emulated::odd_pairs(w), odd);
            }
            const auto sum = emulated::read<emulated::Floats>(sums.words[row]);
            emulated::write(sums.words[row], sum + (even + odd));
        }
    }

    static inline thread_local Tile of_thread[8] = {};
};

}  // namespace pd

#endif
