// Mixture of experts: who computes which token, and the experts' gated MLPs.
//
// Batch invariance: a row's choice is computed from its own logits, in an order that their number
// decides. Rows are grouped by expert, each group's products are those of linear.cpp, whose rows do
// not depend on one another, and a row's results are summed in the order of its choices.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels.h"
#include "pool.h"
#include "rows.h"

namespace pd {
namespace {

// Added to the sum that weights are divided by, as DeepSeek-V3 has it.
constexpr float kLeastSum = 1e-20f;

// Bytes of intermediate results per pass over the experts.
constexpr int64_t kMaxBytes = 64 << 20;

// What rows are chosen by, per thread.
class Router {
   public:
    explicit Router(const PdRoute& p)
        : p_(p),
          score_(p.num_experts),
          choice_(p.num_experts),
          group_(p.num_groups),
          open_(p.num_experts),
          open_group_(p.num_groups) {}

    void route(int64_t row) {
        const float* logits = p_.logits + row * p_.num_experts;
        p_.sigmoid ? take_sigmoid(logits) : take_softmax(logits);
        for (int64_t e = 0; e < p_.num_experts; e++) {
            choice_[e] = p_.bias == nullptr ? score_[e] : score_[e] + p_.bias[e];
        }
        close_groups();
        int64_t* ids = p_.ids + row * p_.top_k;
        float* weights = p_.weights + row * p_.top_k;
        float sum = 0.0f;
        for (int64_t c = 0; c < p_.top_k; c++) {
            const int64_t best = take_best(choice_, open_);
            ids[c] = best;
            weights[c] = score_[best];
            sum += weights[c];
        }
        for (int64_t c = 0; c < p_.top_k; c++) {
            if (p_.normalize) weights[c] /= sum + kLeastSum;
            weights[c] *= p_.scale;
        }
    }

   private:
    void take_sigmoid(const float* logits) {
        for (int64_t e = 0; e < p_.num_experts; e++) score_[e] = 1.0f / (1.0f + std::exp(-logits[e]));
    }

    void take_softmax(const float* logits) {
        float top = kMinusInf, sum = 0.0f;
        for (int64_t e = 0; e < p_.num_experts; e++) top = std::max(top, logits[e]);
        for (int64_t e = 0; e < p_.num_experts; e++) {
            score_[e] = std::exp(logits[e] - top);
            sum += score_[e];
        }
        for (int64_t e = 0; e < p_.num_experts; e++) score_[e] /= sum;
    }

    // Leaves the experts of the best groups open.
    void close_groups() {
        if (p_.top_groups == p_.num_groups) {
            std::fill(open_.begin(), open_.end(), 1);
            return;
        }
        const int64_t size = p_.num_experts / p_.num_groups;
        for (int64_t g = 0; g < p_.num_groups; g++) {
            float best = kMinusInf, second = kMinusInf;
            for (int64_t e = g * size; e < (g + 1) * size; e++) {
                if (choice_[e] > best) {
                    second = best;
                    best = choice_[e];
                } else if (choice_[e] > second) {
                    second = choice_[e];
                }
            }
            group_[g] = p_.sum_of_top_2 ? best + second : best;
        }
        std::fill(open_.begin(), open_.end(), 0);
        std::fill(open_group_.begin(), open_group_.end(), 1);
        for (int64_t i = 0; i < p_.top_groups; i++) {
            const int64_t g = take_best(group_, open_group_);
            std::fill(open_.begin() + g * size, open_.begin() + (g + 1) * size, 1);
        }
    }

    // The first of the largest open values, which is then closed. There is one, even among NaNs.
    static int64_t take_best(const std::vector<float>& values, std::vector<char>& open) {
        int64_t best = -1;
        for (int64_t i = 0; i < static_cast<int64_t>(values.size()); i++) {
            if (open[i] && (best < 0 || values[i] > values[best])) best = i;
        }
        open[best] = 0;
        return best;
    }

    const PdRoute& p_;
    std::vector<float> score_, choice_, group_;
    std::vector<char> open_, open_group_;
};

// Some rows' choices, grouped by expert.
struct Groups {
    std::vector<int64_t> start;  // of each expert's run in `rows`, and the end
    std::vector<int32_t> rows;   // by expert, then in order
    std::vector<int64_t> place;  // of each choice in `rows`, or -1
};

Groups group(const PdExperts& p, const int64_t* ids, int64_t num_rows) {
    Groups groups{std::vector<int64_t>(p.num_experts + 1, 0), {},
                  std::vector<int64_t>(num_rows * p.top_k, -1)};
    for (int64_t i = 0; i < num_rows * p.top_k; i++) {
        if (ids[i] >= 0) groups.start[ids[i] + 1]++;
    }
    for (int64_t e = 0; e < p.num_experts; e++) groups.start[e + 1] += groups.start[e];
    groups.rows.resize(groups.start.back());
    std::vector<int64_t> next(groups.start.begin(), groups.start.end() - 1);
    for (int64_t i = 0; i < num_rows * p.top_k; i++) {
        if (ids[i] < 0) continue;
        groups.place[i] = next[ids[i]]++;
        groups.rows[groups.place[i]] = static_cast<int32_t>(i / p.top_k);
    }
    return groups;
}

// From [rows, 2 * inner] to [rows, inner].
template <class T>
void gate(const PdExperts& p, const T* from, T* to, int64_t rows) {
    if (p.limit == 0) {
        const PdGate silu{from, to, rows, p.inner, p.type, p.num_threads, 0};
        return pd_gate(&silu);
    }
    parallel_for(rows, 8, false, p.num_threads, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) {
            clamped_glu_row(from + row * 2 * p.inner, to + row * p.inner, p.inner, p.alpha, p.limit);
        }
    });
}

