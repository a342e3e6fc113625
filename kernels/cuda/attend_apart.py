"""Prompt attention on Hopper, with loads, products and softmax in separate warps.

The order of operations is that of `attend.attend_whole`, and so are the bits. A program has three
warpgroups. One loads keys and values by a descriptor, a few tiles ahead. Two compute half of the
rows each: while the values of one tile are multiplied, the softmax of the next is computed, for
which Triton itself would wait. So keys of a tile come with the values of the tile before: they are
used at the same time.

As many programs as multiprocessors take tiles of tokens in turn, and what the next one needs is
loaded while the last tile of this one is computed.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from pdserve.kernels.cuda.launch import Tuning, wait_for_previous

ROWS_APART = 128
"""Rows (query token, head) of a program."""

APART = Tuning(4, 4, overlaps=True, registers=168)
"""Warps of each of three warpgroups, slots of the ring, and registers before they are shared."""


@gluon.jit
def _same(x: gl.tensor) -> Any:
    """Return ``x``, a number that all threads have; the compiler then keeps it once for a warp."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", "=r,r", [x], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _add(a: gl.tensor, b: gl.tensor) -> Any:
    return a + b


@gluon.jit
def _softmax(s: gl.tensor, top: gl.tensor, exponent_scale: gl.tensor) -> Any:
    """Return weights, their sums, the factor of what was before, and the new largest scores.

    The operations are those of `segments.update`.
    """
    new_top = gl.maximum(top, gl.max(s, 1))
    safe = gl.where(new_top == float("-inf"), 0.0, new_top)
    p = gl.exp2(gl.fma(s, exponent_scale, (safe * -exponent_scale)[:, None]))
    a = gl.exp2((top - safe) * exponent_scale)
    units = gl.sum((p + 2.0).to(gl.int32, bitcast=True), 1) & 0x3FFFFFFF
    return p, units.to(gl.float32) * 2.384185791015625e-07, a, new_top


@gluon.jit
def _merged(
    state: gl.tuple,
    acc: gl.tensor,
    mass: gl.tensor,
    top: gl.tensor,
    exponent_scale: gl.tensor,
    OUT_ROWS: gl.constexpr,
) -> Any:
    """Merge one segment into those before it, as `segments.merged` does."""
    total, total_mass, total_top = state
    new_top = gl.maximum(total_top, top)
    safe = gl.where(new_top == float("-inf"), 0.0, new_top)
    a = gl.exp2((total_top - safe) * exponent_scale)
    b = gl.exp2((top - safe) * exponent_scale)
    before = total * gl.convert_layout(a, OUT_ROWS)[:, None]
    total = before + acc * gl.convert_layout(b, OUT_ROWS)[:, None]
    return total, total_mass * a + mass * b, new_top


