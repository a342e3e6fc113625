#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdlib>
#include <new>

namespace pd {
namespace {

// Longer than the Python between two kernels of a step (about 10 us), shorter than anything a
// person or a neighbouring process would notice.
constexpr auto kSpin = std::chrono::microseconds(100);
constexpr int kMaxWorkers = 255;

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// The loop on offer. `ticket` packs the loop's number (high 32 bits), whether workers may still
// join (kOpen) and how many have joined, so that joining and closing are one atomic step each.
constexpr uint64_t kOpen = uint64_t{1} << 31;
constexpr uint64_t kJoined = kOpen - 1;

// The chunks that are left of a part of the loop: [begin, end), in the high and low 32 bits.
struct Part {
    alignas(64) std::atomic<uint64_t> left{0};
};

struct Pool {
    alignas(64) std::atomic<uint64_t> ticket{0};
    std::atomic<uint32_t> wake{0};  // the futex word: equals the loop's number
    Part parts[kMaxWorkers + 1];
    alignas(64) std::atomic<uint32_t> left{0};  // workers that joined and are done
    alignas(64) std::atomic<uint32_t> sleepers{0};
    std::atomic<bool> busy{false};
    Loop loop{};  // stands still while a joined worker is at it
    std::atomic<int> num_threads{1};
    int num_workers = 0;
};

Pool pool;

void futex(std::atomic<uint32_t>* word, int operation, uint32_t value) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation | FUTEX_PRIVATE_FLAG, value,
            nullptr, nullptr, 0);
}

// Takes some chunks of a part, from its front or, to help the thread whose it is, from its end.
bool take(Part& part, const Loop& loop, bool from_front, int64_t& begin, int64_t& end) {
    uint64_t left = part.left.load(std::memory_order_relaxed);
    for (;;) {
        begin = static_cast<int64_t>(left >> 32), end = static_cast<int64_t>(left & 0xffffffff);
        if (begin >= end) return false;
        const int64_t size = loop.in_parts ? (end - begin + 1) / 2 : 1;
        const int64_t cut = from_front ? begin + size : end - size;
        const uint64_t rest = from_front ? static_cast<uint64_t>(cut) << 32 | (left & 0xffffffff)
                                         : (left >> 32 << 32) | static_cast<uint64_t>(cut);
        if (part.left.compare_exchange_weak(left, rest, std::memory_order_relaxed)) {
            (from_front ? end : begin) = cut;
            return true;
        }
    }
}

int num_parts_of(const Loop& loop) { return loop.in_parts ? pool.num_threads.load() : 1; }

// Does a thread's own part of the loop, then what others have left of theirs.
void do_parts(int own) {
    const Loop loop = pool.loop;
    const int num_parts = num_parts_of(loop);
    for (int i = 0; i < num_parts; i++) {
        Part& part = pool.parts[(own + i) % num_parts];
        int64_t begin, end;
        while (take(part, loop, i == 0, begin, end)) {
            loop.run(loop.body, begin * loop.chunk, std::min(end * loop.chunk, loop.size));
        }
    }
}

// Returns a ticket whose number is not `seen` and that is open, after spinning, then sleeping.
uint64_t await_ticket(uint32_t seen) {
    for (;;) {
        const auto deadline = std::chrono::steady_clock::now() + kSpin;
        do {
            for (int i = 0; i < 32; i++) {
                const uint64_t ticket = pool.ticket.load(std::memory_order_acquire);
                if ((ticket >> 32) != seen && (ticket & kOpen)) return ticket;
                pause();
            }
        } while (std::chrono::steady_clock::now() < deadline);
        // Announce, then let the kernel compare: a loop published in between changes `wake`.
        const uint32_t word = pool.wake.load(std::memory_order_seq_cst);
        const uint64_t ticket = pool.ticket.load(std::memory_order_seq_cst);
        if ((ticket >> 32) != seen && (ticket & kOpen)) return ticket;
        pool.sleepers.fetch_add(1, std::memory_order_seq_cst);
        futex(&pool.wake, FUTEX_WAIT, word);
        pool.sleepers.fetch_sub(1, std::memory_order_seq_cst);
    }
}

