// The C interface: what the Python modules beside it call.
//
// Each function takes one struct, whose fields are in the order of a format string there: packing
// it is several times cheaper in Python than converting as many arguments one by one. Functions that
// follow indices return a PdStatus; an index that is out of range is not followed, and the results
// are incomplete.

#pragma once

#include <cstdint>

#include "simd.h"

extern "C" {

enum PdType : int32_t { kBf16 = 0, kFp16 = 1, kFp32 = 2 };
// What multiplies: VFMADD231PS or the like, VDPBF16PS, AMX' TDPBF16PS.
enum PdUnit : int32_t { kFma = 0, kPairs = 1, kTiles = 2 };
enum PdStatus : int32_t { kOk = 0, kBadPosition = 1, kBadSlot = 2, kBadBlock = 3, kBadId = 4 };

// y = x weight^T + bias
struct PdLinear {
    const void* x;       // [rows, depth]
    const void* weight;  // packed, see linear.cpp
    const float* bias;   // [num_cols] or null
    void* y;             // [rows, num_cols]
    int64_t rows, num_cols, depth;
    PdType type, out_type;  // of x and weight; of y: the same or kFp32
    int32_t num_threads;
};

// From weight [num_cols, depth], row-major, to columns first_col and on of a packed weight that may
// have more of them, or back. Packing writes no padding: it must be zero already.
struct PdPack {
    void* weight;
    void* packed;    // pd_packed_bytes long
    int64_t stride;  // elements of weight from row to row
    int64_t num_cols, depth, first_col;
    PdType type;
    int32_t num_threads;
};

// Row i of y is the row ids[i] - first_id of a packed weight, zero where it has none.
struct PdTakeRows {
    const int64_t* ids;  // [rows], each below num_ids
    const void* packed;
    void* y;  // [rows, depth]
    int64_t rows, num_cols, depth, first_id, num_ids;
    PdType type;
    int32_t num_threads;
};

// y = weight * x / rms(x), where x is first replaced by residual += x if there is a residual.
struct PdRmsNorm {
    const void* x;       // [rows, width]
    void* residual;      // [rows, width] or null
    const void* weight;  // [width]
    void* y;             // [rows, width]
    int64_t rows, width;
    float eps;
    PdType type, weight_type;  // of the weight: the same or kFp32, which leaves out one rounding
    int32_t num_threads;
};

// y = silu(x) * z, or gelu(x) * z, for x and z side by side.
struct PdGate {
    const void* x;  // [rows, 2 * width]
    void* y;        // [rows, width]
    int64_t rows, width;
    PdType type;
    int32_t num_threads;
    int32_t gelu;
};

struct PdRopeAndCache {
    const void* qkv;           // [rows, (num_heads + 2 * num_kv_heads) * head_dim]
    const int64_t* positions;  // [rows]
    const float* cos_sin;      // [num_positions, rotary_dim]
    void* kv;                  // [num_blocks, 2, num_kv_heads, block_size, head_dim]
    const int64_t* slots;      // [rows]
    const void* q_norm;        // [head_dim] or null
    const void* k_norm;        // [head_dim] or null
    void* q;                   // [rows, num_heads, head_dim]
    int64_t block_stride;      // elements of kv from block to block
    int64_t num_blocks, num_kv_heads, block_size, head_dim;
    int64_t rows, num_heads, num_positions, rotary_dim;
    float eps;
    PdType type, norm_type;  // of the norms: the same or kFp32, as of PdRmsNorm
    int32_t num_threads;
};

struct PdPagedAttention {
    const void* q;                // [rows, num_heads, head_dim]
    const void* kv;               // [num_blocks, planes, num_kv_heads, block_size, head_dim]
    const int32_t* block_tables;  // [num_requests, max_blocks]
    const int32_t* query_start;   // [num_requests + 1]
    const int32_t* context_lens;  // [num_requests]
    const float* sinks;           // [num_heads]: scores, not scaled, without a value; or null
    void* out;                    // [rows, num_heads, value_dim]
    int64_t block_stride;         // elements of kv from block to block
    int64_t num_blocks, num_kv_heads, block_size, head_dim;
    int64_t num_requests, max_blocks, rows, num_heads;
    int64_t window;  // 0: none
    int64_t value_dim;
    int64_t value_offset;  // elements of kv from a key to its value
    float scale;
    PdType type;
    int32_t num_threads;
};

// y = the heads' own products: y[:, h] = x[:, h] weight[h]^T
struct PdHeadLinear {
    const void* x;       // [rows, num_heads, depth], strided
    const void* weight;  // [num_heads] packed ones, side by side
    void* y;             // [rows, num_heads, num_cols], strided
    int64_t rows, num_heads, num_cols, depth;
    int64_t x_stride, x_head_stride, y_stride, y_head_stride;  // in elements
    PdType type;
    int32_t num_threads;
};

// Norms and stores the latent of each token with its rotated key, and rotates the last rotary_dim
// elements of each head of q to the end of each head of queries.
struct PdRopeAndLatent {
    const void* q;             // [rows, num_heads, head_dim]
    void* queries;             // [rows, num_heads, latent_dim + rotary_dim]
    const void* latent;        // [rows, latent_dim + rotary_dim]
    const int64_t* positions;  // [rows]
    const float* cos_sin;      // [num_positions, rotary_dim]
    void* kv;                  // [num_blocks, block_size, latent_dim + rotary_dim]
    const int64_t* slots;      // [rows]
    const void* norm;          // [latent_dim]
    int64_t block_stride;      // elements of kv from block to block
    int64_t num_blocks, block_size, latent_dim, rotary_dim;
    int64_t rows, num_heads, head_dim, num_positions;
    float eps;
    PdType type;
    int32_t num_threads;
};

// Chooses top_k experts for each row. Ties go to the lower index.
struct PdRoute {
    const float* logits;  // [rows, num_experts]
    const float* bias;    // [num_experts], decides the choice alone; or null
    int64_t* ids;         // [rows, top_k]
    float* weights;       // [rows, top_k]
    int64_t rows, num_experts, top_k;
    int64_t num_groups, top_groups;  // only experts of the best groups may be chosen
    float scale;                     // of the weights
    int32_t sigmoid;                 // else softmax
    int32_t normalize;               // weights are divided by their sum
    int32_t sum_of_top_2;            // ranks a group; else its best expert does
    int32_t num_threads;
};

// Draws tokens from rows of logits; entry i of the parameters is of row rows[i].
struct PdDraw {
    const float* logits;  // [num_rows, vocab_size]
    const float* peaks;   // [num_rows], the largest
    const int32_t* rows;  // [num_draws], distinct
    const float *scale, *min_p;
    const int32_t* top_k;
    const int64_t *top_p, *uniform;  // in 2^-53
    int64_t* tokens;                 // [num_rows]; -1 where the peak is not finite
    int64_t num_draws, num_rows, vocab_size;
    int32_t num_threads;
};

// Describes one token of each row of logits, and the likeliest others.
struct PdDescribe {
    const float* logits;     // [num_rows, vocab_size]
    const int64_t* tokens;   // [num_rows]
    const int32_t* num_top;  // [num_rows], at most top_stride
    double* normalisers;     // [num_rows]; NaN where a logit is NaN or the largest is infinite
    int64_t* ranks;          // [num_rows], from 1
    int64_t* top;            // [num_rows, top_stride]; of each row the first num_top are written,
                             // where the normaliser is a number
    int64_t num_rows, vocab_size, top_stride;
    int32_t num_threads;
};

// y = sum over c of weights[:, c] * down(gated(gate(x), up(x))) of expert ids[:, c], in order of c.
struct PdExperts {
    const void* x;         // [rows, width]
    const int64_t* ids;    // [rows, top_k]; negative: not here, adds nothing
    const float* weights;  // [rows, top_k]
    const void* experts;   // [num_experts] of expert_bytes: packed gate_up, down at down_at, biases
    void* y;               // [rows, width]
    int64_t rows, top_k, num_experts, width, inner;
    int64_t expert_bytes, down_at;
    int64_t bias_at;     // of [2 * inner] and [width] fp32; 0: there are none
    float alpha, limit;  // of clamped_glu_row; a limit of 0: gates are those of silu_row
    PdType type;
    int32_t num_threads;
};

// Half a decoder layer in one call: norm, gate_up, gate, down. The results in between are not
// given: norm.y to down.x are null.
struct PdMlp {
    PdRmsNorm norm;
    PdLinear gate_up;
    PdGate gate;
    PdLinear down;
};

// The other half: norm, qkv, rope, attention, out; likewise.
struct PdAttentionBlock {
    PdRmsNorm norm;
    PdLinear qkv;
    PdRopeAndCache rope;
    PdPagedAttention attention;
    PdLinear out;
};

// Tokens of a block that add to a row of digests.
struct PdSpan {
    int64_t row, block, first, tokens, place;
};

// out[row, layer, head] += key of layer, plane, head * sum of word * constant, mod 2^64. Strides are
// in bytes.
struct PdDigest {
    const void* memory;         // [num_blocks, layers, planes, heads, block_size, words], strided
    const PdSpan* spans;        // [num_spans]
    const uint32_t* constants;  // [num_places, words]
    const uint64_t* keys;       // [layers, planes, heads]
    uint64_t* out;              // [rows, layers, heads]
    int64_t num_spans, num_places, rows;
    int64_t num_blocks, layers, planes, heads, block_size, words;
    int64_t block_stride, layer_stride, plane_stride, head_stride, token_stride;
};

// Chunks in blocks, and in a pool: of each head of a chunk [layers, planes, blocks_per_chunk *
// block_size, words] side by side, from starts on. out[chunk, layer, head] += the sum over planes
// of key * sum of word * constant, mod 2^64, of what is copied. Strides and starts are in bytes.
struct PdChunks {
    void* memory;               // [num_blocks, layers, planes, heads, block_size, words], strided
    void* pool;                 // [pool_bytes]
    const int64_t* blocks;      // [chunks, blocks_per_chunk]; negative: its tokens stay in the pool
    const int64_t* starts;      // [chunks, heads]; negative: not of this chunk, its digest stays 0
    const uint32_t* constants;  // [blocks_per_chunk * block_size, words]
    const uint64_t* keys;       // [layers, planes, heads]
    uint64_t* out;              // [chunks, layers, heads], zero
    int64_t chunks, blocks_per_chunk, pool_bytes;
    int64_t num_blocks, layers, planes, heads, block_size, words;
    int64_t block_stride, layer_stride, plane_stride, head_stride, token_stride;
};

// What has compiled this: products and sums are contracted as it sees fit.
const char* pd_compiler();
// What products of bf16 are computed with in this process.
PdUnit pd_bf16_unit();
// What a unit reaches on one core, in GFLOP/s; 0 where this build has none. Takes 10 ms.
double pd_peak_gflops(PdUnit unit);
// Whether bf16 should be widened and multiplied as fp32 on this CPU.
int32_t pd_fma_is_much_faster();
void pd_linear(const PdLinear* p);
// y = silu(gates) * the others, [rows, num_cols / 2], of the columns' two halves, which are multiples
// of 32 wide.
void pd_gated_linear(const PdLinear* p);
int32_t pd_take_rows(const PdTakeRows* p);
void pd_rms_norm(const PdRmsNorm* p);
void pd_gate(const PdGate* p);
int32_t pd_rope_and_cache(const PdRopeAndCache* p);
int32_t pd_paged_attention(const PdPagedAttention* p);
void pd_head_linear(const PdHeadLinear* p);
int32_t pd_rope_and_latent(const PdRopeAndLatent* p);
void pd_route(const PdRoute* p);
int32_t pd_draw(const PdDraw* p);
int32_t pd_describe(const PdDescribe* p);
int32_t pd_experts(const PdExperts* p);
int32_t pd_digest(const PdDigest* p);
int32_t pd_gather_chunks(const PdChunks* p);
int32_t pd_scatter_chunks(const PdChunks* p);
}

namespace pd {

// Calls body with a value of the storage type that `type` names.
template <class Body>
inline auto with_type(PdType type, Body&& body) {
    switch (type) {
        case kBf16:
            return body(Bf16{});
        case kFp16:
            return body(Fp16{});
        default:
            return body(float{});
    }
}

}  // namespace pd