@gluon.jit
def _step(
    i: gl.tensor,
    first_slot: gl.tensor,
    running: gl.tuple,
    x: gl.shared_memory_descriptor,
    ring: gl.tuple,
    position: gl.tensor,
    exponent_scale: gl.tensor,
    TILE: gl.constexpr,
    PER_SEGMENT: gl.constexpr,
    STAGES: gl.constexpr,
    MASKED: gl.constexpr,
    SCORES: gl.constexpr,
    OUT: gl.constexpr,
) -> Any:
    """Take the scores of tile ``i``, and the values of the one before into its segment.

    The slot must be full. Before the last wait stands one for the next slot: the compiler would
    move a wait for products to before the exponentials, but not out of its basic block.
    """
    state, acc, mass, top, p = running
    k_slots, v_slots, full, empty = ring
    OUT_ROWS: gl.constexpr = gl.SliceLayout(1, OUT)
    M: gl.constexpr = acc.shape[0]
    D: gl.constexpr = acc.shape[1]
    slot = (first_slot + i) % STAGES
    weights = gl.convert_layout(p.to(k_slots.dtype), gl.DotOperandLayout(0, OUT, 2))
    zero = gl.zeros([M, TILE], gl.float32, layout=SCORES)
    k = k_slots.index(slot).permute((1, 0))
    s = warpgroup_mma(x, k, zero, use_acc=False, is_async=True)
    acc = warpgroup_mma(weights, v_slots.index(slot), acc, is_async=True)
    s = warpgroup_mma_wait(1, deps=(s,))
    if MASKED:
        t = i * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(0, SCORES))
        s = gl.where(t[None, :] <= position[:, None], s, float("-inf"))
    begins = i % PER_SEGMENT == 0
    p, units, a, new_top = _softmax(s, gl.where(begins, float("-inf"), top), exponent_scale)
    ahead = first_slot + i + 1
    mbarrier.wait(full.index(ahead % STAGES), (ahead // STAGES) & 1)
    acc, p, units, a = warpgroup_mma_wait(0, deps=(acc, p, units, a))
    mbarrier.arrive(empty.index(slot), count=1)
    if begins:
        state = _merged(state, acc, mass, top, exponent_scale, OUT_ROWS)
        acc = gl.zeros([M, D], gl.float32, layout=OUT)
        mass = gl.zeros([M], gl.float32, layout=gl.SliceLayout(1, SCORES))
    acc = acc * gl.convert_layout(a, OUT_ROWS)[:, None]
    return state, acc, mass * a + units, new_top, p


@gluon.jit
def _tiles_of_tokens(requests: gl.tuple, TOKENS: gl.constexpr, REQUESTS: gl.constexpr) -> Any:
    """Return the running sum of each request's tiles of tokens, ``[REQUESTS]``."""
    query_start, _, num_requests, least_tokens = requests
    r = gl.arange(0, REQUESTS, layout=gl.BlockedLayout([1], [32], [4], [0]))
    here = r < num_requests
    first = gl.load(query_start + r, mask=here, other=0)
    lengths = gl.load(query_start + r + 1, mask=here, other=0) - first
    units = gl.where(lengths >= least_tokens, (lengths + TOKENS - 1) // TOKENS, 0)
    return gl.associative_scan(units, 0, _add)


@gluon.jit
def _num_rounds(ends: gl.tensor, KV_HEADS: gl.constexpr) -> Any:
    """Return how many items this program takes; see `_item`."""
    num_items = gl.max(ends, 0) * KV_HEADS
    pid, programs = gl.program_id(0), gl.num_programs(0)
    whole = num_items // programs
    place = gl.where(whole % 2 == 0, pid, programs - 1 - pid)
    return _same(whole + (place < num_items % programs).to(gl.int32))


@gluon.jit
def _item(i: gl.tensor, ends: gl.tensor, requests: gl.tuple, KV_HEADS: gl.constexpr) -> Any:
    """Return this program's ``i``-th (request, tile of tokens, KV head), and the request's lengths.

    Within a request the tiles that see most keys come first. Programs take items in the order of
    their numbers, and every second time the other way round, so that all have as much to do.
    """
    query_start, contexts, _, _ = requests
    pid, programs = gl.program_id(0), gl.num_programs(0)
    item = i * programs + gl.where(i % 2 == 0, pid, programs - 1 - pid)
    unit = gl.max(ends, 0) - 1 - item // KV_HEADS
    before = ends <= unit
    request = gl.sum(before.to(gl.int32), 0)
    tile = unit - gl.max(gl.where(before, ends, 0), 0)
    first = gl.load(query_start + request)
    num_new = gl.load(query_start + request + 1) - first
    return request, tile, item % KV_HEADS, first, num_new, gl.load(contexts + request)


@gluon.jit
def _number_rows(
    item: gl.tuple,
    HALF: gl.constexpr,
    GROUP: gl.constexpr,
    TOKENS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    ROWS: gl.constexpr,
) -> Any:
    """Do what `paged.number_rows` does, for one half of an item's rows in the layout ``ROWS``."""
    _, tile, kv_head, first, num_new, context = item
    row = HALF * 64 + gl.arange(0, 64, layout=ROWS)
    token = tile * TOKENS + row // GROUP
    valid = (row < TOKENS * GROUP) & (token < num_new)
    place = ((first + token) * KV_HEADS + kv_head).to(gl.int64) * GROUP + row % GROUP
    return place, valid, gl.where(valid, context - num_new + token, -1)


@gluon.jit
def _compute(
    q: gl.tensor,
    out: gl.tensor,
    x: gl.shared_memory_descriptor,
    ring: gl.tuple,
    requests: gl.tuple,
    exponent_scale: gl.tensor,
    HALF: gl.constexpr,
    GROUP: gl.constexpr,
    TOKENS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    D: gl.constexpr,
    TILE: gl.constexpr,
    PER_SEGMENT: gl.constexpr,
    REQUESTS: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """Compute half of the rows of every item."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    OUT_ROWS: gl.constexpr = gl.SliceLayout(1, OUT)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    WIDE_ROWS: gl.constexpr = gl.SliceLayout(1, WIDE)
    k_slots, v_slots, full, empty = ring
    d = gl.arange(0, D, layout=gl.SliceLayout(0, WIDE))[None, :]
    t = gl.arange(0, TILE, layout=gl.SliceLayout(0, SCORES))[None, :]
    none = gl.zeros([64], gl.float32, layout=ROWS)
    least = gl.full([64], float("-inf"), gl.float32, layout=ROWS)
    ends = _tiles_of_tokens(requests, TOKENS, REQUESTS)
    slot = 0
    for i in range(_num_rounds(ends, KV_HEADS)):
        item = _item(i, ends, requests, KV_HEADS)
        _, tile, kv_head, first, num_new, context = item
        place, valid, _ = _number_rows(item, HALF, GROUP, TOKENS, KV_HEADS, WIDE_ROWS)
        x.store(gl.load(q + place[:, None] * D + d, mask=valid[:, None], other=0.0))
        fence_async_shared()
        _, _, position = _number_rows(item, HALF, GROUP, TOKENS, KV_HEADS, ROWS)
        earliest = context - num_new + tile * TOKENS
        num_tiles = gl.cdiv(gl.minimum(context, earliest + TOKENS), TILE)
        num_tiles = _same(gl.maximum(num_tiles, 1))  # without context too: see `_load`
        num_clear = _same((earliest + HALF * 64 // GROUP + 1) // TILE)

        mbarrier.wait(full.index(slot % STAGES), (slot // STAGES) & 1)
        k = k_slots.index(slot % STAGES).permute((1, 0))
        zero = gl.zeros([64, TILE], gl.float32, layout=SCORES)
        s = warpgroup_mma(x, k, zero, use_acc=False)
        mbarrier.arrive(empty.index(slot % STAGES), count=1)
        s = gl.where(t <= position[:, None], s, float("-inf"))
        p, mass, _, top = _softmax(s, least, exponent_scale)
        mbarrier.wait(full.index((slot + 1) % STAGES), ((slot + 1) // STAGES) & 1)
        acc = gl.zeros([64, D], gl.float32, layout=OUT)
        running = ((acc, none, least), acc, mass, top, p)
        begin = 1
        for masked in gl.static_range(2):
            stop = num_tiles if masked else gl.minimum(num_clear, num_tiles)
            for j in range(begin, stop):
                running = _step(
                    j,
                    slot,
                    running,
                    x,
                    ring,
                    position,
                    exponent_scale,
                    TILE,
                    PER_SEGMENT,
                    STAGES,
                    masked,
                    SCORES,
                    OUT,
                )
            begin = gl.maximum(stop, 1)
        state, acc, mass, top, p = running
        slot += num_tiles
        values = v_slots.index(slot % STAGES)
        weights = gl.convert_layout(p.to(k_slots.dtype), gl.DotOperandLayout(0, OUT, 2))
        if num_tiles * TILE > context:
            # What was never written may be NaN, and 0 * NaN is NaN. Both halves read the slot, so
            # each writes a copy for itself, over the queries, which it needs no more.
            at = (num_tiles - 1) * TILE + gl.arange(0, TILE, layout=WIDE_ROWS)
            x.store(gl.where((at < context)[:, None], values.load(WIDE), 0.0))
            fence_async_shared()
            acc = warpgroup_mma(weights, x, acc)
        else:
            acc = warpgroup_mma(weights, values, acc)
        mbarrier.arrive(empty.index(slot % STAGES), count=1)
        slot += 1
        total, mass, _ = _merged(state, acc, mass, top, exponent_scale, OUT_ROWS)
        mass = gl.convert_layout(gl.where(mass == 0.0, 1.0, mass), OUT_ROWS)
        x.store((total / mass[:, None] + 0.0).to(out.dtype.element_ty))
        # Numbered again: kept meanwhile, they would take registers.
        again = (item[0], _same(tile), kv_head, first, num_new, context)
        place, valid, _ = _number_rows(again, HALF, GROUP, TOKENS, KV_HEADS, WIDE_ROWS)
        gl.store(out + place[:, None] * D + d, x.load(WIDE), mask=valid[:, None])


@gluon.jit
def _load(
    tiles: tma.tensor_descriptor,
    ring: gl.tuple,
    tables: gl.tensor,
    requests: gl.tuple,
    block_rows: gl.tensor,
    stride_table: gl.tensor,
    TOKENS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    TILE: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    REQUESTS: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """Load what both halves of the rows of every item see, as slots become empty.

    An item's first slot has keys alone, and its last one values alone. Where the request has no
    context, those are a tile of block 0, which no row sees.
    """
    k_slots, v_slots, full, empty = ring
    PLANE: gl.constexpr = KV_HEADS * BLOCK_SIZE
    BYTES: gl.constexpr = tiles.block_type.nbytes
    ends = _tiles_of_tokens(requests, TOKENS, REQUESTS)
    slot = 0
    for i in range(_num_rounds(ends, KV_HEADS)):
        request, tile, kv_head, _, num_new, context = _item(i, ends, requests, KV_HEADS)
        end = gl.minimum(context, context - num_new + (tile + 1) * TOKENS)
        table = tables + request * stride_table
        row = gl.load(table, mask=context > 0, other=0) * block_rows + kv_head * BLOCK_SIZE
        block = gl.load(table + TILE // BLOCK_SIZE, mask=end > TILE, other=0)
        at = slot % STAGES
        mbarrier.wait(empty.index(at), ((slot // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(at), BYTES)
        tma.async_copy_global_to_shared(tiles, [row, 0], full.index(at), k_slots.index(at))
        slot += 1
        for t in range(TILE, end, TILE):
            values = row + PLANE
            row = block * block_rows + kv_head * BLOCK_SIZE + t % BLOCK_SIZE
            block = gl.load(table + (t + TILE) // BLOCK_SIZE, mask=t + TILE < end, other=0)
            at = slot % STAGES
            mbarrier.wait(empty.index(at), ((slot // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(at), 2 * BYTES)
            tma.async_copy_global_to_shared(tiles, [row, 0], full.index(at), k_slots.index(at))
            tma.async_copy_global_to_shared(tiles, [values, 0], full.index(at), v_slots.index(at))
            slot += 1
        at = slot % STAGES
        mbarrier.wait(empty.index(at), ((slot // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(at), BYTES)
        tma.async_copy_global_to_shared(tiles, [row + PLANE, 0], full.index(at), v_slots.index(at))
        slot += 1


@gluon.jit(do_not_specialize=["block_rows", "stride_table", "num_requests", "least_tokens"])
def attend_apart(
    q: gl.tensor,
    tiles: tma.tensor_descriptor,
    out: gl.tensor,
    tables: gl.tensor,
    query_start: gl.tensor,
    contexts: gl.tensor,
    exponent_scale: gl.tensor,
    block_rows: gl.tensor,
    stride_table: gl.tensor,
    num_requests: gl.tensor,
    least_tokens: gl.tensor,
    GROUP: gl.constexpr,
    TOKENS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    D: gl.constexpr,
    TILE: gl.constexpr,
    SEGMENT: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    REQUESTS: gl.constexpr,
    STAGES: gl.constexpr,
    OVERLAPS: gl.constexpr,
) -> None:
    """Compute rows of requests with at least ``least_tokens`` query tokens.

    Grid: any number of programs, compiled as `APART` says.

    Args:
        q: ``[tokens, heads, D]`` of 16 bits an element.
        tiles: Of ``[TILE, D]`` of one layer of the cache, seen as rows of one head's token.
        out: As ``q``.
        block_rows: How many of those rows lie from block to block.
    """
    wait_for_previous(OVERLAPS)
    k_slots = gl.allocate_shared_memory(tiles.dtype, [STAGES, TILE, D], tiles.layout)
    v_slots = gl.allocate_shared_memory(tiles.dtype, [STAGES, TILE, D], tiles.layout)
    x = gl.allocate_shared_memory(tiles.dtype, [2, 64, D], tiles.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    ring = (k_slots, v_slots, full, empty)
    PER_SEGMENT: gl.constexpr = SEGMENT // TILE
    requests = (query_start, contexts, num_requests, least_tokens)
    # The first takes the registers that the others leave.
    gl.warp_specialize(
        [
            (
                _load,
                (
                    tiles,
                    ring,
                    tables,
                    requests,
                    block_rows,
                    stride_table,
                    TOKENS,
                    KV_HEADS,
                    TILE,
                    BLOCK_SIZE,
                    REQUESTS,
                    STAGES,
                ),
            )
            if half is None
            else (
                _compute,
                (
                    q,
                    out,
                    x.index(half),
                    ring,
                    requests,
                    exponent_scale,
                    half,
                    GROUP,
                    TOKENS,
                    KV_HEADS,
                    D,
                    TILE,
                    PER_SEGMENT,
                    REQUESTS,
                    STAGES,
                ),
            )
            for half in (None, 0, 1)
        ],
        [4, 4],
        [232, 232],
    )
