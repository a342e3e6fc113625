"""Softmax in segments at fixed positions: what the attention kernels share.

A request's keys are cut into segments, and a segment into tiles, at absolute positions. Within a
segment the softmax is online over its tiles (Milakov and Gimelshein, arXiv 1805.02867); segments
are merged one after another, ascending, by one formula. So an element has one order of operations,
which its own position alone fixes, whoever computes a segment: one program does all of a row's
segments (prefill), or many do one each and `merge` brings them together (decode). Tiles and
segments that a row does not see change no bit of it. A sink is merged last.

Row sums are sums of integers, which no layout of threads can reorder: probabilities lie in [0, 1],
so that 2 + p, rounded to fp32, has the bits of 2 plus a count of 2**-22. The bits of 2, once for
each key of a tile, overflow out of the sum. Scores are kept unscaled; the scale and the change of
base are one factor of the exponent.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from pdserve.kernels.cuda.launch import Tuning, wait_for_previous
from pdserve.kernels.cuda.sizes import next_power_of_2

LOG2_E = 1.4426950408889634
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def padded_requests(num_requests: int) -> int:
    """Return a power of 4, so that few kernels are compiled, of at least 16."""
    bits = (num_requests - 1).bit_length()
    return max(16, 1 << (bits + bits % 2))


@cache
def multiprocessors(device: torch.device) -> int:
    """Return how many a device has; 2 for Triton's interpreter, where programs take turns too."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


def merge_constants(num_heads: int, dim: int, segment: int) -> dict[str, Any]:
    """Return those of `merge`, but for ``EVERY``, ``REQUESTS`` and ``WINDOWED``."""
    return {
        "NUM_HEADS": num_heads,
        "D": dim,
        "D_PADDED": max(16, next_power_of_2(dim)),
        "SEGMENT": segment,
        "MANY": 16,
        "FEW": 4,
    }


