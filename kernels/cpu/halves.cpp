// The two halves of a decoder layer, each as one call.
//
// They run the same kernels, so the results are the same. What they save is the interpreter's part
// (argument checks, allocations, a call per kernel): of 30 layers 0.7 ms in a decode step, where
// reading the weights of a 135M model takes 6, and more in a step of many tokens, which leave
// nothing of the interpreter in the caches.

#include <cstdlib>

#include "kernels.h"
#include "packed.h"
#include "pool.h"

namespace pd {
namespace {

// More rows have intermediate values in memory of the call's own, which else were held for good.
constexpr int64_t kFewRows = 128;

// Buffers for values of some rows that end with this object.
class Intermediates {
   public:
    Intermediates(int64_t rows, PdType type) : rows_(rows), size_(type == kFp32 ? 4 : 2) {}
    Intermediates(const Intermediates&) = delete;
    ~Intermediates() {
        for (int i = 0; i < count_; i++) std::free(own_[i]);
    }

    void* of(Scratch slot, int64_t width) {
        const int64_t num_bytes = rows_ * width * size_;
        if (rows_ <= kFewRows) return scratch(slot, num_bytes);
        void* memory = std::aligned_alloc(64, static_cast<size_t>((num_bytes + 63) / 64 * 64));
        if (memory == nullptr) std::abort();
        return own_[count_++] = memory;
    }

   private:
    const int64_t rows_, size_;
    void* own_[3];
    int count_ = 0;
};

}  // namespace
}  // namespace pd

extern "C" {

void pd_mlp(const PdMlp* given) {
    PdMlp p = *given;
    pd::Intermediates values(p.norm.rows, p.norm.type);
    p.norm.y = values.of(pd::Scratch::kNormed, p.norm.width);
    p.gate_up.x = p.norm.y;
    p.gate.y = values.of(pd::Scratch::kNarrow, p.gate.width);
    p.down.x = p.gate.y;
    pd_rms_norm(&p.norm);
    if (p.norm.rows > pd::kFewRows && p.gate.width % pd::kCols == 0 && !p.gate.gelu) {
        p.gate_up.y = p.gate.y;
        pd_gated_linear(&p.gate_up);
    } else {
        p.gate_up.y = values.of(pd::Scratch::kWide, p.gate_up.num_cols);
        p.gate.x = p.gate_up.y;
        pd_linear(&p.gate_up);
        pd_gate(&p.gate);
    }
    pd_linear(&p.down);
}

int32_t pd_attention_block(const PdAttentionBlock* given) {
    PdAttentionBlock p = *given;
    pd::Intermediates values(p.norm.rows, p.norm.type);
    p.norm.y = values.of(pd::Scratch::kNormed, p.norm.width);
    p.qkv.x = p.norm.y;
    p.qkv.y = values.of(pd::Scratch::kWide, p.qkv.num_cols);
    p.rope.qkv = p.qkv.y;
    p.rope.q = values.of(pd::Scratch::kNarrow, p.rope.num_heads * p.rope.head_dim);
    p.attention.q = p.rope.q;
    // qkv is used up by then.
    p.attention.out = p.qkv.y;
    p.out.x = p.attention.out;
    pd_rms_norm(&p.norm);
    pd_linear(&p.qkv);
    int32_t status = pd_rope_and_cache(&p.rope);
    if (status == kOk) status = pd_paged_attention(&p.attention);
    if (status == kOk) pd_linear(&p.out);
    return status;
}
}
