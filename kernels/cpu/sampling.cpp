// Tokens drawn from logits, as reference/sampling.py defines them.
//
// Weights are integers, so their sums do not depend on an order. The least power that top-k and top-p
// keep is looked for among those of equal upper bits: powers are at most 1, so as integers their
// bits keep their order. Mostly few powers are not tiny, and the least one kept is among those.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace pd {
namespace {

constexpr int64_t kWhole = int64_t{1} << 53;  // all of the weight, as a fraction
constexpr int64_t kChunk = 1024;              // powers whose weights are summed at a time
constexpr int kBuckets = 0x3f80 + 1;          // upper halves of the bits of 0 to 1
constexpr float kNotTiny = 0x1p-12f;

int64_t weight_of(float power) { return static_cast<int64_t>(power * 0x1p40f); }

int bucket_of(float power) {
    uint32_t bits;
    std::memcpy(&bits, &power, sizeof bits);
    return static_cast<int>(bits >> 16);
}

int64_t share_of(int64_t total, int64_t fraction) {
    return static_cast<int64_t>(static_cast<unsigned __int128>(total) * fraction >> 53);
}

// The weight of those of some powers that are at least `bound`.
int64_t weight_from(const float* power, int64_t size, float bound) {
    int64_t sum = 0;
    for (int64_t i = 0; i < size; i++) sum += power[i] >= bound ? weight_of(power[i]) : 0;
    return sum;
}

struct Tally {
    int64_t weight[kBuckets], count[kBuckets];
};

class Row {
   public:
    Row(const float* power, int64_t size, Tally& tally) : power_(power), size_(size), tally_(tally) {}

    // The least power that is kept.
    float bound(int64_t top_k, int64_t top_p) {
        if (top_k >= size_) top_k = 0;
        if (top_k == 0 && top_p == kWhole) return 0.0f;
        float found = bound_from(kNotTiny, top_k, top_p);
        if (found < 0.0f) found = bound_from(0.0f, top_k, top_p);
        return found;
    }

    // The first token whose running weight, of what is kept, passes a share of the total.
    int64_t draw(float bound, int64_t uniform) {
        const int64_t num_chunks = (size_ + kChunk - 1) / kChunk;
        chunks_.resize(num_chunks);
        int64_t total = 0;
        for (int64_t c = 0; c < num_chunks; c++) {
            chunks_[c] = weight_from(power_ + c * kChunk, length(c), bound);
            total += chunks_[c];
        }
        int64_t target = share_of(total, uniform), chunk = 0;
        while (chunk < num_chunks - 1 && chunks_[chunk] <= target) target -= chunks_[chunk++];
        int64_t token = chunk * kChunk;
        for (;; token++) {
            if (power_[token] < bound) continue;
            const int64_t weight = weight_of(power_[token]);
            if (weight > target) return token;
            target -= weight;
        }
    }

   private:
    int64_t length(int64_t chunk) const { return std::min(kChunk, size_ - chunk * kChunk); }

    // `bound`, if it is at least `least`; else -1.
    float bound_from(float least, int64_t top_k, int64_t top_p) {
        std::memset(&tally_, 0, sizeof tally_);
        for (int64_t i = 0; i < size_; i++) {
            if (power_[i] < least) continue;
            const int bucket = bucket_of(power_[i]);
            tally_.weight[bucket] += weight_of(power_[i]);
            tally_.count[bucket]++;
        }
        float kth = 0.0f;
        int64_t kept;
        if (top_k == 0) {
            kept = weight_from(power_, size_, 0.0f);
        } else {
            int bucket = kBuckets - 1;
            int64_t left = top_k;
            kept = 0;
            while (bucket >= 0 && tally_.count[bucket] < left) {
                left -= tally_.count[bucket];
                kept += tally_.weight[bucket--];
            }
            if (bucket < 0) return -1.0f;
            find_members(bucket, least);
            kth = members_[left - 1];
            kept += weight_from(members_.data(), static_cast<int64_t>(members_.size()), kth);
        }
        if (top_p == kWhole) return kth;
        int64_t wanted = std::max<int64_t>(1, share_of(kept, top_p));
        for (int bucket = kBuckets - 1; bucket >= 0; bucket--) {
            if (tally_.weight[bucket] < wanted) {
                wanted -= tally_.weight[bucket];
                continue;
            }
            find_members(bucket, least);
            for (const float member : members_) {
                wanted -= weight_of(member);
                if (wanted <= 0) return std::max(kth, member);
            }
        }
        return -1.0f;
    }

    // The powers of a bucket, falling.
    void find_members(int bucket, float least) {
        members_.clear();
        for (int64_t i = 0; i < size_; i++) {
            if (power_[i] >= least && bucket_of(power_[i]) == bucket) members_.push_back(power_[i]);
        }
        std::sort(members_.begin(), members_.end(), std::greater<float>());
    }

    const float* power_;
    const int64_t size_;
    Tally& tally_;
    std::vector<float> members_;
    std::vector<int64_t> chunks_;
};

void draw_row(const PdDraw& p, int64_t i) {
    const int64_t row = p.rows[i];
    const float peak = p.peaks[row];
    if (!std::isfinite(peak)) {
        p.tokens[row] = -1;
        return;
    }
    const float* logits = p.logits + row * p.vocab_size;
    auto* power = static_cast<float*>(
        scratch(Scratch::kPowers, p.vocab_size * static_cast<int64_t>(sizeof(float))));
    const F16 top = splat(peak), scale = splat(p.scale[i]);
    int64_t at = 0;
    for (; at + kLanes <= p.vocab_size; at += kLanes) {
        store(power + at, exp2_of((load(logits + at) - top) * scale));
    }
    const auto rest = static_cast<int>(p.vocab_size - at);
    if (rest > 0) store(power + at, exp2_of((load(logits + at, rest) - top) * scale), rest);
    if (p.min_p[i] > 0.0f) {
        for (int64_t j = 0; j < p.vocab_size; j++) power[j] = power[j] < p.min_p[i] ? 0.0f : power[j];
    }
    Row values(power, p.vocab_size, *static_cast<Tally*>(scratch(Scratch::kTally, sizeof(Tally))));
    p.tokens[row] = values.draw(values.bound(p.top_k[i], p.top_p[i]), p.uniform[i]);
}

}  // namespace
}  // namespace pd

extern "C" {

int32_t pd_draw(const PdDraw* p) {
    for (int64_t i = 0; i < p->num_draws; i++) {
        if (p->rows[i] < 0 || p->rows[i] >= p->num_rows) return kBadId;
    }
    pd::parallel_for(p->num_draws, 1, false, p->num_threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) pd::draw_row(*p, i);
    });
    return kOk;
}
}
