"""Kernels of a mixture-of-experts layer: choices sorted by expert, two products, and a sum."""

from __future__ import annotations

import triton
import triton.language as tl

from pdserve.kernels.cuda.activation import gated
from pdserve.kernels.cuda.launch import wait_for_previous
from pdserve.kernels.cuda.product import place_of, product, product_pair


@triton.jit(do_not_specialize=["num_ids"])
def count_kernel(
    ids: tl.tensor,
    counts: tl.tensor,
    num_ids: tl.tensor,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Count the choices of one expert; grid (experts,)."""
    wait_for_previous(OVERLAPS)
    expert = tl.program_id(0)
    found = tl.zeros([BLOCK], tl.int32)
    for first in range(0, num_ids, BLOCK):
        at = first + tl.arange(0, BLOCK)
        found += (tl.load(ids + at, mask=at < num_ids, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(found, 0))


@triton.jit(do_not_specialize=["num_ids", "num_tiles"])
def sort_kernel(
    ids: tl.tensor,
    counts: tl.tensor,
    order: tl.tensor,
    tiles: tl.tensor,
    num_ids: tl.tensor,
    num_tiles: tl.tensor,
    num_experts: tl.tensor,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Place one expert's choices after those of lower experts, in order; grid (experts,).

    Args:
        ids: ``[num_ids]`` int64: the expert of each choice.
        counts: ``[num_experts]`` int32.
        order: ``[num_ids]`` int32: the choice at each place; unset after the last.
        tiles: ``[num_tiles, 3]`` int32: expert, first place and end of each run of ROWS places; the
            expert is -1 after the last.
        EXPERTS: At least ``num_experts``, a power of two.
    """
    wait_for_previous(OVERLAPS)
    expert = tl.program_id(0)
    every = tl.arange(0, EXPERTS)
    lower = tl.load(counts + every, mask=every < expert, other=0)
    first = tl.sum(lower, 0)
    tile = tl.sum((lower + ROWS - 1) // ROWS, 0)
    end = first + tl.load(counts + expert)
    for at in range(first, end, ROWS):
        tl.store(tiles + tile * 3, expert)
        tl.store(tiles + tile * 3 + 1, at)
        tl.store(tiles + tile * 3 + 2, end)
        tile += 1
    if expert == num_experts - 1:
        for unused in range(tile, num_tiles):
            tl.store(tiles + unused * 3, -1)
    if end > first:
        place = first
        for start in range(0, num_ids, BLOCK):
            choice = start + tl.arange(0, BLOCK)
            own = tl.load(ids + choice, mask=choice < num_ids, other=-1) == expert
            rank = tl.cumsum(own.to(tl.int32), 0)
            tl.store(order + place + rank - 1, choice, mask=own)
            place += tl.sum(own.to(tl.int32), 0)


@triton.jit
def clamped(gate: tl.tensor, up: tl.tensor, ALPHA: tl.constexpr, LIMIT: tl.constexpr) -> tl.tensor:
    """Return `clamped_glu` of the reference, rounded to the dtype of ``gate``; NaN stays NaN."""
    wide, other = gate.to(tl.float32), up.to(tl.float32)
    wide = tl.where(wide > LIMIT, LIMIT, wide)
    other = tl.where(other > LIMIT, LIMIT, tl.where(other < -LIMIT, -LIMIT, other))
    return ((other + 1.0) * (wide / (1.0 + tl.exp(-(wide * ALPHA))))).to(gate.dtype)


@triton.jit(do_not_specialize=["num_tiles"])
def gate_up_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor | None,
    bias: tl.tensor,
    out: tl.tensor,
    order: tl.tensor,
    tiles: tl.tensor,
    num_tiles: tl.tensor,
    top_k: tl.tensor,
    inner: tl.tensor,
    depth: tl.tensor,
    num_runs: tl.tensor,
    to_up: tl.tensor,
    to_expert: tl.tensor,
    to_scales: tl.tensor,
    to_bias: tl.tensor,
    RUN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    SWAPPED: tl.constexpr,
    GROUP: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Gate the sorted choices' tokens by one expert; grid (tiles * column tiles,).

    Args:
        x: ``[T, depth]``.
        weight: ``[E, 2 * inner, depth]``, strided by ``to_expert`` over experts: gate and,
            ``to_up`` elements after it, up.
        scales: ``[E, 2 * inner, num_runs]`` fp32, strided by ``to_scales``, of weights in FP8, see
            `product`; or None.
        bias: ``[E, 2 * inner]``, strided by ``to_bias``; or None.
        out: ``[T * top_k, inner]``, by place.
        order: As of `sort_kernel`, and ``tiles``.
        LIMIT: Of `clamped`, and ALPHA; None is `gated`.
    """
    wait_for_previous(OVERLAPS)
    tile, column = place_of(tl.program_id(0), num_tiles, tl.cdiv(inner, BLOCK_N), GROUP)
    expert = tl.load(tiles + tile * 3)
    if expert >= 0:
        end = tl.load(tiles + tile * 3 + 2)
        place = tl.load(tiles + tile * 3 + 1) + tl.arange(0, BLOCK_M)
        live = place < end
        token = tl.load(order + place, mask=live, other=0) // top_k
        n = column * BLOCK_N + tl.arange(0, BLOCK_N)
        rows = n.to(tl.int64) * depth
        scale_rows = None
        if scales is not None:
            scale_rows = scales + expert.to(tl.int64) * to_scales + n * num_runs
        gate, up = product_pair(
            x + token.to(tl.int64) * depth,
            live,
            weight + expert.to(tl.int64) * to_expert + rows,
            n < inner,
            to_up,
            scale_rows,
            inner * num_runs,
            depth,
            RUN,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            EVEN_N,
            EVEN_K,
            SWAPPED,
        )
        dtype = out.dtype.element_ty
        at = out + (place.to(tl.int64) * inner)[:, None] + n[None, :]
        if bias is not None:
            of = bias + expert.to(tl.int64) * to_bias + n
            gate += tl.load(of, mask=n < inner, other=0.0).to(tl.float32)[None, :]
            up += tl.load(of + inner, mask=n < inner, other=0.0).to(tl.float32)[None, :]
        if LIMIT is None:
            result = gated(gate.to(dtype), up.to(dtype))
        else:
            result = clamped(gate.to(dtype), up.to(dtype), ALPHA, LIMIT)
        tl.store(at, result, mask=live[:, None] & (n < inner)[None, :])


@triton.jit(do_not_specialize=["num_tiles"])
def down_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor | None,
    bias: tl.tensor,
    out: tl.tensor,
    order: tl.tensor,
    tiles: tl.tensor,
    num_tiles: tl.tensor,
    num_cols: tl.tensor,
    depth: tl.tensor,
    num_runs: tl.tensor,
    to_expert: tl.tensor,
    to_scales: tl.tensor,
    to_bias: tl.tensor,
    RUN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    SWAPPED: tl.constexpr,
    GROUP: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Multiply the gated rows by one expert's last weight; grid (tiles * column tiles,).

    Args:
        x: ``[num_ids, depth]``, by place.
        weight: ``[E, num_cols, depth]``, strided by ``to_expert`` over experts.
        scales: ``[E, num_cols, num_runs]``, as of `gate_up_kernel`; ``bias`` likewise.
        out: ``[num_ids, num_cols]`` fp32, by choice.
        order: As of `sort_kernel`, and ``tiles``.
    """
    wait_for_previous(OVERLAPS)
    tile, column = place_of(tl.program_id(0), num_tiles, tl.cdiv(num_cols, BLOCK_N), GROUP)
    expert = tl.load(tiles + tile * 3)
    if expert >= 0:
        end = tl.load(tiles + tile * 3 + 2)
        place = tl.load(tiles + tile * 3 + 1) + tl.arange(0, BLOCK_M)
        live = place < end
        choice = tl.load(order + place, mask=live, other=0)
        n = column * BLOCK_N + tl.arange(0, BLOCK_N)
        scale_rows = None
        if scales is not None:
            scale_rows = scales + expert.to(tl.int64) * to_scales + n * num_runs
        total = product(
            x + place.to(tl.int64) * depth,
            live,
            weight + expert.to(tl.int64) * to_expert + n.to(tl.int64) * depth,
            n < num_cols,
            scale_rows,
            depth,
            RUN,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            EVEN_N,
            EVEN_K,
            SWAPPED,
        )
        if bias is not None:
            of = bias + expert.to(tl.int64) * to_bias + n
            total += tl.load(of, mask=n < num_cols, other=0.0).to(tl.float32)[None, :]
        at = out + (choice.to(tl.int64) * num_cols)[:, None] + n[None, :]
        tl.store(at, total, mask=live[:, None] & (n < num_cols)[None, :])


@triton.jit
def sum_kernel(
    parts: tl.tensor,
    ids: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    num_experts: tl.tensor,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Sum a token's parts in the order of its choices, in fp32; grid (tokens, pieces).

    Args:
        parts: ``[T * TOP_K, width]`` fp32; unset if the expert is not here.
        ids: ``[T, TOP_K]`` int64.
        weights: ``[T, TOP_K]`` fp32.
        out: ``[T, width]``.
    """
    wait_for_previous(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP_K):
        choice = token * TOP_K + j
        expert = tl.load(ids + choice)
        here = (expert >= 0) & (expert < num_experts)
        part = tl.load(parts + choice * width + column, mask=inside & here, other=0.0)
        total = tl.where(here, total + tl.load(weights + choice) * part, total)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=inside)
