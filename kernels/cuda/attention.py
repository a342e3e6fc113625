"""Paged attention on CUDA: one body for prompts, chunks and single tokens, whole rows or segments.

`segments` says why a row's bits do not depend on which of the forms computed it. The choice is
therefore free, and is made from shapes on the host and from lengths on the device, so that nothing
waits: requests with one query token, and steps of few tokens, are cut into segments, which a fixed
number of programs take in turn; requests with more are cut into tiles of tokens, which on Hopper
loads and products compute apart from the softmax, where the cache allows it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pdserve.kernels.backend import NotTakenError
from pdserve.kernels.cuda.attend import attend_split, attend_whole
from pdserve.kernels.cuda.attend_apart import APART, ROWS_APART, attend_apart
from pdserve.kernels.cuda.cache_rows import describe_cache
from pdserve.kernels.cuda.launch import Tuning, is_interpreted, launch
from pdserve.kernels.cuda.segments import (
    DTYPES,
    LOG2_E,
    merge,
    merge_constants,
    merge_tuning,
    multiprocessors,
    padded_requests,
)
from pdserve.kernels.cuda.sizes import empty_rows, next_power_of_2
from pdserve.kernels.cuda.target import Architecture, target
from pdserve.kernels.reference.attention import PLAIN, AttentionForm

_MAX_HEAD_DIM = 256
_MAX_GROUP = 64
_FEW_TOKENS = 32
"""At most so many are all cut into segments: their tiles would be too few for the device."""


@dataclass(frozen=True, slots=True)
class AttentionTiles:
    """How rows and keys are cut.

    Attributes:
        tile: Keys of one product. With ``segment`` it fixes the order of operations: the bits.
        segment: Keys whose softmax stands alone; a multiple of ``tile``.
        split_rows: Rows (query token, head) of a program that computes one segment.
        split: How that program is compiled.
        programs_per_sm: Of such programs, that take segments in turn.
        whole_rows: Rows of a program that computes all segments.
        whole: How that one is compiled.
        apart: Whether `attend_apart` does instead what it can.
    """

    tile: int
    segment: int
    split_rows: int
    split: Tuning
    programs_per_sm: int
    whole_rows: int
    whole: Tuning
    apart: bool = False


def _tuned(warps: int, stages: int) -> Tuning:
    return Tuning(warps, stages, overlaps=True)


_HALF = AttentionTiles(64, 512, 16, _tuned(4, 3), 2, 128, _tuned(8, 3))
_HALF_WIDE = AttentionTiles(64, 512, 16, _tuned(4, 2), 1, 64, _tuned(8, 2))
_FULL = AttentionTiles(32, 512, 16, _tuned(4, 2), 2, 32, _tuned(4, 2))
_FULL_WIDE = AttentionTiles(32, 512, 16, _tuned(8, 1), 1, 16, _tuned(8, 1))

# Hopper's have run, the others have been compiled. Tile and segment are the same for all.
_HOPPER_HALF = replace(_HALF, apart=True)
_SMALL_HALF = replace(_HALF, whole_rows=64, whole=_tuned(4, 2))
_SMALL_HALF_WIDE = replace(_HALF_WIDE, split=_tuned(4, 1), whole_rows=32, whole=_tuned(4, 1))
_TILES = {
    Architecture.SM_80: (_SMALL_HALF, _HALF_WIDE, _FULL, _FULL_WIDE),
    Architecture.SM_89: (_SMALL_HALF, _SMALL_HALF_WIDE, _FULL, _FULL_WIDE),
    Architecture.SM_90: (_HOPPER_HALF, _HALF_WIDE, _FULL, _FULL_WIDE),
    Architecture.SM_100: (_HALF, _HALF_WIDE, _FULL, _FULL_WIDE),
}


def tiles_for(dtype: torch.dtype, head_dim: int) -> AttentionTiles:
    """Return how attention over heads of ``head_dim`` elements is cut."""
    half, half_wide, full, full_wide = _TILES[target().architecture]
    if dtype == torch.float32:
        return full if head_dim <= 128 else full_wide
    return half if head_dim <= 128 else half_wide


class AttentionCall(NamedTuple):
    """The arguments of ``paged_attention``; see its reference."""

    q: Tensor
    kv_layer: Tensor
    block_tables: Tensor
    query_start: Tensor
    context_lens: Tensor
    scale: float
    form: AttentionForm = PLAIN


def paged_attention(
    q: Tensor,
    kv_layer: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    scale: float,
    form: AttentionForm = PLAIN,
) -> Tensor:
    """See ``reference.attention.paged_attention``; ``scale`` is above 0.

    A request may have query tokens but no context, as what pads a step has: their rows are 0.

    Raises:
        NotTakenError: Heads are too wide, too many share one KV head, or a dtype or the cache's
            strides are others than `ops` says.
        TypeError: Sinks are not fp32, one for each head.
    """
    sinks = form.sinks
    if sinks is not None and (sinks.dtype != torch.float32 or sinks.shape != q.shape[1:2]):
        raise TypeError(f"want [{q.shape[1]}] fp32, got {sinks.shape} {sinks.dtype}")
    tiles = tiles_for(q.dtype, q.shape[2])
    call = AttentionCall(q, kv_layer, block_tables, query_start, context_lens, scale, form)
    return attend(call, tiles)


def attend(call: AttentionCall, tiles: AttentionTiles) -> Tensor:
    """Run ``paged_attention`` as ``tiles`` says.

    Raises:
        NotTakenError: As `paged_attention`.
    """
    q, kv_layer = call.q, call.kv_layer
    cut = _cut(
        tiles,
        (q.dtype, *q.shape[1:]),
        (kv_layer.dtype, kv_layer.shape, kv_layer.stride()),
        call.form.window is not None,
    )
    return attend_as(cut, call)


@dataclass(frozen=True, slots=True)
class Cut:
    """What is fixed by the model, the cache and the tiles.

    Attributes:
        tiles: Themselves.
        whole: Constants of `attend_whole`.
        split: Constants of `attend_split`.
        merge: Constants of `merge`.
        merging: How it is compiled.
        apart: Constants of `attend_apart`; None where `attend_whole` computes, as with sinks.
    """

    tiles: AttentionTiles
    whole: dict[str, Any]
    split: dict[str, Any]
    merge: dict[str, Any]
    merging: Tuning
    apart: dict[str, Any] | None = None


@cache
def _cut(
    tiles: AttentionTiles,
    query: tuple[torch.dtype, int, int],
    layer: tuple[torch.dtype, torch.Size, tuple[int, ...]],
    windowed: bool,
) -> Cut:
    dtype, num_heads, head_dim = query
    layer_dtype, (num_blocks, _, num_kv_heads, block_size, _), strides = layer
    group = num_heads // num_kv_heads
    inner = (num_kv_heads * block_size * head_dim, block_size * head_dim, head_dim, 1)
    if (
        dtype not in DTYPES
        or layer_dtype != dtype
        or head_dim > _MAX_HEAD_DIM
        or group > _MAX_GROUP
        or strides[1:] != inner
    ):
        raise NotTakenError(
            f"the CUDA kernels take heads of at most {_MAX_HEAD_DIM}, at most {_MAX_GROUP} to a KV "
            f"head, and queries and a cache, strided over blocks only, of one dtype of bf16, fp16 "
            f"and fp32; not heads of {head_dim}, {group} to a KV head, {dtype} and {layer_dtype}, "
            f"strides {strides}"
        )
    constants = {
        "HEAD": block_size * head_dim,
        "PLANE": num_kv_heads * block_size * head_dim,
        "D": head_dim,
        "ROTARY": 0,
        "BLOCK_SIZE": block_size,
        "WINDOWED": windowed,
    }
    cut = cut_for(tiles, num_heads, (group, group), constants)
    can_be_apart = (
        tiles.apart
        and not (windowed or is_interpreted())
        and dtype.itemsize == 2
        and head_dim in (64, 128)
        and block_size % tiles.tile == 0
        and strides[0] % head_dim == 0
        and num_blocks * strides[0] // head_dim < 1 << 31  # rows are numbered in 32 bits
    )
    if not can_be_apart:
        return cut
    kept = ("GROUP", "KV_HEADS", "D", "TILE", "SEGMENT", "BLOCK_SIZE")
    apart = {name: cut.whole[name] for name in kept}
    return replace(cut, apart=apart | {"TOKENS": ROWS_APART // group, "STAGES": APART.stages})


def cut_for(
    tiles: AttentionTiles, num_heads: int, groups: tuple[int, int], constants: dict[str, Any]
) -> Cut:
    """Complete the constants of the kernels.

    Args:
        tiles: How rows and keys are cut.
        num_heads: Query heads.
        groups: How many of them, that share keys, are rows of one program: of `attend_whole`, and
            of `attend_split`.
        constants: What is left.
    """
    constants |= {
        "D_PADDED": max(16, next_power_of_2(constants["D"])),
        "ROTARY_PADDED": max(16, next_power_of_2(constants["ROTARY"])),
        "TILE": tiles.tile,
        "SEGMENT": tiles.segment,
    }
    whole = constants | _rows_of(num_heads, groups[0], tiles.whole_rows)
    split = constants | _rows_of(num_heads, groups[1], tiles.split_rows)
    merging = merge_constants(num_heads, constants["D"], tiles.segment)
    merging["WINDOWED"] = constants["WINDOWED"]
    return Cut(tiles, whole, split, merging, merge_tuning(constants["D"]))


def _rows_of(num_heads: int, group: int, rows: int) -> dict[str, Any]:
    rows = max(rows, next_power_of_2(group))
    return {"GROUP": group, "KV_HEADS": num_heads // group, "M": rows, "TOKENS": rows // group}


def attend_as(cut: Cut, call: AttentionCall) -> Tensor:
    """Launch what the numbers of tokens and requests leave possible; ``[T, H * D]``."""
    q, num_requests = call.q, call.context_lens.shape[0]
    num_tokens, num_heads, _ = q.shape
    out = empty_rows(num_tokens, num_heads * cut.whole["D"], q)
    every = num_tokens <= max(num_requests, _FEW_TOKENS)
    if not every:
        _launch_whole(call, cut, out)
    if every or num_requests > 1:
        _launch_split(call, cut, out, every=every)
    return out


def _launch_whole(call: AttentionCall, cut: Cut, out: Tensor) -> None:
    """Compute the requests with two query tokens or more."""
    num_tokens, num_requests = call.q.shape[0], call.context_lens.shape[0]
    apart = cut.apart if call.form.sinks is None else None  # which knows of none
    constants = apart or cut.whole
    num_tiles = num_tokens // constants["TOKENS"] + min(num_requests, num_tokens // 2)
    num_items = num_tiles * constants["KV_HEADS"]
    lengths = call.block_tables, call.query_start, call.context_lens
    exponent_scale, stride_table = call.scale * LOG2_E, call.block_tables.stride(0)
    stride_block, num_padded = call.kv_layer.stride(0), padded_requests(num_requests)
    if apart is None:
        launch(
            attend_whole,
            (num_items,),
            call.q,
            call.kv_layer,
            out,
            *lengths,
            call.form.sinks,
            exponent_scale,
            call.form.window or 0,
            stride_block,
            stride_table,
            num_requests,
            2,
            tuning=cut.tiles.whole,
            REQUESTS=num_padded,
            **constants,
        )
    else:
        launch(
            attend_apart,
            (min(num_items, multiprocessors(call.q.device)),),
            call.q,
            describe_cache(call.kv_layer, cut.tiles.tile),
            out,
            *lengths,
            exponent_scale,
            stride_block // constants["D"],
            stride_table,
            num_requests,
            2,
            tuning=APART,
            REQUESTS=num_padded,
            **constants,
        )


def _launch_split(call: AttentionCall, cut: Cut, out: Tensor, *, every: bool) -> None:
    """Compute the requests with one query token, or ``every`` request.

    What the grid and the partial results are sized by is no length, which only the device knows,
    but the widest that the tables, or the window, can hold.
    """
    num_tokens, num_requests = call.q.shape[0], call.context_lens.shape[0]
    slots, most_tokens = (num_tokens, num_tokens) if every else (num_requests, 1)
    constants, segment = cut.split, cut.tiles.segment
    num_blocks = min(call.block_tables.shape[1], call.kv_layer.shape[0])
    num_segments = -(-num_blocks * constants["BLOCK_SIZE"] // segment)
    if call.form.window is not None:
        num_segments = min(num_segments, -(-(call.form.window + most_tokens) // segment) + 1)
    num_heads, device = call.q.shape[1], call.q.device
    shape = (slots, num_heads, num_segments, constants["D"] + 4)
    partial = torch.empty(shape, dtype=torch.float32, device=device)
    every_and_requests = {"EVERY": every, "REQUESTS": padded_requests(num_requests)}
    items = slots * num_segments * constants["KV_HEADS"]
    programs = cut.tiles.programs_per_sm * multiprocessors(device)
    window, exponent_scale = call.form.window or 0, call.scale * LOG2_E
    launch(
        attend_split,
        (min(items, programs),),
        call.q,
        call.kv_layer,
        partial,
        call.block_tables,
        call.query_start,
        call.context_lens,
        exponent_scale,
        window,
        call.kv_layer.stride(0),
        call.block_tables.stride(0),
        num_requests,
        num_segments,
        most_tokens,
        tuning=cut.tiles.split,
        **constants,
        **every_and_requests,
    )
    launch(
        merge,
        (slots, num_heads),
        partial,
        out,
        call.query_start,
        call.context_lens,
        call.form.sinks,
        exponent_scale,
        window,
        num_requests,
        num_segments,
        tuning=cut.merging,
        **cut.merge,
        **every_and_requests,
    )