template <class T>
void run_experts(const PdExperts& p, int64_t first, int64_t num_rows) {
    const int64_t width = p.width, inner = p.inner;
    const auto size = static_cast<int64_t>(sizeof(T));
    const T* x = static_cast<const T*>(p.x) + first * width;
    T* y = static_cast<T*>(p.y) + first * width;
    const float* weights = p.weights + first * p.top_k;
    const Groups groups = group(p, p.ids + first * p.top_k, num_rows);
    const auto num_results = static_cast<int64_t>(groups.rows.size());
    auto* results = static_cast<float*>(
        scratch(Scratch::kPartials, num_results * width * static_cast<int64_t>(sizeof(float))));
    for (int64_t e = 0; e < p.num_experts; e++) {
        const int64_t begin = groups.start[e], count = groups.start[e + 1] - begin;
        if (count == 0) continue;
        const int32_t* rows = groups.rows.data() + begin;
        const T* input = x + rows[0] * width;
        bool in_one_run = true;
        for (int64_t i = 1; i < count; i++) in_one_run &= rows[i] == rows[0] + i;
        if (!in_one_run) {
            auto* gathered = static_cast<T*>(scratch(Scratch::kNormed, count * width * size));
            for (int64_t i = 0; i < count; i++) {
                std::memcpy(gathered + i * width, x + rows[i] * width, width * size);
            }
            input = gathered;
        }
        const char* expert = static_cast<const char*>(p.experts) + e * p.expert_bytes;
        void* wide = scratch(Scratch::kWide, count * 2 * inner * size);
        void* narrow = scratch(Scratch::kNarrow, count * inner * size);
        const float* bias =
            p.bias_at == 0 ? nullptr : reinterpret_cast<const float*>(expert + p.bias_at);
        const float* down_bias = bias == nullptr ? nullptr : bias + 2 * inner;
        const PdLinear gate_up{input,     expert, bias,   wide,   count,
                               2 * inner, width,  p.type, p.type, p.num_threads};
        const PdLinear down{narrow, expert + p.down_at, down_bias, results + begin * width, count,
                            width,  inner,              p.type,    kFp32, p.num_threads};
        pd_linear(&gate_up);
        gate<T>(p, static_cast<T*>(wide), static_cast<T*>(narrow), count);
        pd_linear(&down);
    }
    const auto sum = [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) {
            for (int64_t at = 0; at < width; at += kLanes) {
                const int lanes = static_cast<int>(std::min<int64_t>(kLanes, width - at));
                F16 total = zero();
                for (int64_t i = row * p.top_k; i < (row + 1) * p.top_k; i++) {
                    if (groups.place[i] < 0) continue;
                    const float* result = results + groups.place[i] * width + at;
                    total = fma(load(result, lanes), splat(weights[i]), total);
                }
                store(y + row * width + at, total, lanes);
            }
        }
    };
    parallel_for(num_rows, 8, false, p.num_threads, sum);
}

}  // namespace
}  // namespace pd

extern "C" {

void pd_route(const PdRoute* p) {
    pd::parallel_for(p->rows, 32, false, p->num_threads, [&](int64_t begin, int64_t end) {
        pd::Router router(*p);
        for (int64_t row = begin; row < end; row++) router.route(row);
    });
}

int32_t pd_experts(const PdExperts* p) {
    for (int64_t i = 0; i < p->rows * p->top_k; i++) {
        if (p->ids[i] >= p->num_experts) return kBadId;
    }
    const int64_t row_bytes = p->top_k * (p->width + 3 * p->inner) * int64_t{4};
    const int64_t at_once = std::max<int64_t>(64, pd::kMaxBytes / std::max<int64_t>(row_bytes, 1));
    pd::with_type(p->type, [&](auto kind) {
        for (int64_t first = 0; first < p->rows; first += at_once) {
            pd::run_experts<decltype(kind)>(*p, first, std::min(at_once, p->rows - first));
        }
    });
    return kOk;
}
}
