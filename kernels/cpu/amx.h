// The CPU's matrix unit (Intel AMX): products of bf16 on tile registers.
//
// A tile of sums takes 32 products per instruction for each of its elements (TDPBF16PS): those of
// even k are added up one by one, with one rounding each, from zero on, those of odd k likewise,
// and both together are added to the element; denormals count as zero. What an element becomes
// depends on its own row of x and its own column of weights alone, not on the tile's height, its
// place in it, or whether sums lay in memory in between: that is what batch invariance rests on.
//
// Nothing here is about models: linear.cpp and attention.cpp choose what is multiplied.

#pragma once

#include <algorithm>
#include <cstdint>

#include "simd.h"

#if defined(PD_DPBF16) && defined(__AMX_TILE__) && defined(__AMX_BF16__)
#define PD_AMX 1
#endif

namespace pd {

// Rows of a tile, and k's that one instruction adds.
constexpr int kTileRows = 16;
constexpr int kTileDepth = 32;
// Cache lines of weights in a step: two runs of 16 columns.
constexpr int kStepLines = 2 * kTileRows;

#ifdef PD_AMX

// What LDTILECFG reads.
struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

#ifndef PD_TILE_REGISTERS  // tests bring their own to CPUs that have none

// The eight registers, which belong to a thread.
struct TileRegisters {
    // Asks the operating system to let this process use them.
    static bool request();

    static void configure(const TileConfig& config) { asm volatile("ldtilecfg %0" ::"m"(config)); }
    static void release() { asm volatile("tilerelease"); }

    template <int kTile>
    static void clear() {
        asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
    }
    template <int kTile>
    static void load(const void* from, int64_t stride) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kTile)
                     : "memory");
    }
    // The same, of what is not needed again soon: it leaves the cache to what is.
    template <int kTile>
    static void load_once(const void* from, int64_t stride) {
        asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kTile)
                     : "memory");
    }
    template <int kTile>
    static void store(void* to, int64_t stride) {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(kTile)
                     : "memory");
    }
    template <int kSums, int kInput, int kWeight>
    static void add() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kInput),
                     "i"(kWeight));
    }
};

#endif

// Whether this process multiplies with tiles: the operating system must let it. The answer stays
// the same as long as the process lives, and in its forked children.
bool have_tiles();

// sums (+)= x w, for one or two runs of up to 16 rows of x and two runs of 16 columns of w.
struct TileProduct {
    const Bf16* x[2];   // first rows of both runs
    int64_t x_stride;   // elements from row to row
    const Bf16* w;      // [steps * 16][2 runs][16][2], see product.h
    int64_t w_stride;   // elements from a pair of k's to the next
    int64_t steps;      // k's / 32
    float* sums[2];     // [rows][32] of both runs
    int64_t sums_stride;
    bool add;  // to what sums holds; else it need not hold anything
    // What will be wanted soon: so many lines of it are brought to L2 in each step.
    const char* coming = nullptr;
    int64_t lines = 0;
};

