#include "exchange.h"

#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstring>
#include <type_traits>

#include "pool.h"
#include "simd.h"

namespace pd {
namespace {

// A collective is a series of rounds. In a round each rank fills its slot, publishes the round's
// number, waits until all have published it, and reads the others' slots. A rank has two slots,
// used in turn: when all have published round r, all have read the slots of round r - 1, so the
// one of round r + 1 may be filled without asking.

constexpr int64_t kPage = 4096;
constexpr int kSpins = 64;       // about 2 us
constexpr int kMaxRanks = 64;    // of a group
constexpr int kMaxFrames = 256;  // in a ring
// Up to here each rank sums everything; beyond, each sums a part and all copy the sums, for which
// a second round is worth it.
constexpr int64_t kFlatBytes = 32 << 10;
constexpr int64_t kChunk = 32 << 10;  // bytes that a thread takes at a time

// A counter that others wait for. Waiters are in a line of their own, so that one who comes to
// sleep does not take the counter's line from those who look at it.
struct Counter {
    alignas(64) std::atomic<uint32_t> value;
    alignas(64) std::atomic<uint32_t> waiters;
};

// What a rank says about a round; the amounts follow.
struct Header {
    uint64_t call;       // which call, with what size
    int64_t num_rounds;  // all_to_all: that this rank needs
    int64_t* amounts() { return reinterpret_cast<int64_t*>(this + 1); }
};

struct Frame {
    uint64_t offset, num_bytes, message_bytes;
};

struct Ring {
    Counter sent, taken;
    Frame frames[kMaxFrames];
};

struct Rank {
    Counter published;
    Ring ring;  // to the rank after this
};

int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

int64_t header_bytes(int32_t size) { return round_up(sizeof(Header) + 8 * size, 64); }

struct Layout {
    int64_t ranks, headers, slots, rings, end;

    Layout(int32_t size, int64_t slot_bytes, int64_t ring_bytes) {
        ranks = kPage;  // the first page is the caller's
        headers = ranks + size * round_up(sizeof(Rank), 64);
        slots = round_up(headers + 2 * size * header_bytes(size), kPage);
        rings = slots + 2 * size * slot_bytes;
        end = rings + size * ring_bytes;
    }
};

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// Not FUTEX_PRIVATE: the word is shared between processes.
long sleep_while(std::atomic<uint32_t>* word, uint32_t value, int64_t limit_ns) {
    const timespec limit{limit_ns / 1000000000, limit_ns % 1000000000};
    return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT, value, &limit,
                   nullptr, 0) == 0
               ? 0
               : errno;
}

void advance(Counter& counter, uint32_t value) {
    // Sequentially consistent with the waiter's announcement: either it sees the value, or we
    // see it waiting.
    counter.value.store(value, std::memory_order_seq_cst);
    if (counter.waiters.load(std::memory_order_seq_cst) != 0) {
        syscall(SYS_futex, reinterpret_cast<uint32_t*>(&counter.value), FUTEX_WAKE, INT_MAX,
                nullptr, nullptr, 0);
    }
}

// Waits until `counter` is at `value` or past it; false: it is time to look after the peer.
bool await(const PdGroup& group, Counter& counter, uint32_t value) {
    const auto is_there = [&](std::memory_order order) {
        return static_cast<int32_t>(counter.value.load(order) - value) >= 0;
    };
    if (is_there(std::memory_order_acquire)) return true;
    for (int i = 0; i < kSpins; i++) {
        pause();
        if (is_there(std::memory_order_acquire)) return true;
    }
    // Then the core is on offer: the one waited for may want it.
    const auto sleep_at =
        std::chrono::steady_clock::now() + std::chrono::nanoseconds(group.look_ns);
    while (std::chrono::steady_clock::now() < sleep_at) {
        sched_yield();
        if (is_there(std::memory_order_acquire)) return true;
    }
    for (;;) {
        counter.waiters.fetch_add(1, std::memory_order_seq_cst);
        const uint32_t seen = counter.value.load(std::memory_order_seq_cst);
        long error = 0;
        if (static_cast<int32_t>(seen - value) < 0) {
            error = sleep_while(&counter.value, seen, group.sleep_ns);
        }
        counter.waiters.fetch_sub(1, std::memory_order_seq_cst);
        if (is_there(std::memory_order_acquire)) return true;
        if (error == ETIMEDOUT || error == EINTR) return false;
    }
}

int32_t status(PdExchangeStatus what, int32_t peer) { return what + 256 * peer; }

void copy(void* to, const void* from, int64_t num_bytes, int num_threads) {
    if (num_threads <= 1 || num_bytes <= kChunk) {
        std::memcpy(to, from, num_bytes);
        return;
    }
    parallel_for(num_bytes, kChunk, false, num_threads, [&](int64_t begin, int64_t end) {
        std::memcpy(static_cast<char*>(to) + begin, static_cast<const char*>(from) + begin,
                    end - begin);
    });
}

// Goes on with the call that was waiting, or begins one.
int32_t enter(const PdGroup& group) {
    PdCursor& cursor = *group.cursor;
    if (cursor.is_active != cursor.is_resumed) return kAbandoned;
    cursor.is_active = 1;
    cursor.is_resumed = 0;
    return kDone;
}

int32_t done(const PdGroup& group) {
    *group.cursor = {};
    return kDone;
}

// The rounds of one call.
class Rounds {
   public:
    enum Call : uint64_t {
        kAllReduce = 1,
        kAllGather,
        kReduceScatter,
        kBroadcast,
        kAllToAll,
    };