void* work(void*) {
    uint32_t seen = static_cast<uint32_t>(pool.ticket.load() >> 32) - 1;
    for (;;) {
        uint64_t ticket = await_ticket(seen);
        seen = static_cast<uint32_t>(ticket >> 32);
        // Join, unless the loop is closed, another one is on offer, or enough have joined.
        while ((ticket >> 32) == seen && (ticket & kOpen) &&
               static_cast<int>(ticket & kJoined) < pool.num_threads - 1) {
            if (pool.ticket.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) {
                do_parts(static_cast<int>(ticket & kJoined) + 1);
                pool.left.fetch_add(1, std::memory_order_release);
                break;
            }
        }
    }
    return nullptr;
}

// A forked child has none of the threads.
void forget_workers() {
    new (&pool) Pool;
}

void grow(int num_workers) {
    static const int registered = pthread_atfork(nullptr, nullptr, forget_workers);
    (void)registered;
    sigset_t all, before;
    sigfillset(&all);
    // Signals are for Python's threads.
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (pool.num_workers < std::min(num_workers, kMaxWorkers)) {
        pthread_t thread;
        if (pthread_create(&thread, nullptr, work, nullptr) != 0) break;
        pthread_setname_np(thread, "pdserve-kernel");
        pthread_detach(thread);
        pool.num_workers++;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

struct Buffers {
    void* data[static_cast<int>(Scratch::kCount)] = {};
    int64_t size[static_cast<int>(Scratch::kCount)] = {};
    ~Buffers() {
        for (void* buffer : data) std::free(buffer);
    }
};

}  // namespace

void run_loop(const Loop& loop, int num_threads) {
    // One loop at a time: a second Python thread that calls meanwhile works alone.
    if (pool.busy.exchange(true, std::memory_order_acquire)) {
        loop.run(loop.body, 0, loop.size);
        return;
    }
    const int64_t num_chunks = (loop.size + loop.chunk - 1) / loop.chunk;
    num_threads = static_cast<int>(std::min<int64_t>({num_threads, num_chunks, kMaxWorkers + 1}));
    if (pool.num_workers < num_threads - 1) grow(num_threads - 1);
    pool.loop = loop;
    pool.num_threads = num_threads;
    const int num_parts = num_parts_of(loop);
    for (int i = 0; i < num_parts; i++) {
        const auto begin = static_cast<uint64_t>(num_chunks * i / num_parts);
        const auto end = static_cast<uint64_t>(num_chunks * (i + 1) / num_parts);
        pool.parts[i].left.store(begin << 32 | end, std::memory_order_relaxed);
    }
    pool.left.store(0, std::memory_order_relaxed);
    const uint64_t number = (pool.ticket.load(std::memory_order_relaxed) >> 32) + 1;
    pool.ticket.store(number << 32 | kOpen, std::memory_order_seq_cst);
    pool.wake.store(static_cast<uint32_t>(number), std::memory_order_seq_cst);
    if (pool.sleepers.load(std::memory_order_seq_cst) > 0) {
        futex(&pool.wake, FUTEX_WAKE, static_cast<uint32_t>(num_threads - 1));
    }
    do_parts(0);
    const uint64_t closed = pool.ticket.fetch_and(~kOpen, std::memory_order_acq_rel);
    const uint32_t joined = static_cast<uint32_t>(closed & kJoined);
    for (int spins = 0; pool.left.load(std::memory_order_acquire) != joined; spins++) {
        // A worker that lost its core in mid chunk: give it ours.
        if (spins < 4096) pause();
        else sched_yield();
    }
    pool.busy.store(false, std::memory_order_release);
}

void* scratch(Scratch slot, int64_t num_bytes) {
    thread_local Buffers buffers;
    const int index = static_cast<int>(slot);
    if (buffers.size[index] < num_bytes) {
        std::free(buffers.data[index]);
        const int64_t size = (num_bytes + num_bytes / 2 + 4095) / 4096 * 4096;
        buffers.data[index] = std::aligned_alloc(4096, static_cast<size_t>(size));
        if (buffers.data[index] == nullptr) std::abort();
        buffers.size[index] = size;
    }
    return buffers.data[index];
}

}  // namespace pd
