// The C interface: what native.py calls.
//
// Each function takes one struct, whose fields are in the order of a format string in native.py:
// packing it is several times cheaper there than converting as many arguments one by one. Functions
// that follow indices return a PdStatus; an index that is out of range is not followed, and the
// results are incomplete.

#pragma once

#include <cstdint>

#include "simd.h"

extern "C" {

enum PdType : int32_t { kBf16 = 0, kFp16 = 1, kFp32 = 2 };
enum PdStatus : int32_t { kOk = 0, kBadPosition = 1, kBadSlot = 2, kBadBlock = 3 };

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

// From weight [num_cols, depth], row-major, to its packed form, or back.
struct PdPack {
    void* weight;
    void* packed;  // pd_packed_bytes long
    int64_t num_cols, depth;
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
    PdType type;
    int32_t num_threads;
};

struct PdSiluAndMul {
    const void* x;  // [rows, 2 * width]
    void* y;        // [rows, width]
    int64_t rows, width;
    PdType type;
    int32_t num_threads;
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
    PdType type;
    int32_t num_threads;
};

struct PdPagedAttention {
    const void* q;                // [rows, num_heads, head_dim]
    const void* kv;               // [num_blocks, 2, num_kv_heads, block_size, head_dim]
    const int32_t* block_tables;  // [num_requests, max_blocks]
    const int32_t* query_start;   // [num_requests + 1]
    const int32_t* context_lens;  // [num_requests]
    void* out;                    // [rows, num_heads, head_dim]
    int64_t block_stride;         // elements of kv from block to block
    int64_t num_blocks, num_kv_heads, block_size, head_dim;
    int64_t num_requests, max_blocks, rows, num_heads;
    int64_t window;  // 0: none
    float scale;
    PdType type;
    int32_t num_threads;
};
// Half a decoder layer in one call: norm, gate_up, gate, down. The results in between are not
// given: norm.y to down.x are null.
struct PdMlp {
    PdRmsNorm norm;
    PdLinear gate_up;
    PdSiluAndMul gate;
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

void pd_linear(const PdLinear* p);
void pd_rms_norm(const PdRmsNorm* p);
void pd_silu_and_mul(const PdSiluAndMul* p);
int32_t pd_rope_and_cache(const PdRopeAndCache* p);
int32_t pd_paged_attention(const PdPagedAttention* p);
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
