// Digests of KV memory, sums of words times constants mod 2^64 (reference/digest.py), and copies of
// chunks between blocks and a pool that are digested as they pass (reference/chunks.py).
//
// One thread, the caller's: whoever wants more calls from several. Two 32-bit words are multiplied
// exactly by one instruction, even and odd ones in turn, so a core takes in more than memory gives.

#include "kernels.h"

namespace pd {
namespace {

constexpr int64_t kAhead = 4096;

// What becomes of the words that are summed. A stream goes past the caches: nobody reads it soon,
// and memory need not be read before it is written.
enum class Copy { kNone, kPlain, kStream };

template <Copy copy>
uint64_t sum_products(const uint8_t* from, uint8_t* to, const uint32_t* constants,
                      int64_t num_words) {
    uint64_t sum = 0;
    int64_t i = 0;
#ifdef __AVX2__
    const auto load = [](const void* at) {
        return _mm256_loadu_si256(static_cast<const __m256i*>(at));
    };
    const auto high = [](__m256i a) { return _mm256_srli_epi64(a, 32); };
    __m256i even[2] = {}, odd[2] = {};
    for (; i + 16 <= num_words; i += 16) {
        // What comes next lies behind it, mostly. The hardware's own prefetch ends with a page:
        // 8.6 GB/s from memory without, 11.5 with.
        _mm_prefetch(reinterpret_cast<const char*>(from + 4 * i + kAhead), _MM_HINT_T0);
        for (int half = 0; half < 2; ++half) {
            const __m256i a = load(from + 4 * i + 32 * half);
            auto* there = reinterpret_cast<__m256i*>(to + 4 * i + 32 * half);
            if constexpr (copy == Copy::kStream) _mm256_stream_si256(there, a);
            if constexpr (copy == Copy::kPlain) _mm256_storeu_si256(there, a);
            const __m256i c = load(constants + i + 8 * half);
            even[half] = _mm256_add_epi64(even[half], _mm256_mul_epu32(a, c));
            odd[half] = _mm256_add_epi64(odd[half], _mm256_mul_epu32(high(a), high(c)));
        }
    }
    const __m256i all = _mm256_add_epi64(_mm256_add_epi64(even[0], odd[0]),
                                         _mm256_add_epi64(even[1], odd[1]));
    uint64_t lanes[4];
    std::memcpy(lanes, &all, sizeof lanes);
    sum = lanes[0] + lanes[1] + lanes[2] + lanes[3];
#endif
    for (; i < num_words; ++i) {
        uint32_t word;
        std::memcpy(&word, from + 4 * i, sizeof word);
        if constexpr (copy != Copy::kNone) std::memcpy(to + 4 * i, &word, sizeof word);
        sum += static_cast<uint64_t>(word) * constants[i];
    }
    return sum;
}

// Of one layer, plane and head.
uint64_t sum_span(const PdDigest& p, const uint8_t* first, const PdSpan& span) {
    const uint32_t* constants = p.constants + span.place * p.words;
    const auto sum = [](const uint8_t* from, const uint32_t* with, int64_t num_words) {
        return sum_products<Copy::kNone>(from, nullptr, with, num_words);
    };
    if (p.token_stride == 4 * p.words) return sum(first, constants, span.tokens * p.words);
    uint64_t all = 0;
    for (int64_t token = 0; token < span.tokens; ++token) {
        all += sum(first + token * p.token_stride, constants + token * p.words, p.words);
    }
    return all;
}

bool is_inside(const PdDigest& p, const PdSpan& span) {
    return span.row >= 0 && span.row < p.rows && span.block >= 0 && span.block < p.num_blocks &&
           span.first >= 0 && span.tokens >= 0 && span.first + span.tokens <= p.block_size &&
           span.place >= 0 && span.place + span.tokens <= p.num_places;
}

uint64_t copy_words(const uint8_t* from, uint8_t* to, const uint32_t* constants,
                    int64_t num_words) {
    const bool is_aligned = reinterpret_cast<uintptr_t>(to) % 32 == 0;
    return is_aligned ? sum_products<Copy::kStream>(from, to, constants, num_words)
                      : sum_products<Copy::kPlain>(from, to, constants, num_words);
}

// Of one layer, plane and head: the tokens of a block, and their place in the pool. Where there is
// no block they are summed only.
template <bool to_pool>
uint64_t pass_tokens(const PdChunks& p, uint8_t* block, uint8_t* place, const uint32_t* constants) {
    const int64_t num_words = p.block_size * p.words, token_bytes = 4 * p.words;
    if (block == nullptr) {
        return sum_products<Copy::kNone>(place, nullptr, constants, num_words);
    }
    const auto pass = [&](uint8_t* here, uint8_t* there, const uint32_t* with, int64_t size) {
        return to_pool ? copy_words(here, there, with, size) : copy_words(there, here, with, size);
    };
    if (p.token_stride == token_bytes) return pass(block, place, constants, num_words);
    uint64_t sum = 0;
    for (int64_t token = 0; token < p.block_size; ++token) {
        sum += pass(block + token * p.token_stride, place + token * token_bytes,
                    constants + token * p.words, p.words);
    }
    return sum;
}

bool are_inside(const PdChunks& p, bool needs_blocks) {
    const int64_t start_max = p.pool_bytes - p.layers * p.planes * p.blocks_per_chunk *
                                                 p.block_size * p.words * 4;
    for (int64_t i = 0; i < p.chunks * p.blocks_per_chunk; ++i) {
        if (p.blocks[i] >= p.num_blocks || (needs_blocks && p.blocks[i] < 0)) return false;
    }
    for (int64_t i = 0; i < p.chunks * p.heads; ++i) {
        if (p.starts[i] > start_max) return false;
    }
    return true;
}

template <bool to_pool>
int32_t pass_chunks(const PdChunks& p) {
    if (!are_inside(p, to_pool)) return kBadBlock;
    const int64_t block_bytes = p.block_size * p.words * 4;  // of one layer, plane and head
    const int64_t plane_bytes = p.blocks_per_chunk * block_bytes;
    const auto pass = [&](int64_t chunk, int64_t index, int64_t layer_plane, int64_t head) {
        const int64_t start = p.starts[chunk * p.heads + head];
        if (start < 0) return;
        const int64_t layer = layer_plane / p.planes, plane = layer_plane % p.planes;
        const int64_t id = p.blocks[chunk * p.blocks_per_chunk + index];
        auto* block = static_cast<uint8_t*>(p.memory) + id * p.block_stride +
                      layer * p.layer_stride + plane * p.plane_stride + head * p.head_stride;
        auto* place = static_cast<uint8_t*>(p.pool) + start + layer_plane * plane_bytes +
                      index * block_bytes;
        const uint32_t* constants = p.constants + index * p.block_size * p.words;
        p.out[(chunk * p.layers + layer) * p.heads + head] +=
            p.keys[layer_plane * p.heads + head] *
            pass_tokens<to_pool>(p, id < 0 ? nullptr : block, place, constants);
    };
    const int64_t layer_planes = p.layers * p.planes;
    for (int64_t chunk = 0; chunk < p.chunks; ++chunk) {
        // What is read is read in the order in which it lies.
        if constexpr (to_pool) {
            for (int64_t index = 0; index < p.blocks_per_chunk; ++index)
                for (int64_t j = 0; j < layer_planes; ++j)
                    for (int64_t head = 0; head < p.heads; ++head) pass(chunk, index, j, head);
        } else {
            for (int64_t j = 0; j < layer_planes; ++j)
                for (int64_t head = 0; head < p.heads; ++head)
                    for (int64_t index = 0; index < p.blocks_per_chunk; ++index)
                        pass(chunk, index, j, head);
        }
    }
#ifdef __AVX2__
    _mm_sfence();  // streams are in no order with what is written behind them
#endif
    return kOk;
}

}  // namespace
}  // namespace pd