    Rounds(const PdGroup& group, Call call, int64_t num_bytes)
        : group_(group),
          layout_(group.size, group.slot_bytes, group.ring_bytes),
          call_(static_cast<uint64_t>(call) << 56 | static_cast<uint64_t>(num_bytes)),
          round_(rank(group.rank).published.value.load(std::memory_order_relaxed) +
                 (group.cursor->is_published ? 0 : 1)) {}

    char* mine() { return slot(group_.rank); }
    const char* of(int32_t peer) { return slot(peer); }

    Header& header(int32_t peer) {
        const int64_t index = 2 * peer + (round_ & 1);
        return *reinterpret_cast<Header*>(base() + layout_.headers +
                                          index * header_bytes(group_.size));
    }

    // Whether this rank's slot may still be filled.
    bool is_open() { return !group_.cursor->is_published; }

    // Publishes this rank's slot, and returns when all slots may be read.
    int32_t meet() {
        if (is_open()) {
            header(group_.rank).call = call_;
            group_.cursor->is_published = 1;
            advance(rank(group_.rank).published, round_);
        }
        for (int32_t peer = 0; peer < group_.size; peer++) {
            if (peer == group_.rank) continue;
            if (!await(group_, rank(peer).published, round_)) return status(kWaiting, peer);
            if (header(peer).call != call_) return status(kMismatch, peer);
        }
        group_.cursor->is_published = 0;
        return kDone;
    }

    void next() { round_++; }

   private:
    char* base() { return static_cast<char*>(group_.base); }
    Rank& rank(int32_t index) {
        return *reinterpret_cast<Rank*>(base() + layout_.ranks +
                                        index * round_up(sizeof(Rank), 64));
    }
    char* slot(int32_t index) {
        return base() + layout_.slots + (2 * index + (round_ & 1)) * group_.slot_bytes;
    }

