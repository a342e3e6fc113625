"""Paged attention's two kernels for every architecture: whole rows, and segments of rows.

`segments` says why a row's bits do not depend on which of them computed it. Both find their work
on the device, from the lengths of the requests: which of them serves a request is told by its
number of query tokens.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from pdserve.kernels.cuda.launch import wait_for_previous
from pdserve.kernels.cuda.paged import (
    load_blocks,
    load_queries,
    load_tile,
    masked_scores,
    number_rows,
)
from pdserve.kernels.cuda.segments import (
    find,
    first_segment,
    merged,
    normalized,
    request_lengths,
    update,
    with_sink,
)


@triton.jit
def _segment(
    begin: tl.tensor,
    end: tl.tensor,
    x: tl.tensor,
    x_rest: tl.tensor,
    kv: tl.tensor,
    table: tl.tensor,
    position: tl.tensor,
    exponent_scale: tl.tensor,
    window: tl.tensor,
    stride_block: tl.tensor,
    PLANE: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    ROTARY: tl.constexpr,
    ROTARY_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
) -> Any:
    """Return the state of the keys from ``begin`` to ``end``, all of one segment; see `update`."""
    acc = tl.zeros([M, D_PADDED], tl.float32)
    mass = tl.zeros([M], tl.float32)
    top = tl.full([M], float("-inf"), tl.float32)
    blocks = load_blocks(table, begin, end, TILE, BLOCK_SIZE)
    for at in range(begin, end, TILE):
        ahead = load_blocks(table, at + TILE, end, TILE, BLOCK_SIZE)
        k, v, k_rest = load_tile(
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
        s = masked_scores(
            x, x_rest, k, k_rest, at, position, window, ROTARY, TILE, MASKED, WINDOWED
        )
        acc, mass, top = update(s, v, acc, mass, top, exponent_scale)
        blocks = ahead
    return acc, mass, top


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
        place, valid, position = number_rows(
            first, tile, kv_head, num_new, context, GROUP, TOKENS, M, KV_HEADS
        )
        inside = valid[:, None] & (d < D)[None, :]
        x, x_rest = load_queries(q, place, valid, D, D_PADDED, ROTARY, ROTARY_PADDED)
        begin = (start + segment) * SEGMENT
        end = tl.minimum(context, context - num_new + (tile + 1) * TOKENS)
        stop = tl.minimum(begin + SEGMENT, end)
        if WINDOWED:
            begin = tl.maximum(
                begin, (context - num_new + tile * TOKENS + 1 - window) // TILE * TILE
            )
        acc, mass, top = _segment(
            begin,
            stop,
            x,
            x_rest,
            kv + kv_head * HEAD,
            tables + request * stride_table,
            position,
            exponent_scale,
            window,
            stride_block,
            PLANE,
            M,
            D,
            D_PADDED,
            ROTARY,
            ROTARY_PADDED,
            TILE,
            BLOCK_SIZE,
            True,
            WINDOWED,
        )
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
    M: tl.constexpr,
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
    """Merge the segments of the keys from ``begin`` to ``end`` into ``state``, ascending."""
    total, total_mass, total_top = state
    for start in range(begin // SEGMENT * SEGMENT, end, SEGMENT):
        acc, mass, top = _segment(
            tl.maximum(start, begin),
            tl.minimum(start + SEGMENT, end),
            x,
            x_rest,
            kv,
            table,
            position,
            exponent_scale,
            window,
            stride_block,
            PLANE,
            M,
            D,
            D_PADDED,
            ROTARY,
            ROTARY_PADDED,
            TILE,
            BLOCK_SIZE,
            MASKED,
            WINDOWED,
        )
        total, total_mass, total_top = merged(
            total, total_mass, total_top, acc, mass, top, exponent_scale
        )
    return total, total_mass, total_top


@triton.jit(do_not_specialize=["window", "stride_table", "num_requests", "least_tokens"])
def attend_whole(
    q: tl.tensor,
    kv: tl.tensor,
    out: tl.tensor,
    tables: tl.tensor,
    query_start: tl.tensor,
    contexts: tl.tensor,
    sinks: tl.tensor,
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

    Args:
        sinks: ``[heads]`` fp32, or None.
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
    place, valid, position = number_rows(
        first, tile, kv_head, num_new, context, GROUP, TOKENS, M, KV_HEADS
    )
    d = tl.arange(0, D_PADDED)
    inside = valid[:, None] & (d < D)[None, :]
    x, x_rest = load_queries(q, place, valid, D, D_PADDED, ROTARY, ROTARY_PADDED)
    least = tl.full([M], float("-inf"), tl.float32)
    state = (tl.zeros([M, D_PADDED], tl.float32), tl.zeros([M], tl.float32), least)
    table = tables + request * stride_table
    head = kv + kv_head * HEAD
    # Without context it would lie below 0, and so would what is read.
    earliest = tl.maximum(context - num_new + tile * TOKENS, -1)
    end = tl.minimum(context, earliest + TOKENS)
    begin = 0
    if WINDOWED:
        begin = tl.maximum(earliest + 1 - window, 0) // TILE * TILE
    else:
        begin = (earliest + 1) // SEGMENT * SEGMENT
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
            M,
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
        M,
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
    total, total_mass, total_top = state
    if sinks is not None:
        sink = tl.load(sinks + place % (KV_HEADS * GROUP))
        total, total_mass = with_sink(total, total_mass, total_top, sink, exponent_scale)
    value = normalized(total, total_mass).to(out.dtype.element_ty)
    tl.store(out + place[:, None] * D + d[None, :], value, mask=inside)