// This thread's tile registers, for as long as the object lives. One at a time.
class Tiles : TileRegisters {
   public:
    // Products will have runs of `rows` rows, at most 16.
    explicit Tiles(int rows) {
        TileConfig config;
        for (int tile = 0; tile < 8; tile++) {
            config.row_bytes[tile] = 64;
            config.rows[tile] = static_cast<uint8_t>(tile < kWeights ? rows : kTileRows);
        }
        configure(config);
    }
    ~Tiles() { release(); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;

    // kRuns: of rows. kAhead: bytes of the weight stream to ask for ahead of use, or 0. kOnce: x
    // passes by, and weights stay. Calls aside() in each step: what vectors do there, in some dozens
    // of instructions, mostly passes while tiles multiply.
    template <int kRuns, int kAhead, bool kOnce = false, class Aside>
    static void multiply(const TileProduct& p, Aside&& aside) {
        const int64_t x_stride = p.x_stride * int64_t{sizeof(Bf16)};
        const int64_t w_stride = p.w_stride * int64_t{sizeof(Bf16)};
        const int64_t sums_stride = p.sums_stride * int64_t{sizeof(float)};
        if (p.add) {
            load<0>(p.sums[0], sums_stride), load<1>(p.sums[0] + kLanes, sums_stride);
            if constexpr (kRuns == 2) {
                load<2>(p.sums[1], sums_stride), load<3>(p.sums[1] + kLanes, sums_stride);
            }
        } else {
            clear<0>(), clear<1>();
            if constexpr (kRuns == 2) clear<2>(), clear<3>();
        }
        const Bf16 *x0 = p.x[0], *x1 = p.x[1], *w = p.w;
        const char* coming = p.coming;
        for (int64_t step = 0; step < p.steps; step++) {
            load<kWeights>(w, w_stride);
            load_input<kInputs, kOnce>(x0, x_stride);
            add<0, kInputs, kWeights>();
            load<kWeights + 1>(w + 2 * kLanes, w_stride);
            if constexpr (kAhead > 0) {
                const char* at = reinterpret_cast<const char*>(w) + kAhead;
                for (int line = 0; line < kStepLines; line++) prefetch(at + line * 64);
            }
            for (int64_t line = 0; line < p.lines; line++) prefetch_to_l2(coming + line * 64);
            coming += p.lines * 64;
            add<1, kInputs, kWeights + 1>();
            if constexpr (kRuns == 2) {
                load_input<kInputs + 1, kOnce>(x1, x_stride);
                add<2, kInputs + 1, kWeights>();
                add<3, kInputs + 1, kWeights + 1>();
                x1 += kTileDepth;
            }
            aside();
            x0 += kTileDepth;
            w += kTileRows * p.w_stride;
        }
        store<0>(p.sums[0], sums_stride), store<1>(p.sums[0] + kLanes, sums_stride);
        if constexpr (kRuns == 2) {
            store<2>(p.sums[1], sums_stride), store<3>(p.sums[1] + kLanes, sums_stride);
        }
    }

    template <int kRuns, int kAhead>
    static void multiply(const TileProduct& p) {
        multiply<kRuns, kAhead>(p, [] {});
    }

   private:
    // Registers 0 to 3 hold sums.
    static constexpr int kInputs = 4, kWeights = 6;

    template <int kTile, bool kOnce>
    static void load_input(const void* from, int64_t stride) {
        if constexpr (kOnce) load_once<kTile>(from, stride);
        else load<kTile>(from, stride);
    }
};

// Denormals count as zero, in the results of this thread's vectors and in what they read, for as
// long as the object lives.
class FlushDenormals {
   public:
    FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | kBothWays); }
    ~FlushDenormals() { _mm_setcsr(before_); }
    FlushDenormals(const FlushDenormals&) = delete;
    FlushDenormals& operator=(const FlushDenormals&) = delete;

   private:
    static constexpr unsigned kBothWays = 0x8040;
    const unsigned before_;
};

// The work of add_like_tiles, apart, so that none of it is moved out of FlushDenormals' reach.
template <int kRows, int kAhead>
[[gnu::noinline]] void add_flushed(const Bf16* x, int64_t x_stride, const Bf16* w, int64_t steps,
                                   float* sums) {
    const __m512i odd_half = _mm512_set1_epi32(static_cast<int>(0xffff0000));
    const auto even = [](__m512i pairs) {
        return F16{_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))};
    };
    const auto odd = [&](__m512i pairs) {
        return F16{_mm512_castsi512_ps(_mm512_and_si512(pairs, odd_half))};
    };
    F16 sum[kRows][2];
    for (int r = 0; r < kRows; r++) sum[r][0] = sum[r][1] = zero();
    for (int64_t step = 0; step < steps; step++) {
        F16 evens[kRows][2], odds[kRows][2];
        for (int r = 0; r < kRows; r++) {
            for (int half = 0; half < 2; half++) evens[r][half] = odds[r][half] = zero();
        }
        for (int k = 0; k < kTileDepth; k += 2, w += 4 * kLanes) {
            prefetch(reinterpret_cast<const char*>(w) + kAhead);
            prefetch(reinterpret_cast<const char*>(w) + kAhead + 64);
            const __m512i weights[2] = {_mm512_loadu_si512(w), _mm512_loadu_si512(w + 2 * kLanes)};
#pragma GCC unroll 2
            for (int r = 0; r < kRows; r++) {
                int32_t pair;
                std::memcpy(&pair, x + r * x_stride + step * kTileDepth + k, sizeof pair);
                const __m512i inputs = _mm512_set1_epi32(pair);
#pragma GCC unroll 2
                for (int half = 0; half < 2; half++) {
                    evens[r][half] = fma(even(inputs), even(weights[half]), evens[r][half]);
                    odds[r][half] = fma(odd(inputs), odd(weights[half]), odds[r][half]);
                }
            }
        }
        for (int r = 0; r < kRows; r++) {
            for (int half = 0; half < 2; half++) {
                sum[r][half] = sum[r][half] + (evens[r][half] + odds[r][half]);
            }
        }
    }
    for (int r = 0; r < kRows; r++) {
        for (int half = 0; half < 2; half++) store(sums + (2 * r + half) * kLanes, sum[r][half]);
    }
}

// sums [kRows][32] = x w by vectors, with the bits that tiles give (but for which NaN it is). w is
// [steps * 16][2 runs][16][2].
template <int kRows, int kAhead>
void add_like_tiles(const Bf16* x, int64_t x_stride, const Bf16* w, int64_t steps, float* sums) {
    const FlushDenormals flushing;
    add_flushed<kRows, kAhead>(x, x_stride, w, steps, sums);
}

#else

constexpr bool have_tiles() { return false; }

#endif

}  // namespace pd
