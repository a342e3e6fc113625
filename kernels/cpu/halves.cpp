// The two halves of a decoder layer, each as one call.
//
// They run the same kernels, so the results are the same. What they save is the interpreter's part
// of a decode step (argument checks, allocations, a call per kernel): 0.7 ms over 30 layers, where
// reading the weights of a 135M model takes 6.

#include "kernels.h"
#include "pool.h"

namespace pd {
namespace {

// A buffer of this thread for rows x width elements.
void* intermediate(Scratch slot, int64_t rows, int64_t width, PdType type) {
    return scratch(slot, rows * width * (type == kFp32 ? 4 : 2));
}

}  // namespace
}  // namespace pd

extern "C" {

void pd_mlp(const PdMlp* given) {
    PdMlp p = *given;
    const int64_t rows = p.norm.rows;
    const PdType type = p.norm.type;
    p.norm.y = pd::intermediate(pd::Scratch::kNormed, rows, p.norm.width, type);
    p.gate_up.x = p.norm.y;
    p.gate_up.y = pd::intermediate(pd::Scratch::kWide, rows, p.gate_up.num_cols, type);
    p.gate.x = p.gate_up.y;
    p.gate.y = pd::intermediate(pd::Scratch::kNarrow, rows, p.gate.width, type);
    p.down.x = p.gate.y;
    pd_rms_norm(&p.norm);
    pd_linear(&p.gate_up);
    pd_silu_and_mul(&p.gate);
    pd_linear(&p.down);
}

int32_t pd_attention_block(const PdAttentionBlock* given) {
    PdAttentionBlock p = *given;
    const int64_t rows = p.norm.rows, q_width = p.rope.num_heads * p.rope.head_dim;
    const PdType type = p.norm.type;
    p.norm.y = pd::intermediate(pd::Scratch::kNormed, rows, p.norm.width, type);
    p.qkv.x = p.norm.y;
    p.qkv.y = pd::intermediate(pd::Scratch::kWide, rows, p.qkv.num_cols, type);
    p.rope.qkv = p.qkv.y;
    p.rope.q = pd::intermediate(pd::Scratch::kNarrow, rows, q_width, type);
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
