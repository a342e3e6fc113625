// What the instructions that multiply reach on this CPU: loops with all operands in registers.

#include <algorithm>
#include <chrono>

#include "amx.h"
#include "kernels.h"

namespace pd {
namespace {

// Of a run, which takes some 0.1 ms: long to the clock, short to neighbours.
constexpr int kLoops = 8000, kTileLoops = 1000;
constexpr int kRuns = 100;

// VFMADD231PS multiplies this many times faster before it is worth more instructions per product.
constexpr double kMuchFaster = 1.3;

// The best rate of several runs, in GFLOP/s: on a shared machine, that of the one nobody disturbed.
template <class Run>
double best_rate(double flops, Run&& run) {
    double shortest = 1.0;
    for (int i = 0; i < kRuns; i++) {
        const auto start = std::chrono::steady_clock::now();
        run();
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
        shortest = std::min(shortest, took.count());
    }
    return flops / shortest * 1e-9;
}

// As many sums as hide the instruction's latency.
#ifdef PD_AVX512
constexpr int kSums = 24;
#else
constexpr int kSums = 6;
#endif

// step(sum) is `flops` of arithmetic on each of 16 lanes.
template <class Step>
double rate_of(double flops, Step&& step) {
    return best_rate(flops * kSums * kLanes * kLoops, [&] {
        F16 sum[kSums], kept[kSums];
#pragma GCC unroll 24
        for (int i = 0; i < kSums; i++) sum[i] = splat(static_cast<float>(i));
        for (int loop = 0; loop < kLoops; loop++) {
#pragma GCC unroll 24
            for (int i = 0; i < kSums; i++) sum[i] = step(sum[i]);
        }
#pragma GCC unroll 24
        for (int i = 0; i < kSums; i++) kept[i] = sum[i];
        asm volatile("" : : "m"(kept));
    });
}

double fma_rate() {
    F16 a = splat(1.0f), b = splat(0.5f);
    asm volatile("" : "+m"(a), "+m"(b));
    return rate_of(2.0, [a, b](F16 sum) { return fma(a, b, sum); });
}

double pairs_rate() {
#ifdef PD_DPBF16
    __m512i a = _mm512_set1_epi16(0x3f80), b = _mm512_set1_epi16(0x3f00);
    asm volatile("" : "+m"(a), "+m"(b));
    return rate_of(4.0, [a, b](F16 sum) {
        return F16{_mm512_dpbf16_ps(sum.v, (__m512bh)a, (__m512bh)b)};
    });
#else
    return 0.0;
#endif
}

double tiles_rate() {
#ifdef PD_AMX
    if (!have_tiles()) return 0.0;
    // Zeros would be multiplied a fifth faster, for they take less power.
    Bf16 numbers[4 * kTileRows * kTileDepth];
    uint32_t bits = 1;
    for (Bf16& number : numbers) {
        bits = bits * 1664525 + 1013904223;
        number.bits = static_cast<uint16_t>((bits >> 16 & 0x80ff) | 0x3f00);
    }
    float sums[2 * kTileRows * 2 * kLanes];
    const Tiles tiles(kTileRows);
    tiles.multiply<2, 0>({{numbers, numbers + kTileRows * kTileDepth},
                          kTileDepth,
                          numbers + 2 * kTileRows * kTileDepth,
                          4 * kLanes,
                          1,
                          {sums, sums + 2 * kTileRows * kLanes},
                          2 * kLanes,
                          false});
    return best_rate(4.0 * kTileLoops * 2 * kTileRows * kTileRows * kTileDepth, [] {
        for (int loop = 0; loop < kTileLoops; loop++) {
            asm volatile(
                "tdpbf16ps %tmm6, %tmm4, %tmm0\n tdpbf16ps %tmm7, %tmm4, %tmm1\n"
                "tdpbf16ps %tmm6, %tmm5, %tmm2\n tdpbf16ps %tmm7, %tmm5, %tmm3");
        }
    });
#else
    return 0.0;
#endif
}

}  // namespace
}  // namespace pd

extern "C" {

const char* pd_compiler() {
#ifdef __clang__
    return __VERSION__;
#else
    return "GCC " __VERSION__;
#endif
}

PdUnit pd_bf16_unit() {
    if (pd::have_tiles()) return kTiles;
#ifdef PD_DPBF16
    return kPairs;
#else
    return kFma;
#endif
}

double pd_peak_gflops(PdUnit unit) {
    if (unit == kTiles) return pd::tiles_rate();
    return unit == kPairs ? pd::pairs_rate() : pd::fma_rate();
}

int32_t pd_fma_is_much_faster() {
#if defined(PD_DPBF16) && !defined(PD_AMX)
    return pd::fma_rate() > pd::kMuchFaster * pd::pairs_rate();
#else
    return 0;  // vectors have one unit, or are for want of tiles, whose layout is that of pairs
#endif
}
}
