// Causal attention over the paged cache, for prefill chunks and decodes alike.
//
// The value of a position lies value_offset behind its key and has value_dim elements. With an
// offset of 0 the value is the start of the key: multi-head latent attention, absorbed.
//
// Batch invariance: the positions of a request are cut into tiles of kTile and partitions of
// kPartition, both counted from position 0. Within a partition a row (a query token and head) takes
// the tiles in order by the online softmax recurrence (Milakov and Gimelshein, 2018); results of
// partitions are merged in order. A position that the row may not see weighs exactly 0, and a tile
// or partition without any that it may see changes nothing, bit for bit. A sink is merged last. So
// rows can be blocked, tiles skipped and partitions spread over threads (FlashDecoding) as speed asks.
//
// bf16 is multiplied by tile registers where the process has them (amx.h) and the dimensions are
// multiples of 32: of the whole call, so that a row never meets both kinds of product.
//
// Keys are packed per tile as [Dh][kTile] and values as strips of [kTile][64], in the interleaved
// order of product.h, and serve all rows of a block: the queries of several tokens, times the heads
// that share a KV head. What is packed has zeros up to a multiple of kLanes dimensions.

#include <algorithm>
#include <atomic>
#include <optional>
#include <type_traits>
#include <vector>

#include "attention_state.h"
#include "attention_tiles.h"
#include "attention_vectors.h"
#include "kernels.h"
#include "pool.h"
#include "product.h"
#include "transpose.h"

