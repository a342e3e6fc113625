// A small pool of threads for loops of microseconds.
//
// A worker spins for a while after its last loop, then sleeps on a futex: the hundreds of loops of
// a decode step find it awake, and an idle engine costs no CPU. The caller never waits for a worker
// that has not started: pieces are taken one by one, so on a crowded machine the caller does them
// all (OpenMP's barriers there cost a scheduler's time slice each).

#pragma once

#include <cstdint>
#include <type_traits>

namespace pd {

struct Loop {
    void (*run)(void* body, int64_t begin, int64_t end);
    void* body;
    int64_t size;
    int64_t chunk;  // what a thread takes at a time, at least
    // A part for each thread, which takes half of what is left of it at a time, and then helps with
    // those of others, from their ends: it reads memory in one run. Else all take from the front,
    // where pieces that take long can lie.
    bool in_parts;
};

// Runs the loop on up to num_threads threads, the caller among them; returns when it is done.
void run_loop(const Loop& loop, int num_threads);

// Calls body(begin, end) on disjoint ranges that cover [0, size), in any order, on any thread.
template <class Body>
void parallel_for(int64_t size, int64_t chunk, bool in_parts, int num_threads, Body&& body) {
    if (size <= 0) return;
    if (num_threads <= 1 || size <= chunk) {
        body(int64_t{0}, size);
        return;
    }
    using Plain = std::remove_reference_t<Body>;
    const auto run = [](void* opaque, int64_t begin, int64_t end) {
        (*static_cast<Plain*>(opaque))(begin, end);
    };
    void* opaque = const_cast<void*>(static_cast<const void*>(&body));
    run_loop({run, opaque, size, chunk, in_parts}, num_threads);
}

// A buffer of this thread for intermediate values, at least num_bytes long and 64-byte aligned.
// Valid until this thread asks for the same slot again.
enum class Scratch {
    kInput, kState, kTile, kPartials, kNormed, kWide, kNarrow, kSums, kSlice, kPair, kPadded,
    kWeights, kPowers, kTally, kCount
};
void* scratch(Scratch slot, int64_t num_bytes);

}  // namespace pd