extern "C" int32_t pd_digest(const PdDigest* p) {
    for (int64_t i = 0; i < p->num_spans; ++i) {
        if (!pd::is_inside(*p, p->spans[i])) return kBadBlock;
    }
    for (int64_t i = 0; i < p->num_spans; ++i) {
        const PdSpan& span = p->spans[i];
        const uint8_t* block = static_cast<const uint8_t*>(p->memory) +
                               span.block * p->block_stride + span.first * p->token_stride;
        uint64_t* row = p->out + span.row * p->layers * p->heads;
        for (int64_t layer = 0; layer < p->layers; ++layer) {
            for (int64_t plane = 0; plane < p->planes; ++plane) {
                const uint8_t* heads = block + layer * p->layer_stride + plane * p->plane_stride;
                const uint64_t* keys = p->keys + (layer * p->planes + plane) * p->heads;
                for (int64_t head = 0; head < p->heads; ++head) {
                    const uint8_t* first = heads + head * p->head_stride;
                    row[layer * p->heads + head] += keys[head] * pd::sum_span(*p, first, span);
                }
            }
        }
    }
    return kOk;
}

extern "C" int32_t pd_gather_chunks(const PdChunks* p) { return pd::pass_chunks<true>(*p); }

extern "C" int32_t pd_scatter_chunks(const PdChunks* p) { return pd::pass_chunks<false>(*p); }
