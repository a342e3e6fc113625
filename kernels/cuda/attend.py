"""The two kernels of paged attention: whole rows, and segments of rows.

`segments` says why a row's bits do not depend on which of them computed it. Both find their work
on the device, from the lengths of the requests: which of them serves a request is told by its
number of query tokens.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from pdserve.kernels.cuda.launch import wait_for_previous
from pdserve.kernels.cuda.segments import (
    find,
    first_segment,
    merged,
    normalized,
    request_lengths,
    update,
)


@triton.jit
def _blocks(
    table: tl.tensor,
    at: tl.tensor,
    end: tl.tensor,
    TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
) -> Any:
    """Return the block of the tile at ``at``, or of each of its keys; 0 from ``end`` on.

    Asked for one tile ahead, so that the addresses of keys and values wait for no load.
    """
    if BLOCK_SIZE % TILE == 0:
        blocks = tl.load(table + at // BLOCK_SIZE, mask=at < end, other=0)
    else:
        t = at + tl.arange(0, TILE)
        blocks = tl.load(table + t // BLOCK_SIZE, mask=t < end, other=0)
    return blocks


@triton.jit
def _load_tile(
    kv: tl.tensor,
    blocks: tl.tensor,
    at: tl.tensor,
    end: tl.tensor,
    stride_block: tl.tensor,
    PLANE: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    ROTARY: tl.constexpr,
    ROTARY_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MASKED: tl.constexpr,
) -> Any:
    """Return keys and values ``[TILE, D_PADDED]`` at ``at`` and on, of the head that ``kv`` is at.

    Those at ``end`` and after are 0 where ``MASKED``, and must not be asked for elsewhere: what was
    never written may be NaN, and 0 * NaN is NaN. Of latents, which are keys and values at once, the
    rotated rest of the keys comes third, ``[TILE, ROTARY]``.
    """
    t = tl.arange(0, TILE)
    d = tl.arange(0, D_PADDED)
    if BLOCK_SIZE % TILE == 0:
        start = kv + blocks.to(tl.int64) * stride_block + at % BLOCK_SIZE * (D + ROTARY)
        rows = start + t * (D + ROTARY)
    else:
        rows = kv + blocks.to(tl.int64) * stride_block + (at + t) % BLOCK_SIZE * (D + ROTARY)
    inside = (d < D)[None, :]
    if MASKED:
        inside &= (at + t < end)[:, None]
    keys = rows[:, None] + d[None, :]
    if MASKED or D != D_PADDED:
        k = tl.load(keys, mask=inside, other=0.0)
    else:
        k = tl.load(keys)
    v = k
    rest = k
    if ROTARY > 0:
        r = tl.arange(0, ROTARY_PADDED)
        inside = (r < ROTARY)[None, :]
        if MASKED:
            inside &= (at + t < end)[:, None]
        rest = tl.load(rows[:, None] + D + r[None, :], mask=inside, other=0.0)
    elif MASKED or D != D_PADDED:
        v = tl.load(keys + PLANE, mask=inside, other=0.0)
    else:
        v = tl.load(keys + PLANE)
    return k, v, rest


@triton.jit
def _scores(
    x: tl.tensor,
    x_rest: tl.tensor,
    k: tl.tensor,
    k_rest: tl.tensor,
    at: tl.tensor,
    position: tl.tensor,
    window: tl.tensor,
    ROTARY: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
) -> Any:
    """Return the unscaled scores, -inf where a row does not see a key."""
    s = tl.dot(x, tl.trans(k), input_precision="ieee")
    if ROTARY > 0:
        s = tl.dot(x_rest, tl.trans(k_rest), s, input_precision="ieee")
    if MASKED:
        t = at + tl.arange(0, TILE)
        seen = t[None, :] <= position[:, None]
        if WINDOWED:
            seen &= t[None, :] > (position - window)[:, None]
        s = tl.where(seen, s, float("-inf"))
    return s


@triton.jit
def _queries(
    q: tl.tensor,
    place: tl.tensor,
    valid: tl.tensor,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    ROTARY: tl.constexpr,
    ROTARY_PADDED: tl.constexpr,
) -> Any:
    """Return the queries of rows, and the rest that meets the rest of the keys; 0 if not valid."""
    d = tl.arange(0, D_PADDED)
    rows = q + place * (D + ROTARY)
    x = tl.load(rows[:, None] + d[None, :], mask=valid[:, None] & (d < D)[None, :], other=0.0)
    rest = x
    if ROTARY > 0:
        r = tl.arange(0, ROTARY_PADDED)
        inside = valid[:, None] & (r < ROTARY)[None, :]
        rest = tl.load(rows[:, None] + D + r[None, :], mask=inside, other=0.0)
    return x, rest


@triton.jit
def _rows(
    first: tl.tensor,
    tile: tl.tensor,
    kv_head: tl.tensor,
    num_new: tl.tensor,
    context: tl.tensor,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    M: tl.constexpr,
    KV_HEADS: tl.constexpr,
) -> Any:
    """Return the rows' numbers in ``[tokens * heads]``, which are real, and their positions."""
    row = tl.arange(0, M)
    token = tile * TOKENS + row // GROUP
    valid = (row < TOKENS * GROUP) & (token < num_new)
    place = ((first + token) * KV_HEADS + kv_head).to(tl.int64) * GROUP + row % GROUP
    return place, valid, tl.where(valid, context - num_new + token, -1)


