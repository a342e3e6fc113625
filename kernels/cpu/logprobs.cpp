// What is told of a token beside its id, as reference/logprobs.py defines it.
//
// Exponentials are summed as whole numbers, and of equal logits the lower id comes first, so a row's
// results depend neither on an order nor on the other rows. All of a row's exponentials are computed
// by the same instructions, those of its end too.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace pd {
namespace {

#ifdef PD_AVX512
constexpr int kDoubles = 8;
#else
constexpr int kDoubles = 4;
#endif
typedef double Doubles __attribute__((vector_size(8 * kDoubles)));
typedef uint64_t Wholes __attribute__((vector_size(8 * kDoubles)));
typedef float Floats __attribute__((vector_size(4 * kDoubles), aligned(4), may_alias));

constexpr int64_t kChunk = 64;  // logits that are compared with the least one kept at a time
constexpr double kLog2EInFull = 1.4426950408889634074;

// exp(a) in units of `unit`, rounded, above the bits of 2^52. a <= 0, exp(a) / unit <= 2^51.
inline Wholes whole_exp(Doubles a, double per_unit) {
    const Doubles magic = Doubles{} + 0x1.8p52, least = Doubles{} - 1000.0;
    Doubles power = a * kLog2EInFull;
    power = power > least ? power : least;
    const Doubles shifted = power + magic;  // its lowest bits are the nearest integer
    const Doubles r = power - (shifted - magic);
    // The series of 2^r, |r| <= 0.5: within 2e-10.
    Doubles p = Doubles{} + 1.3215486790144309e-6;
    p = p * r + 1.5252733804059841e-5;
    p = p * r + 1.5403530393381608e-4;
    p = p * r + 1.3333558146428443e-3;
    p = p * r + 9.6181291076284772e-3;
    p = p * r + 5.5504108664821580e-2;
    p = p * r + 2.4022650695910071e-1;
    p = p * r + 6.9314718055994531e-1;
    p = p * r + 1.0;
    const Wholes bits = (Wholes)p + ((Wholes)shifted << 52);
    return (Wholes)((Doubles)bits * per_unit + 0x1p52);
}

// The logarithm of the sum of a row's exponentials.
double normaliser_of(const float* logits, int64_t size, float peak) {
    int bits = 0;
    while (size >> bits > 0) bits++;
    const double per_unit = std::ldexp(1.0, std::min(51, 62 - bits));
    Wholes sums = {};
    for (int64_t i = 0; i < size; i += kDoubles) {
        Floats some;
        if (size - i >= kDoubles) {
            some = *reinterpret_cast<const Floats*>(logits + i);
        } else {
            for (int j = 0; j < kDoubles; j++) some[j] = i + j < size ? logits[i + j] : kMinusInf;
        }
        const Doubles wide = __builtin_convertvector(some, Doubles);
        sums += whole_exp(wide - static_cast<double>(peak), per_unit) - (Wholes)(Doubles{} + 0x1p52);
    }
    uint64_t sum = 0;
    for (int j = 0; j < kDoubles; j++) sum += sums[j];
    return std::log(static_cast<double>(sum) / per_unit) + peak;
}

// The likeliest of the tokens that have been offered, in the order of their ids.
class Likeliest {
   public:
    explicit Likeliest(int64_t num) : num_(static_cast<size_t>(num)) { best_.reserve(num_); }

    void offer(const float* logits, int64_t size, int64_t first_id, float largest) {
        if (num_ == 0 || (best_.size() == num_ && !(largest > best_.front().logit))) return;
        for (int64_t i = 0; i < size; i++) {
            if (best_.size() == num_) {
                if (!(logits[i] > best_.front().logit)) continue;
                std::pop_heap(best_.begin(), best_.end(), comes_first);
                best_.pop_back();
            }
            best_.push_back({logits[i], first_id + i});
            std::push_heap(best_.begin(), best_.end(), comes_first);
        }
    }

    void write(int64_t* ids) {
        std::sort_heap(best_.begin(), best_.end(), comes_first);
        for (const Token& each : best_) *ids++ = each.id;
    }

   private:
    struct Token {
        float logit;
        int64_t id;
    };
    static bool comes_first(const Token& a, const Token& b) {
        return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
    }

    const size_t num_;
    std::vector<Token> best_;  // a heap, whose first is the least likely
};

void describe_row(const PdDescribe& p, int64_t row) {
    const float* logits = p.logits + row * p.vocab_size;
    const float chosen = logits[p.tokens[row]];
    Likeliest likeliest(std::min<int64_t>(p.num_top[row], p.vocab_size));
    float peak = kMinusInf;
    int64_t above = 0;
    bool is_lost = false;
    for (int64_t at = 0; at < p.vocab_size; at += kChunk) {
        const int64_t size = std::min(kChunk, p.vocab_size - at);
        const float* chunk = logits + at;
        F16 most = splat(kMinusInf);
        int64_t i = 0;
        for (; i + kLanes <= size; i += kLanes) most = max(most, load(chunk + i));
        float largest = max_lanes(most);
        for (; i < size; i++) largest = std::max(largest, chunk[i]);
        int32_t num_above = 0, num_lost = 0;
        for (i = 0; i < size; i++) {
            num_above += chunk[i] > chosen;
            num_lost += chunk[i] != chunk[i];
        }
        above += num_above;
        is_lost |= num_lost > 0;
        peak = std::max(peak, largest);
        if (!is_lost) likeliest.offer(chunk, size, at, largest);
    }
    p.ranks[row] = above + 1;
    if (is_lost || !std::isfinite(peak)) {
        p.normalisers[row] = std::numeric_limits<double>::quiet_NaN();
        return;
    }
    p.normalisers[row] = normaliser_of(logits, p.vocab_size, peak);
    likeliest.write(p.top + row * p.top_stride);
}

}  // namespace
}  // namespace pd

extern "C" {

int32_t pd_describe(const PdDescribe* p) {
    for (int64_t row = 0; row < p->num_rows; row++) {
        if (p->tokens[row] < 0 || p->tokens[row] >= p->vocab_size) return kBadId;
    }
    pd::parallel_for(p->num_rows, 1, false, p->num_threads, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) pd::describe_row(*p, row);
    });
    return kOk;
}
}