namespace pd {
namespace {

constexpr int kMaxHeadDim = 1024;

// Rows that share a packed tile. More of them dilute the packing, fewer spread better.
constexpr int64_t kManyRows = 192, kFewRows = 24;

#ifdef PD_DPBF16
// a0 b0 a1 b1 ...; size is a multiple of 16.
inline void interleave(const Bf16* a, const Bf16* b, int64_t size, Bf16* to) {
    alignas(64) static constexpr uint16_t kLow[32] = {
        0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
        8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i low = _mm512_load_si512(kLow);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    int64_t i = 0;
    for (; i + 32 <= size; i += 32) {
        const __m512i x = _mm512_loadu_si512(a + i), y = _mm512_loadu_si512(b + i);
        _mm512_storeu_si512(to + 2 * i, _mm512_permutex2var_epi16(x, low, y));
        _mm512_storeu_si512(to + 2 * i + 32, _mm512_permutex2var_epi16(x, high, y));
    }
    if (i < size) {
        const __m512i x = _mm512_maskz_loadu_epi16(0xffff, a + i);
        const __m512i y = _mm512_maskz_loadu_epi16(0xffff, b + i);
        _mm512_storeu_si512(to + 2 * i, _mm512_permutex2var_epi16(x, low, y));
    }
}
#endif

// The same call as if its heads were padded to whole vectors.
PdPagedAttention padded(PdPagedAttention p) {
    p.head_dim = (p.head_dim + kLanes - 1) / kLanes * kLanes;
    p.value_dim = (p.value_dim + kLanes - 1) / kLanes * kLanes;
    return p;
}

// The cached keys or values of one tile, as rows of T.
template <class T>
struct TileRows {
    const T* key[kTile];
    const T* value[kTile];
};

// Asks for the lines of a tile a few at a time, in between other work: all at once they would fill
// the core's miss buffers and hold up the loads behind them.
class Ahead {
   public:
    void add(const void* from, int64_t num_bytes) {
        const char* at = static_cast<const char*>(from);
        ranges_[num_ranges_++] = {at, at + num_bytes};
    }
    void ask(int64_t num_lines) {
        while (num_lines > 0 && next_ < num_ranges_) {
            const char*& at = ranges_[next_].at;
            const char* end = std::min(at + num_lines * 64, ranges_[next_].end);
            num_lines -= (end - at + 63) / 64;
            for (; at < end; at += 64) prefetch_to_l2(at);
            if (at >= ranges_[next_].end) next_++;
        }
    }

   private:
    struct Range {
        const char* at;
        const char* end;
    };
    Range ranges_[2 * kTile];
    int num_ranges_ = 0, next_ = 0;
};

template <class T>
class Attention {
   public:
    using Unit = typename Format<T>::Input;  // of packed tiles, queries and weights
    static constexpr int kDepth = Format<Unit>::kDepth;

    Attention(const PdPagedAttention& p, std::atomic<int32_t>& status)
        : given_(p),
          p_(padded(p)),
          status_(status),
          group_(p.num_heads / p.num_kv_heads),
          math_(p_) {
#ifdef PD_AMX
        by_tiles_ = TileMath::can_take(p_);
#endif
    }

    // Rows of the states that a block's rows need.
    int64_t num_kept(int64_t rows) const {
        if (!by_tiles_ || rows <= kTileRows) return rows;
        return (rows + kTileRows - 1) / kTileRows * kTileRows;
    }

    // Attends the rows of a block under KV heads [first_head, end_head) to one partition, and
    // overwrites `states`, one per head. Heads are taken in turn for each tile: theirs lie side by
    // side. `next` is the block to come, if that is known.
    void attend(const Block& block, int64_t first_head, int64_t end_head, int64_t partition,
                const State* states, const Block* next) const {
        const int64_t head_dim = p_.head_dim;
        const int64_t rows = num_kept(block.num_tokens * group_);
        auto* queries = static_cast<Unit*>(
            scratch(Scratch::kInput, (end_head - first_head) * rows * head_dim * kUnitBytes));
        for (int64_t head = first_head; head < end_head; head++) {
            states[head - first_head].clear(rows);
            gather_queries(block, head, queries + (head - first_head) * rows * head_dim);
        }
        auto* keys = static_cast<Unit*>(
            scratch(Scratch::kTile, kTile * (head_dim + p_.value_dim) * kUnitBytes));
        Unit* values = keys + kTile * head_dim;
#ifdef PD_AMX
        std::optional<Tiles> tiles;
        if (by_tiles_) tiles.emplace(static_cast<int>(std::min<int64_t>(rows, kTileRows)));
#endif

        const int64_t low = block.low_position(p_.window) / kTile * kTile;
        const int64_t last = std::min(block.end_position(), (partition + 1) * kPartition);
        for (int64_t start = std::max(low, partition * kPartition); start < last; start += kTile) {
            const int64_t count = std::min<int64_t>(kTile, last - start);
            for (int64_t head = first_head; head < end_head; head++) {
                TileRows<T> tile;
                find_rows(block.request, head, start, count, tile);
                Ahead ahead;
                if (head + 1 < end_head) {
                    look_ahead(block, head + 1, start, ahead);
                } else if (start + kTile < block.end_position()) {
                    look_ahead(block, first_head, start + kTile, ahead);
                } else if (next != nullptr) {
                    const int64_t first = next->low_position(p_.window) / kTile * kTile;
                    look_ahead(*next, first_head, first, ahead);
                }
                pack_keys(tile, count, keys, ahead);
                pack_values(tile, count, values, ahead);
                const Unit* own = queries + (head - first_head) * rows * head_dim;
                const State& state = states[head - first_head];
#ifdef PD_AMX
                if constexpr (std::is_same_v<T, Bf16>) {
                    if (tiles) {
                        TileMath(p_).take_bands(*tiles, block, start, own, keys, values, state);
                        continue;
                    }
                }
#endif
                math_.take_bands(block, start, own, keys, values, state);
            }
        }
    }

    // Folds the later partition's state into that of the earlier ones.
    void merge(State into, State later, int64_t rows) const {
        for (int64_t row = 0; row < rows; row++) {
            const float top = std::max(into.top[row], later.top[row]);
            const F16 base = splat(top == kMinusInf ? 0.0f : top);
            const F16 a = rescale(splat(into.top[row]), base);
            const F16 b = rescale(splat(later.top[row]), base);
            into.top[row] = top;
            const auto fold = [&](float* x, const float* y) {
                store(x, fma(load(y), b, load(x) * a));
            };
            fold(into.sum + row * kLanes, later.sum + row * kLanes);
            for (int64_t d = 0; d < p_.value_dim; d += kLanes) {
                fold(into.out + row * p_.value_dim + d, later.out + row * p_.value_dim + d);
            }
        }
    }

    // Writes the attended rows.
    void finish(const Block& block, int64_t kv_head, State state) const {
        const int64_t group = group_;
        for (int64_t row = 0; row < block.num_tokens * group; row++) {
            const int64_t head = head_of(block, kv_head, row);
            const F16 scale = share_of(state, row, head % p_.num_heads);
            T* to = static_cast<T*>(p_.out) + head * given_.value_dim;
            const float* from = state.out + row * p_.value_dim;
            int64_t d = 0;
            for (; d + kLanes <= given_.value_dim; d += kLanes) {
                store(to + d, load(from + d) * scale);
            }
            const int rest = static_cast<int>(given_.value_dim - d);
            if (rest > 0) store(to + d, load(from + d) * scale, rest);
        }
    }

   private:
    static constexpr int64_t kUnitBytes = sizeof(Unit);

    // What a row's sums of values are multiplied by at last: 1 over its weights, the sink's included.
    F16 share_of(const State& state, int64_t row, int64_t head) const {
        const float sum = sum_lanes(load(state.sum + row * kLanes));
        if (p_.sinks == nullptr) return splat(1.0f / sum);
        const F16 sink = splat(p_.sinks[head] * kLog2E), top = splat(state.top[row]);
        const F16 most = max(sink, top), shrink = rescale(top, most);
        return shrink / fma(splat(sum), shrink, rescale(sink, most));
    }

    // The place of a row's head among all heads of q, and of the output.
    int64_t head_of(const Block& block, int64_t kv_head, int64_t row) const {
        const int64_t group = group_;
        const int64_t token = block.first_token + row / group;
        return token * p_.num_heads + kv_head * group + row % group;
    }

    void gather_queries(const Block& block, int64_t kv_head, Unit* to) const {
        for (int64_t row = 0; row < block.num_tokens * group_; row++, to += p_.head_dim) {
            const T* from =
                static_cast<const T*>(p_.q) + head_of(block, kv_head, row) * given_.head_dim;
            int64_t d = 0;
            for (; d + kLanes <= given_.head_dim; d += kLanes) store(to + d, load(from + d));
            const int rest = static_cast<int>(given_.head_dim - d);
            if (rest > 0) store(to + d, load(from + d, rest));
        }
    }

    // The keys of the block that holds `position`, from there on; null if the id is bad.
    const T* block_keys(int64_t request, int64_t kv_head, int64_t position) const {
        const int64_t index = position / p_.block_size;
        const int64_t id = p_.block_tables[request * p_.max_blocks + index];
        if (id < 0 || id >= p_.num_blocks) return nullptr;
        return static_cast<const T*>(p_.kv) + id * p_.block_stride +
               (kv_head * p_.block_size + position % p_.block_size) * given_.head_dim;
    }

    // Positions that lie together in the cache.
    int64_t run_length() const { return std::min<int64_t>(p_.block_size, kTile); }

    // Positions from `count` on get zeros, as far as they are read: the cache may hold anything
    // there, even NaN, and a weight of 0 would not silence that.
    void find_rows(int64_t request, int64_t kv_head, int64_t start, int64_t count,
                   TileRows<T>& tile) const {
        static const T kZeros[kMaxHeadDim] = {};
        std::fill(tile.key, tile.key + kTile, kZeros);
        std::fill(tile.value, tile.value + kTile, kZeros);
        for (int64_t i = 0; i < count; i += run_length()) {
            const T* keys = block_keys(request, kv_head, start + i);
            if (keys == nullptr) {
                status_.store(kBadBlock, std::memory_order_relaxed);
                continue;
            }
            for (int64_t j = 0; j < std::min(run_length(), count - i); j++) {
                tile.key[i + j] = keys + j * given_.head_dim;
                tile.value[i + j] = keys + j * given_.head_dim + p_.value_offset;
            }
        }
        if (given_.head_dim != p_.head_dim) pad_rows(tile.key, given_.head_dim, p_.head_dim, 0);
        if (given_.value_dim != p_.value_dim) {
            pad_rows(tile.value, given_.value_dim, p_.value_dim, kTile * p_.head_dim);
        }
    }

    // Replaces rows of `dim` elements by copies that zeros follow: in the cache other rows do.
    void pad_rows(const T** rows, int64_t dim, int64_t wide, int64_t at) const {
        const int64_t size = kTile * (p_.head_dim + p_.value_dim) * static_cast<int64_t>(sizeof(T));
        T* to = static_cast<T*>(scratch(Scratch::kPadded, size)) + at;
        for (int i = 0; i < kTile; i++, to += wide) {
            std::copy(rows[i], rows[i] + dim, to);
            std::fill(to + dim, to + wide, T{});
            rows[i] = to;
        }
    }

    void look_ahead(const Block& block, int64_t kv_head, int64_t start, Ahead& ahead) const {
        const int64_t count = std::min<int64_t>(kTile, block.end_position() - start);
        const T* keys[kTile];
        int num_blocks = 0;
        for (int64_t i = 0; i < count; i += run_length()) {
            const T* at = block_keys(block.request, kv_head, start + i);
            if (at != nullptr) keys[num_blocks++] = at;
        }
        const int64_t num_bytes = run_length() * given_.head_dim * static_cast<int64_t>(sizeof(T));
        for (int i = 0; i < num_blocks; i++) ahead.add(keys[i], num_bytes);
        if (p_.value_offset == 0) return;
        for (int i = 0; i < num_blocks; i++) ahead.add(keys[i] + p_.value_offset, num_bytes);
    }

    // To [Dh / kDepth][kTile][kDepth].
    void pack_keys(const TileRows<T>& tile, int64_t count, Unit* to, Ahead& ahead) const {
        const int64_t num_words = p_.head_dim / kDepth;
        for (int64_t i = 0; i < count; i += kLanes) {
            for (int64_t word = 0; word < num_words; word += kLanes) {
                float* at = reinterpret_cast<float*>(to + (word * kTile + i) * kDepth);
#ifdef PD_AVX512
                const int n = static_cast<int>(std::min<int64_t>(kLanes, num_words - word));
                F16 rows[kLanes];
                for (int j = 0; j < kLanes; j++) {
                    rows[j] = load_words(tile.key[i + j] + word * kDepth, n);
                }
                transpose(rows);
                for (int j = 0; j < n; j++) store(at + j * kTile, rows[j]);
#else
                for (int first = 0; first < kLanes; first += 8) {
                    transpose_eight([&](int r) { return load(tile.key[i + first + r] + word); },
                                    [&](int w, V8 eight) { store(at + w * kTile + first, eight); });
                }
#endif
                ahead.ask(kLanes);
            }
        }
    }

#ifdef PD_AVX512
    // n words of kDepth units each, as bits.
    static F16 load_words(const T* from, int n) {
        if constexpr (kDepth == 2) return load(reinterpret_cast<const float*>(from), n);
        else return load(from, n);
    }
#endif

    // To [kTile / kDepth][64][kDepth] for each 64 dimensions, then likewise for each 16 of the rest
    // (for tiles, all 32 of it): what is read together lies together, however many there are.
    void pack_values(const TileRows<T>& tile, int64_t count, Unit* to, Ahead& ahead) const {
        const int64_t padded = by_tiles_ ? kTile : (count + kLanes - 1) / kLanes * kLanes;
        for (int64_t i = 0; i < padded; i += kDepth) {
            ahead.ask(p_.value_dim / kLanes);
            int64_t d = 0;
            for (; d + 4 * kLanes <= p_.value_dim; d += 4 * kLanes) {
                pack_pair(tile, i, d, 4 * kLanes, to + d * kTile + i * 4 * kLanes);
            }
            if (by_tiles_ && d < p_.value_dim) {
                pack_pair(tile, i, d, 2 * kLanes, to + d * kTile + i * 2 * kLanes);
                d += 2 * kLanes;
            }
            for (; d < p_.value_dim; d += kLanes) {
                pack_pair(tile, i, d, kLanes, to + d * kTile + i * kLanes);
            }
        }
    }

    // kDepth positions' values, from dimension d on.
    void pack_pair(const TileRows<T>& tile, int64_t i, int64_t d, int64_t size, Unit* to) const {
        if constexpr (kDepth == 2) {
            interleave(tile.value[i] + d, tile.value[i + 1] + d, size, to);
        } else {
            for (int64_t at = 0; at < size; at += kLanes) {
                store(to + at, load(tile.value[i] + d + at));
            }
        }
    }

    const PdPagedAttention& given_;
    const PdPagedAttention p_;  // as padded: what is packed, and the states
    std::atomic<int32_t>& status_;
    const int64_t group_;  // query heads per KV head
    const RowMath<Unit> math_;
    bool by_tiles_ = false;
};

bool valid(const PdPagedAttention& p) {
    if (p.head_dim < 1 || p.head_dim > kMaxHeadDim) return false;
    if (p.value_dim < 1 || p.value_dim > p.head_dim) return false;
    if (p.block_size < 1 || (kTile % p.block_size != 0 && p.block_size % kTile != 0)) return false;
    if (p.query_start[0] != 0 || p.query_start[p.num_requests] != p.rows) return false;
    for (int64_t r = 0; r < p.num_requests; r++) {
        const int64_t queries = int64_t{p.query_start[r + 1]} - p.query_start[r];
        if (queries < 0 || p.context_lens[r] < queries) return false;
        if (p.context_lens[r] > p.max_blocks * p.block_size) return false;
    }
    return true;
}

// Cuts each request's queries into blocks; the later ones, which see more, come first.
std::vector<Block> blocks_of(const PdPagedAttention& p, int64_t tokens_per_block) {
    std::vector<Block> blocks;
    for (int32_t r = 0; r < p.num_requests; r++) {
        const int64_t start = p.query_start[r], count = p.query_start[r + 1] - start;
        const int64_t num = (count + tokens_per_block - 1) / tokens_per_block;
        for (int64_t i = num - 1; i >= 0; i--) {
            const int64_t first = count * i / num, last = count * (i + 1) / num;
            blocks.push_back({r, static_cast<int32_t>(start + first),
                              static_cast<int32_t>(last - first),
                              static_cast<int32_t>(p.context_lens[r] - count + first)});
        }
    }
    return blocks;
}

template <class T>
int32_t run(const PdPagedAttention& p) {
    std::atomic<int32_t> status{kOk};
    const Attention<T> attention(p, status);
    const int64_t heads = p.num_kv_heads, group = p.num_heads / heads;
    const int64_t value_dim = padded(p).value_dim;
    int num_threads = p.num_threads;
    int64_t rows_per_block = kManyRows;
    const auto cut = [&] { return blocks_of(p, std::max<int64_t>(1, rows_per_block / group)); };
    std::vector<Block> blocks = cut();
    while (static_cast<int64_t>(blocks.size()) * heads < 4 * num_threads &&
           rows_per_block > kFewRows && num_threads > 1) {
        rows_per_block /= 2;
        blocks = cut();
    }
    const int64_t num_blocks = static_cast<int64_t>(blocks.size());

    // Where each block's partial states start, should partitions be attended apart.
    std::vector<int64_t> first_piece(num_blocks + 1, 0);
    int64_t max_rows = 0, max_parts = 0, work = 0;
    for (int64_t i = 0; i < num_blocks; i++) {
        const int64_t parts = blocks[i].num_partitions(p.window);
        first_piece[i + 1] = first_piece[i] + parts;
        max_parts = std::max(max_parts, parts);
        max_rows = std::max(max_rows, blocks[i].num_tokens * group);
        work += blocks[i].end_position() - blocks[i].low_position(p.window);
    }
    const int64_t state_size = State::size(attention.num_kept(max_rows), value_dim);
    // About a microsecond's worth of positions is not worth a second thread.
    if (work * heads < 128) num_threads = 1;

    const auto state_at = [&](float* memory, int64_t i) {
        return State::at(memory, attention.num_kept(blocks[i].num_tokens * group), value_dim);
    };
    if (num_threads == 1 || num_blocks * heads >= 2 * num_threads || max_parts == 1) {
        // All heads of a block in one go reads memory in longer runs; a few rows need little else.
        const bool together = max_rows < kFewRows && num_blocks >= 4 * num_threads;
        const int64_t heads_per_item = together ? heads : 1;
        const int64_t items_per_block = heads / heads_per_item;
        const auto attend = [&](int64_t begin, int64_t end) {
            auto* memory = static_cast<float*>(
                scratch(Scratch::kState, 2 * heads_per_item * state_size *
                                             static_cast<int64_t>(sizeof(float))));
            std::vector<State> states(heads_per_item), later(heads_per_item);
            for (int64_t item = begin; item < end; item++) {
                const int64_t i = item / items_per_block;
                const Block& block = blocks[i];
                const int64_t first_head = item % items_per_block * heads_per_item;
                const int64_t end_head = first_head + heads_per_item;
                for (int64_t h = 0; h < heads_per_item; h++) {
                    states[h] = state_at(memory + 2 * h * state_size, i);
                    later[h] = state_at(memory + (2 * h + 1) * state_size, i);
                }
                const bool more = together && item + 1 < end;
                const Block* next = more ? &blocks[i + 1] : nullptr;
                const int64_t first = block.first_partition(p.window);
                const int64_t parts = block.num_partitions(p.window);
                attention.attend(block, first_head, end_head, first, states.data(), next);
                for (int64_t part = 1; part < parts; part++) {
                    attention.attend(block, first_head, end_head, first + part, later.data(), next);
                    for (int64_t h = 0; h < heads_per_item; h++) {
                        attention.merge(states[h], later[h], block.num_tokens * group);
                    }
                }
                for (int64_t h = 0; h < heads_per_item; h++) {
                    attention.finish(block, first_head + h, states[h]);
                }
            }
        };
        parallel_for(num_blocks * items_per_block, 1, together, num_threads, attend);
        return status;
    }

    const int64_t num_pieces = first_piece[num_blocks];
    auto* memory = static_cast<float*>(
        scratch(Scratch::kPartials,
                num_pieces * heads * state_size * static_cast<int64_t>(sizeof(float))));
    parallel_for(num_pieces * heads, 1, false, num_threads, [&](int64_t begin, int64_t end) {
        for (int64_t item = begin; item < end; item++) {
            const int64_t piece = item / heads, head = item % heads;
            const auto after = std::upper_bound(first_piece.begin(), first_piece.end(), piece);
            const int64_t i = after - first_piece.begin() - 1;
            const int64_t part = blocks[i].first_partition(p.window) + piece - first_piece[i];
            const State state = state_at(memory + item * state_size, i);
            attention.attend(blocks[i], head, head + 1, part, &state, nullptr);
        }
    });
    for (int64_t i = 0; i < num_blocks; i++) {
        for (int64_t head = 0; head < heads; head++) {
            const auto piece_state = [&](int64_t piece) {
                return state_at(memory + (piece * heads + head) * state_size, i);
            };
            const State state = piece_state(first_piece[i]);
            for (int64_t piece = first_piece[i] + 1; piece < first_piece[i + 1]; piece++) {
                attention.merge(state, piece_state(piece), blocks[i].num_tokens * group);
            }
            attention.finish(blocks[i], head, state);
        }
    }
    return status;
}

}  // namespace
}  // namespace pd

extern "C" {

int32_t pd_paged_attention(const PdPagedAttention* p) {
    if (p->rows == 0) return kOk;
    if (!pd::valid(*p)) return kBadBlock;
    return pd::with_type(p->type, [&](auto kind) { return pd::run<decltype(kind)>(*p); });
}
}