@triton.jit(
    do_not_specialize=["window", "stride_table", "num_requests", "num_segments", "most_tokens"]
)
def attend_split(
    q: tl.tensor,
    kv: tl.tensor,
    partial: tl.tensor,
    tables: tl.tensor,
    query_start: tl.tensor,
    contexts: tl.tensor,
    exponent_scale: tl.tensor,
    window: tl.tensor,
    stride_block: tl.tensor,
    stride_table: tl.tensor,
    num_requests: tl.tensor,
    num_segments: tl.tensor,
    most_tokens: tl.tensor,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    M: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    PLANE: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    ROTARY: tl.constexpr,
    ROTARY_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    REQUESTS: tl.constexpr,
    EVERY: tl.constexpr,
    WINDOWED: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Compute segments of requests with at most ``most_tokens`` query tokens into ``partial``.

    Grid: any number of programs, which take (token tile, segment, KV head) in turn.

    Args:
        q: ``[tokens, heads, D]``.
        kv: One layer, ``[blocks, 2, KV_HEADS, BLOCK_SIZE, D]``, strided over blocks.
        partial: ``[slots, heads, num_segments, D + 4]`` fp32; see `segments.merge`.
    """
    wait_for_previous(OVERLAPS)
    lengths, all_contexts = request_lengths(query_start, contexts, num_requests, REQUESTS)
    starts = first_segment(lengths, all_contexts, window, SEGMENT, WINDOWED)
    units = tl.cdiv(lengths, TOKENS) * (tl.cdiv(all_contexts, SEGMENT) - starts)
    ends = tl.cumsum(tl.where(lengths <= most_tokens, units, 0), 0)
    num_items = tl.max(ends) * KV_HEADS
    d = tl.arange(0, D_PADDED)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        kv_head = item % KV_HEADS
        request, unit = find(item // KV_HEADS, ends)
        first = tl.load(query_start + request)
        num_new = tl.load(query_start + request + 1) - first
        context = tl.load(contexts + request)
        start = first_segment(num_new, context, window, SEGMENT, WINDOWED)
        count = tl.cdiv(context, SEGMENT) - start
        tile = unit // count
        segment = unit % count
        place, valid, position = _rows(
            first, tile, kv_head, num_new, context, GROUP, TOKENS, M, KV_HEADS
        )
        inside = valid[:, None] & (d < D)[None, :]
        x, x_rest = _queries(q, place, valid, D, D_PADDED, ROTARY, ROTARY_PADDED)
        begin = (start + segment) * SEGMENT
        end = tl.minimum(context, context - num_new + (tile + 1) * TOKENS)
        stop = tl.minimum(begin + SEGMENT, end)
        if WINDOWED:
            begin = tl.maximum(
                begin, (context - num_new + tile * TOKENS + 1 - window) // TILE * TILE
            )
        acc = tl.zeros([M, D_PADDED], tl.float32)
        mass = tl.zeros([M], tl.float32)
        top = tl.full([M], float("-inf"), tl.float32)
        table = tables + request * stride_table
        head = kv + kv_head * HEAD
        blocks = _blocks(table, begin, stop, TILE, BLOCK_SIZE)
        for at in range(begin, stop, TILE):
            ahead = _blocks(table, at + TILE, stop, TILE, BLOCK_SIZE)
            k, v, k_rest = _load_tile(
                head,
                blocks,
                at,
                stop,
                stride_block,
                PLANE,
                D,
                D_PADDED,
                ROTARY,
                ROTARY_PADDED,
                TILE,
                BLOCK_SIZE,
                True,
            )
            s = _scores(x, x_rest, k, k_rest, at, position, window, ROTARY, TILE, True, WINDOWED)
            acc, mass, top = update(s, v, acc, mass, top, exponent_scale)
            blocks = ahead
        slot = place
        if not EVERY:
            slot = place + ((request - first) * KV_HEADS * GROUP)
        into = partial + (slot * num_segments + segment) * (D + 4)
        tl.store(into[:, None] + d[None, :], acc, mask=inside)
        tl.store(into + D, mass, mask=valid)
        tl.store(into + D + 1, top, mask=valid)


@triton.jit
def _scan(
    begin: tl.tensor,
    end: tl.tensor,
    state: tl.tensor,
    x: tl.tensor,
    x_rest: tl.tensor,
    kv: tl.tensor,
    table: tl.tensor,
    position: tl.tensor,
    exponent_scale: tl.tensor,
    window: tl.tensor,
    stride_block: tl.tensor,
    PLANE: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    ROTARY: tl.constexpr,
    ROTARY_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
) -> Any:
    """Go over keys from ``begin`` on; a segment is merged when the next one begins."""
    total, total_mass, total_top, acc, mass, top = state
    blocks = _blocks(table, begin, end, TILE, BLOCK_SIZE)
    for at in range(begin, end, TILE):
        ahead = _blocks(table, at + TILE, end, TILE, BLOCK_SIZE)
        k, v, k_rest = _load_tile(
            kv,
            blocks,
            at,
            end,
            stride_block,
            PLANE,
            D,
            D_PADDED,
            ROTARY,
            ROTARY_PADDED,
            TILE,
            BLOCK_SIZE,
            MASKED,
        )
        s = _scores(x, x_rest, k, k_rest, at, position, window, ROTARY, TILE, MASKED, WINDOWED)
        if at % SEGMENT == 0:
            total, total_mass, total_top = merged(
                total, total_mass, total_top, acc, mass, top, exponent_scale
            )
            acc = tl.zeros_like(acc)
            mass = tl.zeros_like(mass)
            top = tl.zeros_like(top) + float("-inf")
        acc, mass, top = update(s, v, acc, mass, top, exponent_scale)
        blocks = ahead
    return total, total_mass, total_top, acc, mass, top


@triton.jit(do_not_specialize=["window", "stride_table", "num_requests", "least_tokens"])
def attend_whole(
    q: tl.tensor,
    kv: tl.tensor,
    out: tl.tensor,
    tables: tl.tensor,
    query_start: tl.tensor,
    contexts: tl.tensor,
    exponent_scale: tl.tensor,
    window: tl.tensor,
    stride_block: tl.tensor,
    stride_table: tl.tensor,
    num_requests: tl.tensor,
    least_tokens: tl.tensor,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    M: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    PLANE: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    ROTARY: tl.constexpr,
    ROTARY_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    REQUESTS: tl.constexpr,
    WINDOWED: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Compute rows of requests with at least ``least_tokens`` query tokens.

    Grid: at least as many programs as (token tile, KV head); the rest end at once. Within a request
    the tiles that see most keys come first.
    """
    wait_for_previous(OVERLAPS)
    lengths, _ = request_lengths(query_start, contexts, num_requests, REQUESTS)
    ends = tl.cumsum(tl.where(lengths >= least_tokens, tl.cdiv(lengths, TOKENS), 0), 0)
    pid = tl.program_id(0)
    unit = tl.max(ends) - 1 - pid // KV_HEADS
    if unit < 0:
        return
    kv_head = pid % KV_HEADS
    request, tile = find(unit, ends)
    first = tl.load(query_start + request)
    num_new = tl.load(query_start + request + 1) - first
    context = tl.load(contexts + request)
    place, valid, position = _rows(
        first, tile, kv_head, num_new, context, GROUP, TOKENS, M, KV_HEADS
    )
    d = tl.arange(0, D_PADDED)
    inside = valid[:, None] & (d < D)[None, :]
    x, x_rest = _queries(q, place, valid, D, D_PADDED, ROTARY, ROTARY_PADDED)
    zeros = tl.zeros([M, D_PADDED], tl.float32)
    none = tl.zeros([M], tl.float32)
    least = tl.full([M], float("-inf"), tl.float32)
    state = (zeros, none, least, zeros, none, least)
    table = tables + request * stride_table
    head = kv + kv_head * HEAD
    earliest = context - num_new + tile * TOKENS
    end = tl.minimum(context, earliest + TOKENS)
    begin = 0
    if WINDOWED:
        begin = tl.maximum(earliest + 1 - window, 0) // TILE * TILE
    else:
        begin = (earliest + 1) // TILE * TILE
        state = _scan(
            0,
            begin,
            state,
            x,
            x_rest,
            head,
            table,
            position,
            exponent_scale,
            window,
            stride_block,
            PLANE,
            D,
            D_PADDED,
            ROTARY,
            ROTARY_PADDED,
            TILE,
            SEGMENT,
            BLOCK_SIZE,
            False,
            False,
        )
    state = _scan(
        begin,
        end,
        state,
        x,
        x_rest,
        head,
        table,
        position,
        exponent_scale,
        window,
        stride_block,
        PLANE,
        D,
        D_PADDED,
        ROTARY,
        ROTARY_PADDED,
        TILE,
        SEGMENT,
        BLOCK_SIZE,
        True,
        WINDOWED,
    )
    total, total_mass, total_top, acc, mass, top = state
    total, total_mass, total_top = merged(
        total, total_mass, total_top, acc, mass, top, exponent_scale
    )
    value = normalized(total, total_mass).to(out.dtype.element_ty)
    tl.store(out + place[:, None] * D + d[None, :], value, mask=inside)
