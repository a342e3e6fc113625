// Collectives between processes of one host, through one piece of shared memory per group.
//
// The C interface: what pdserve/parallel/shared_memory.py calls. Every rank of a group makes the
// same calls in the same order. As in kernels.h, each function takes one struct whose fields are
// in the order of a format string over there.

#pragma once

#include <cstdint>

extern "C" {

enum PdElement : int32_t {
    kElementBf16 = 0,
    kElementFp16 = 1,
    kElementFp32 = 2,
    kElementFp64 = 3,
    kElementInt32 = 4,
    kElementInt64 = 5,
};

// A status is one of these, plus the index of the peer that it is about, times 256.
enum PdExchangeStatus : int32_t {
    kDone = 0,
    // Not done: the peer has not come for sleep_ns, or a signal has. The caller looks after them,
    // sets cursor.is_resumed and calls again with the same arguments; or never uses the group again.
    kWaiting = 1,
    kMismatch = 2,   // the peer is at another call, or at the same with another size
    kAbandoned = 3,  // the call before this was left while it was waiting
};

// How far the call has come that returned kWaiting; zeroed by every other end of a call.
struct PdCursor {
    int64_t begin, num_rounds;
    int32_t phase, is_published;
    int32_t is_active, is_resumed;
};

// One rank's view of its group, valid as long as the segment is mapped.
struct PdGroup {
    void* base;                      // pd_segment_bytes long, zeroed before its first use
    PdCursor* cursor;                // zeroed before its first use
    int64_t slot_bytes, ring_bytes;  // multiples of 4096
    int64_t look_ns;                 // how long to look before sleeping
    int64_t sleep_ns;                // how long to sleep before looking after the peer
    int32_t rank, size;
};

// out = the sum over the ranks, in rank order and in fp32 for the narrow types, so that neither
// the number of elements nor timing changes a bit of it.
struct PdAllReduce {
    const PdGroup* group;
    const void* x;  // [count]
    void* out;      // [count]
    int64_t count;
    PdElement type;
    int32_t num_threads;
};

struct PdAllGather {
    const PdGroup* group;
    const void* x;                // [outer, inner_bytes]
    void* out;                    // [outer, size, inner_bytes]
    int64_t outer, inner_bytes;
    int32_t num_threads;
};

struct PdReduceScatter {
    const PdGroup* group;
    const void* x;         // [outer, size, inner]
    void* out;             // [outer, inner]
    int64_t outer, inner;  // elements
    PdElement type;
    int32_t num_threads;
};

struct PdBroadcast {
    const PdGroup* group;
    const void* x;  // [num_bytes]
    void* out;      // [num_bytes]
    int64_t num_bytes;
    int32_t source;  // index in the group
    int32_t num_threads;
};

struct PdAllToAll {
    const PdGroup* group;
    const void* x;            // what goes to each rank, in rank order
    void* out;                // what comes from each rank, in rank order
    const int64_t* sent;      // [size], bytes
    const int64_t* received;  // [size], bytes
};

// From one rank of the group to the one after it, without waiting for the receiver while there is
// room in the ring.
struct PdPass {
    const PdGroup* group;
    void* data;
    int64_t num_bytes;  // the same on both sides
};

// 0: too many ranks.
int64_t pd_segment_bytes(int32_t size, int64_t slot_bytes, int64_t ring_bytes);
int32_t pd_all_reduce(const PdAllReduce* p);
int32_t pd_all_gather(const PdAllGather* p);
int32_t pd_reduce_scatter(const PdReduceScatter* p);
int32_t pd_broadcast(const PdBroadcast* p);
int32_t pd_all_to_all(const PdAllToAll* p);
int32_t pd_send_next(const PdPass* p);
int32_t pd_recv_prev(const PdPass* p);
}