    const PdGroup& group_;
    const Layout layout_;
    const uint64_t call_;
    uint32_t round_;
};

// out[i] = the sum of parts[r][i] over r, in this order.
template <class T>
void sum(T* out, int64_t count, const T* const* parts, int32_t size, int num_threads) {
    const auto run = [&](int64_t begin, int64_t end) {
        if constexpr (std::is_same_v<T, Bf16> || std::is_same_v<T, Fp16> ||
                      std::is_same_v<T, float>) {
            int64_t i = begin;
            for (; i + kLanes <= end; i += kLanes) {
                F16 total = load(parts[0] + i);
                for (int32_t r = 1; r < size; r++) total = total + load(parts[r] + i);
                store(out + i, total);
            }
            if (i < end) {
                const int rest = static_cast<int>(end - i);
                F16 total = load(parts[0] + i, rest);
                for (int32_t r = 1; r < size; r++) total = total + load(parts[r] + i, rest);
                store(out + i, total, rest);
            }
        } else {
            for (int64_t i = begin; i < end; i++) {
                T total = parts[0][i];
                for (int32_t r = 1; r < size; r++) total += parts[r][i];
                out[i] = total;
            }
        }
    };
    parallel_for(count, kChunk / int64_t{sizeof(T)}, false, num_threads, run);
}

template <class T>
int32_t all_reduce(const PdAllReduce& p) {
    const PdGroup& group = *p.group;
    if (const int32_t failed = enter(group)) return failed;
    PdCursor& cursor = *group.cursor;
    const T* x = static_cast<const T*>(p.x);
    T* out = static_cast<T*>(p.out);
    const int64_t num_bytes = p.count * int64_t{sizeof(T)};
    const int64_t piece = group.slot_bytes / int64_t{sizeof(T)};
    const bool is_flat = group.size == 2 || num_bytes <= kFlatBytes;
    Rounds rounds(group, Rounds::kAllReduce, num_bytes);
    for (; cursor.begin < p.count; cursor.begin += piece) {
        const int64_t begin = cursor.begin, count = std::min(piece, p.count - begin);
        // Whole cache lines to each rank.
        const int64_t share = round_up((count + group.size - 1) / group.size, 64);
        const auto first = [&](int32_t r) { return is_flat ? 0 : std::min(count, r * share); };
        const int64_t from = first(group.rank);
        const int64_t num = is_flat ? count : first(group.rank + 1) - from;
        if (cursor.phase == 0) {
            if (rounds.is_open()) copy(rounds.mine(), x + begin, count * sizeof(T), p.num_threads);
            if (const int32_t failed = rounds.meet()) return failed;
            const T* parts[kMaxRanks];
            for (int32_t r = 0; r < group.size; r++) {
                parts[r] = reinterpret_cast<const T*>(rounds.of(r)) + from;
            }
            parts[group.rank] = x + begin + from;
            sum(out + begin + from, num, parts, group.size, p.num_threads);
            rounds.next();
            if (is_flat) continue;
            copy(reinterpret_cast<T*>(rounds.mine()) + from, out + begin + from, num * sizeof(T),
                 p.num_threads);
            cursor.phase = 1;
        }
        if (const int32_t failed = rounds.meet()) return failed;
        for (int32_t r = 0; r < group.size; r++) {
            if (r == group.rank) continue;
            copy(out + begin + first(r), reinterpret_cast<const T*>(rounds.of(r)) + first(r),
                 (first(r + 1) - first(r)) * sizeof(T), p.num_threads);
        }
        rounds.next();
        cursor.phase = 0;
    }
    return done(group);
}

template <class T>
int32_t reduce_scatter(const PdReduceScatter& p) {
    const PdGroup& group = *p.group;
    if (const int32_t failed = enter(group)) return failed;
    PdCursor& cursor = *group.cursor;
    const T* x = static_cast<const T*>(p.x);
    T* out = static_cast<T*>(p.out);
    const int64_t total = p.outer * p.inner;
    // A slot holds a piece of what goes to each rank.
    const int64_t piece = group.slot_bytes / group.size / 64 * 64 / int64_t{sizeof(T)};
    Rounds rounds(group, Rounds::kReduceScatter, total * int64_t{sizeof(T)});
    for (; cursor.begin < total; cursor.begin += piece) {
        const int64_t begin = cursor.begin, count = std::min(piece, total - begin);
        T* mine = reinterpret_cast<T*>(rounds.mine());
        for (int64_t i = 0; rounds.is_open() && i < count;) {
            const int64_t row = (begin + i) / p.inner, column = (begin + i) % p.inner;
            const int64_t num = std::min(count - i, p.inner - column);
            for (int32_t r = 0; r < group.size; r++) {
                std::memcpy(mine + r * piece + i,
                            x + (row * group.size + r) * p.inner + column, num * sizeof(T));
            }
            i += num;
        }
        if (const int32_t failed = rounds.meet()) return failed;
        const T* parts[kMaxRanks];
        for (int32_t r = 0; r < group.size; r++) {
            parts[r] = reinterpret_cast<const T*>(rounds.of(r)) + group.rank * piece;
        }
        sum(out + begin, count, parts, group.size, p.num_threads);
        rounds.next();
    }
    return done(group);
}

// Calls body with a value of the type that `type` names.
template <class Body>
int32_t with_element(PdElement type, Body&& body) {
    switch (type) {
        case kElementBf16:
            return body(Bf16{});
        case kElementFp16:
            return body(Fp16{});
        case kElementFp32:
            return body(float{});
        case kElementFp64:
            return body(double{});
        case kElementInt32:
            return body(uint32_t{});  // wraps, where int32_t would be undefined
        default:
            return body(uint64_t{});
    }
}

Ring& ring_of(const PdGroup& group, int32_t index, char** data) {
    const Layout layout(group.size, group.slot_bytes, group.ring_bytes);
    char* base = static_cast<char*>(group.base);
    *data = base + layout.rings + index * group.ring_bytes;
    return reinterpret_cast<Rank*>(base + layout.ranks + index * round_up(sizeof(Rank), 64))->ring;
}

// Where `num_bytes` fit beside the frames that are not taken yet; negative: nowhere.
int64_t find_room(const Ring& ring, uint32_t sent, uint32_t taken, int64_t capacity,
                  int64_t num_bytes) {
    // Nothing is there: begin anew, where the memory is warm.
    if (sent == taken) return 0;
    if (sent - taken == kMaxFrames) return -1;
    const int64_t oldest = ring.frames[taken % kMaxFrames].offset;
    const Frame& newest = ring.frames[(sent - 1) % kMaxFrames];
    const int64_t end = round_up(newest.offset + newest.num_bytes, 64);
    if (end > oldest) {
        if (end + num_bytes <= capacity) return end;
        return num_bytes <= oldest ? 0 : -1;
    }
    return end + num_bytes <= oldest ? end : -1;
}

// Small enough that the receiver copies one while the sender copies the next.
int64_t largest_frame(const PdGroup& group) {
    return std::min(group.ring_bytes / 4, int64_t{256 << 10});
}

}  // namespace
}  // namespace pd

