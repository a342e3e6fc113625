"""Loads for attention: rows of queries, and tiles of keys and values behind a block table."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit
def load_blocks(
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
def load_tile(
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
def masked_scores(
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
def load_queries(
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
def number_rows(
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