def merge_tuning(dim: int) -> Tuning:
    """Return how `merge` is compiled: at most four elements of each segment to a thread."""
    return Tuning(max(1, next_power_of_2(dim) // 128), overlaps=True)


@triton.jit
def update(
    s: tl.tensor,
    v: tl.tensor,
    acc: tl.tensor,
    mass: tl.tensor,
    top: tl.tensor,
    exponent_scale: tl.tensor,
) -> Any:
    """Take one tile into a segment's state.

    Args:
        s: ``[M, TILE]`` fp32 unscaled scores; -inf where a row does not see a key.
        v: ``[TILE, D]`` values; finite where no row sees them.
        acc: ``[M, D]`` fp32 weighted sum of values.
        mass: ``[M]`` fp32 sum of weights.
        top: ``[M]`` fp32 largest score.
        exponent_scale: The scale of the scores, times log2(e).
    """
    new_top = tl.maximum(top, tl.max(s, 1))
    safe = tl.where(new_top == float("-inf"), 0.0, new_top)
    p = tl.exp2(tl.fma(s, exponent_scale, (safe * -exponent_scale)[:, None]))
    a = tl.exp2((top - safe) * exponent_scale)
    units = tl.sum((p + 2.0).to(tl.int32, bitcast=True), 1) & 0x3FFFFFFF
    mass = mass * a + units.to(tl.float32) * 2.384185791015625e-07
    acc = tl.dot(p.to(v.dtype), v, acc * a[:, None], input_precision="ieee")
    return acc, mass, new_top


@triton.jit
def merged(
    total: tl.tensor,
    total_mass: tl.tensor,
    total_top: tl.tensor,
    acc: tl.tensor,
    mass: tl.tensor,
    top: tl.tensor,
    exponent_scale: tl.tensor,
) -> Any:
    """Merge one segment into those before it; an empty side changes no bit of the other."""
    new_top = tl.maximum(total_top, top)
    safe = tl.where(new_top == float("-inf"), 0.0, new_top)
    a = tl.exp2((total_top - safe) * exponent_scale)
    b = tl.exp2((top - safe) * exponent_scale)
    return total * a[:, None] + acc * b[:, None], total_mass * a + mass * b, new_top


@triton.jit
def with_sink(
    total: tl.tensor,
    total_mass: tl.tensor,
    total_top: tl.tensor,
    sink: tl.tensor,
    exponent_scale: tl.tensor,
) -> Any:
    """Count a score without a value, ``sink``, which is not scaled, among each row's weights."""
    score = sink * 1.4426950408889634 / exponent_scale
    new_top = tl.maximum(total_top, score)
    a = tl.exp2((total_top - new_top) * exponent_scale)
    b = tl.exp2((score - new_top) * exponent_scale)
    return total * a[:, None], total_mass * a + b


@triton.jit
def normalized(
    total: tl.tensor,
    total_mass: tl.tensor,
) -> Any:
    """Divide by the sum of weights; rows that see no key are 0, and no 0 is negative."""
    return total / tl.where(total_mass == 0.0, 1.0, total_mass)[:, None] + 0.0


@triton.jit
def request_lengths(
    query_start: tl.tensor,
    contexts: tl.tensor,
    num_requests: tl.tensor,
    REQUESTS: tl.constexpr,
) -> Any:
    """Return each request's number of query tokens and context, ``[REQUESTS]``, 0 past the last."""
    r = tl.arange(0, REQUESTS)
    here = r < num_requests
    first = tl.load(query_start + r, mask=here, other=0)
    last = tl.load(query_start + r + 1, mask=here, other=0)
    return last - first, tl.load(contexts + r, mask=here, other=0)


@triton.jit
def first_segment(
    num_new: tl.tensor,
    context: tl.tensor,
    window: tl.tensor,
    SEGMENT: tl.constexpr,
    WINDOWED: tl.constexpr,
) -> Any:
    """Return the segment of the first key that any of a request's query tokens sees."""
    lowest = context * 0
    if WINDOWED:
        lowest = tl.maximum(context - num_new + 1 - window, 0)
    return lowest // SEGMENT


@triton.jit
def find(
    unit: tl.tensor,
    ends: tl.tensor,
) -> Any:
    """Return which request a unit of work belongs to, and its number there.

    Args:
        unit: Below the last of ``ends``.
        ends: ``[REQUESTS]``, running sum of each request's units.
    """
    before = ends <= unit
    return tl.sum(before.to(tl.int32), 0), unit - tl.max(tl.where(before, ends, 0), 0)


@triton.jit
def _load_segment(
    rows: tl.tensor, segment: tl.tensor, count: tl.tensor, D: tl.constexpr, D_PADDED: tl.constexpr
) -> Any:
    """Return one segment's state; that of no key from ``count`` on."""
    here = segment < count
    row = rows + segment * (D + 4)
    d = tl.arange(0, D_PADDED)[None, :]
    one = tl.zeros([1], tl.int32)
    acc = tl.load(row + d, mask=here & (d < D), other=0.0)
    mass = tl.load(row + D + one, mask=here, other=0.0)
    return acc, mass, tl.load(row + D + 1 + one, mask=here, other=float("-inf"))


@triton.jit(do_not_specialize=["window", "num_requests", "num_segments"])
def merge(
    partial: tl.tensor,
    out: tl.tensor,
    query_start: tl.tensor,
    contexts: tl.tensor,
    sinks: tl.tensor,
    exponent_scale: tl.tensor,
    window: tl.tensor,
    num_requests: tl.tensor,
    num_segments: tl.tensor,
    NUM_HEADS: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    SEGMENT: tl.constexpr,
    REQUESTS: tl.constexpr,
    EVERY: tl.constexpr,
    WINDOWED: tl.constexpr,
    MANY: tl.constexpr,
    FEW: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Merge the segments of one (slot, head) and write its row of the output.

    Grid: slots, heads. A slot is a token where ``EVERY``, else a request, of which those with one
    query token are done and the others left alone.

    Segments are asked for many at once, so that a long context waits few times.

    Args:
        partial: ``[slots, heads, num_segments, D + 4]`` fp32: acc, mass, top.
        out: ``[tokens, heads, D]``.
        sinks: ``[heads]`` fp32, or None.
    """
    wait_for_previous(OVERLAPS)
    slot, head = tl.program_id(0), tl.program_id(1)
    # A slot may be past the last request; what lies there in a step's buffers is another step's.
    here = slot < num_requests
    first = tl.load(query_start + slot, mask=here, other=-1)
    last = tl.load(query_start + slot + 1, mask=here, other=-1)
    request = slot
    if EVERY:
        token = slot
        if (first != slot) | (last != slot + 1):
            r = tl.arange(0, REQUESTS)
            ends = tl.load(query_start + r + 1, mask=r < num_requests, other=0x7FFFFFFF)
            request = tl.sum((ends <= slot).to(tl.int32), 0)
            first = tl.load(query_start + request)
            last = tl.load(query_start + request + 1)
    else:
        token = first
        if last != first + 1:
            return
    context = tl.load(contexts + request)
    start = first_segment(last - first, context, window, SEGMENT, WINDOWED)
    count = tl.cdiv(context - last + token + 1, SEGMENT) - start
    d = tl.arange(0, D_PADDED)
    total = tl.zeros([1, D_PADDED], tl.float32)
    total_mass = tl.zeros([1], tl.float32)
    total_top = tl.full([1], float("-inf"), tl.float32)
    rows = partial + ((slot * NUM_HEADS + head).to(tl.int64) * num_segments) * (D + 4)
    whole = count // MANY * MANY
    for base in range(0, whole, MANY):
        for i in tl.static_range(MANY):
            acc, mass, top = _load_segment(rows, base + i, count, D, D_PADDED)
            total, total_mass, total_top = merged(
                total, total_mass, total_top, acc, mass, top, exponent_scale
            )
    for base in range(whole, count, FEW):
        for i in tl.static_range(FEW):
            acc, mass, top = _load_segment(rows, base + i, count, D, D_PADDED)
            total, total_mass, total_top = merged(
                total, total_mass, total_top, acc, mass, top, exponent_scale
            )
    if sinks is not None:
        sink = tl.load(sinks + head + tl.zeros([1], tl.int32))
        total, total_mass = with_sink(total, total_mass, total_top, sink, exponent_scale)
    into = out + (token * NUM_HEADS + head).to(tl.int64) * D
    value = normalized(total, total_mass).to(out.dtype.element_ty)
    tl.store(into + d[None, :], value, mask=d[None, :] < D)