using namespace pd;

extern "C" {

int64_t pd_segment_bytes(int32_t size, int64_t slot_bytes, int64_t ring_bytes) {
    return size > kMaxRanks ? 0 : Layout(size, slot_bytes, ring_bytes).end;
}

int32_t pd_all_reduce(const PdAllReduce* p) {
    return with_element(p->type, [&](auto zero) { return all_reduce<decltype(zero)>(*p); });
}

int32_t pd_reduce_scatter(const PdReduceScatter* p) {
    return with_element(p->type, [&](auto zero) { return reduce_scatter<decltype(zero)>(*p); });
}

int32_t pd_all_gather(const PdAllGather* p) {
    const PdGroup& group = *p->group;
    if (const int32_t failed = enter(group)) return failed;
    PdCursor& cursor = *group.cursor;
    const char* x = static_cast<const char*>(p->x);
    char* out = static_cast<char*>(p->out);
    const int64_t total = p->outer * p->inner_bytes;
    Rounds rounds(group, Rounds::kAllGather, total);
    for (; cursor.begin < total; cursor.begin += group.slot_bytes) {
        const int64_t begin = cursor.begin, num_bytes = std::min(group.slot_bytes, total - begin);
        if (rounds.is_open()) copy(rounds.mine(), x + begin, num_bytes, p->num_threads);
        if (const int32_t failed = rounds.meet()) return failed;
        for (int32_t r = 0; r < group.size; r++) {
            const char* from = r == group.rank ? x + begin : rounds.of(r);
            for (int64_t i = 0; i < num_bytes;) {
                const int64_t row = (begin + i) / p->inner_bytes;
                const int64_t column = (begin + i) % p->inner_bytes;
                const int64_t num = std::min(num_bytes - i, p->inner_bytes - column);
                copy(out + (row * group.size + r) * p->inner_bytes + column, from + i, num,
                     p->num_threads);
                i += num;
            }
        }
        rounds.next();
    }
    return done(group);
}

int32_t pd_broadcast(const PdBroadcast* p) {
    const PdGroup& group = *p->group;
    if (const int32_t failed = enter(group)) return failed;
    PdCursor& cursor = *group.cursor;
    const char* x = static_cast<const char*>(p->x);
    char* out = static_cast<char*>(p->out);
    const bool is_source = group.rank == p->source;
    Rounds rounds(group, Rounds::kBroadcast, p->num_bytes);
    for (; cursor.begin < p->num_bytes; cursor.begin += group.slot_bytes) {
        const int64_t begin = cursor.begin, num = std::min(group.slot_bytes, p->num_bytes - begin);
        if (is_source && rounds.is_open()) copy(rounds.mine(), x + begin, num, p->num_threads);
        if (const int32_t failed = rounds.meet()) return failed;
        copy(out + begin, is_source ? x + begin : rounds.of(p->source), num, p->num_threads);
        rounds.next();
    }
    return done(group);
}

int32_t pd_all_to_all(const PdAllToAll* p) {
    const PdGroup& group = *p->group;
    if (const int32_t failed = enter(group)) return failed;
    PdCursor& cursor = *group.cursor;
    const char* x = static_cast<const char*>(p->x);
    char* out = static_cast<char*>(p->out);
    const int64_t piece = group.slot_bytes / group.size / 64 * 64;
    Rounds rounds(group, Rounds::kAllToAll, 0);
    if (cursor.num_rounds == 0) {
        cursor.num_rounds = 1;  // at least: the others may have something to send
        Header& mine = rounds.header(group.rank);
        for (int32_t r = 0; r < group.size; r++) {
            mine.amounts()[r] = p->sent[r];
            const int64_t needed = (p->sent[r] + piece - 1) / piece;
            if (r != group.rank) cursor.num_rounds = std::max(cursor.num_rounds, needed);
        }
        mine.num_rounds = cursor.num_rounds;
    }
    // Here `begin` counts bytes of each pair of ranks.
    for (; cursor.begin < cursor.num_rounds * piece; cursor.begin += piece) {
        const int64_t begin = cursor.begin;
        int64_t at = 0;
        for (int32_t r = 0; rounds.is_open() && r < group.size; at += p->sent[r++]) {
            const int64_t num = std::min(piece, p->sent[r] - begin);
            if (r != group.rank && num > 0) {
                std::memcpy(rounds.mine() + r * piece, x + at + begin, num);
            }
        }
        if (const int32_t failed = rounds.meet()) return failed;
        if (begin == 0) {
            for (int32_t r = 0; r < group.size; r++) {
                Header& header = rounds.header(r);
                if (header.amounts()[group.rank] != p->received[r]) return status(kMismatch, r);
                cursor.num_rounds = std::max(cursor.num_rounds, header.num_rounds);
            }
        }
        at = 0;
        int64_t own_at = 0;
        for (int32_t r = 0; r < group.rank; r++) own_at += p->sent[r];
        for (int32_t r = 0; r < group.size; at += p->received[r++]) {
            if (r == group.rank) {
                if (begin == 0) std::memcpy(out + at, x + own_at, p->received[r]);
                continue;
            }
            const int64_t num = std::min(piece, p->received[r] - begin);
            if (num > 0) {
                std::memcpy(out + at + begin, rounds.of(r) + group.rank * piece, num);
            }
        }
        rounds.next();
    }
    return done(group);
}

int32_t pd_send_next(const PdPass* p) {
    const PdGroup& group = *p->group;
    if (const int32_t failed = enter(group)) return failed;
    PdCursor& cursor = *group.cursor;
    char* data;
    Ring& ring = ring_of(group, group.rank, &data);
    while (cursor.begin < p->num_bytes) {
        const int64_t num = std::min(largest_frame(group), p->num_bytes - cursor.begin);
        const uint32_t sent = ring.sent.value.load(std::memory_order_relaxed);
        int64_t offset;
        for (;;) {
            const uint32_t taken = ring.taken.value.load(std::memory_order_acquire);
            offset = find_room(ring, sent, taken, group.ring_bytes, num);
            if (offset >= 0) break;
            if (!await(group, ring.taken, taken + 1)) {
                return status(kWaiting, (group.rank + 1) % group.size);
            }
        }
        std::memcpy(data + offset, static_cast<const char*>(p->data) + cursor.begin, num);
        ring.frames[sent % kMaxFrames] = {static_cast<uint64_t>(offset),
                                          static_cast<uint64_t>(num),
                                          static_cast<uint64_t>(p->num_bytes)};
        cursor.begin += num;
        advance(ring.sent, sent + 1);
    }
    return done(group);
}

int32_t pd_recv_prev(const PdPass* p) {
    const PdGroup& group = *p->group;
    if (const int32_t failed = enter(group)) return failed;
    PdCursor& cursor = *group.cursor;
    const int32_t peer = (group.rank + group.size - 1) % group.size;
    char* data;
    Ring& ring = ring_of(group, peer, &data);
    while (cursor.begin < p->num_bytes) {
        const uint32_t taken = ring.taken.value.load(std::memory_order_relaxed);
        if (!await(group, ring.sent, taken + 1)) return status(kWaiting, peer);
        const Frame& frame = ring.frames[taken % kMaxFrames];
        if (frame.message_bytes != static_cast<uint64_t>(p->num_bytes)) {
            return status(kMismatch, peer);
        }
        const auto num = static_cast<int64_t>(frame.num_bytes);
        std::memcpy(static_cast<char*>(p->data) + cursor.begin, data + frame.offset, num);
        cursor.begin += num;
        advance(ring.taken, taken + 1);
    }
    return done(group);
}
}
