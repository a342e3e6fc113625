"""Copies of KV blocks on one device: to and from staging memory, and between block sizes.

For pieces that are too small for the copy engine, as a share of the heads is, or that are to be
rearranged. One kernel does it all: the tokens of a (block, layer, plane, head) are contiguous, so
that any two views of blocks have runs of tokens in common. Whole blocks to and from the host are
the copy engine's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.cuda.launch import Tuning, launch

_PIECE_WORDS = 4096
"""What a program copies at once: 16 KiB, 8 accesses of 16 bytes for each thread."""

TUNING = Tuning(warps=4)
EVERYWHERE = 1 << 30
"""Programs of a copy that may take the whole device."""


@triton.jit(do_not_specialize=["num_pieces"])
def copy_runs(
    source: tl.tensor,
    source_ids: tl.tensor,
    target: tl.tensor,
    target_ids: tl.tensor,
    num_pieces: tl.tensor,
    source_block: tl.tensor,
    source_layer: tl.tensor,
    source_plane: tl.tensor,
    source_head: tl.tensor,
    target_block: tl.tensor,
    target_layer: tl.tensor,
    target_plane: tl.tensor,
    target_head: tl.tensor,
    LAYERS: tl.constexpr,
    PLANES: tl.constexpr,
    HEADS: tl.constexpr,
    SOURCE_RUNS: tl.constexpr,
    TARGET_RUNS: tl.constexpr,
    RUN: tl.constexpr,
    PIECES: tl.constexpr,
    PIECE: tl.constexpr,
) -> None:
    """Copy pieces of runs in turn, a run being RUN words of a layer, plane and head."""
    word = tl.arange(0, PIECE)
    for index in range(tl.program_id(0), num_pieces, tl.num_programs(0)):
        piece = index % PIECES
        tile = index // PIECES
        head = (tile % HEADS).to(tl.int64)
        plane = (tile // HEADS % PLANES).to(tl.int64)
        layer = (tile // (HEADS * PLANES) % LAYERS).to(tl.int64)
        run = tile // (HEADS * PLANES * LAYERS)
        from_block = (run // SOURCE_RUNS).to(tl.int64)
        to_block = (run // TARGET_RUNS).to(tl.int64)
        if source_ids is not None:
            from_block = tl.load(source_ids + from_block).to(tl.int64)
        if target_ids is not None:
            to_block = tl.load(target_ids + to_block).to(tl.int64)
        at = source + from_block * source_block + run % SOURCE_RUNS * RUN
        at += layer * source_layer + plane * source_plane + head * source_head
        into = target + to_block * target_block + run % TARGET_RUNS * RUN
        into += layer * target_layer + plane * target_plane + head * target_head
        inside = piece * PIECE + word < RUN
        value = tl.load(at + piece * PIECE + word, mask=inside)
        tl.store(into + piece * PIECE + word, value, mask=inside)


def gather_blocks(
    kv: Tensor, ids: Tensor, staging: Tensor, *, max_programs: int = EVERYWHERE
) -> None:
    """Copy ``kv[ids]`` to ``staging``.

    Args:
        kv: ``[num_blocks, L, P, H, block_size, Dh]`` of any dtype; strided as it likes, but the
            tokens of a head are contiguous, with a multiple of 4 bytes each.
        ids: ``[n]`` int32 or int64, where ``kv`` lies.
        staging: ``[n, L, P, H, block_size, Dh]``, strided likewise.
        max_programs: Bounds what the copy takes of the device beside other work; a
            multiprocessor runs up to 16 programs.

    Raises:
        TypeError: Shapes or dtypes do not fit, or tokens are strided.
    """
    _copy(_Blocks(kv, ids), _Blocks(staging, None), len(ids) * kv.shape[4], max_programs)


def scatter_blocks(
    staging: Tensor, kv: Tensor, ids: Tensor, *, max_programs: int = EVERYWHERE
) -> None:
    """Copy ``staging`` to ``kv[ids]``; arguments and errors as of `gather_blocks`."""
    _copy(_Blocks(staging, None), _Blocks(kv, ids), len(ids) * kv.shape[4], max_programs)


def repage(
    source: Tensor,
    source_ids: Tensor,
    target: Tensor,
    target_ids: Tensor,
    num_tokens: int,
    *,
    max_programs: int = EVERYWHERE,
) -> None:
    """Copy the first tokens of a list of blocks to blocks of another size.

    Arguments are as of `gather_blocks`, but the two block sizes may differ: one is a multiple of
    the other.

    Args:
        num_tokens: Rounded up to whole blocks of the smaller size.

    Raises:
        TypeError: Shapes or dtypes do not fit, or tokens are strided.
        ValueError: So many tokens are not in the blocks of both lists.
    """
    _copy(_Blocks(source, source_ids), _Blocks(target, target_ids), num_tokens, max_programs)


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Blocks of a view of KV memory: those of ``ids``, or all, in order."""

    kv: Tensor
    ids: Tensor | None

    @property
    def num_tokens(self) -> int:
        return len(self.kv if self.ids is None else self.ids) * int(self.kv.shape[4])


def _copy(source: _Blocks, target: _Blocks, num_tokens: int, max_programs: int) -> None:
    _check(source, target, num_tokens)
    sizes = source.kv.shape[4], target.kv.shape[4]
    run_tokens = min(sizes)
    a, b = source.kv.view(torch.int32), target.kv.view(torch.int32)
    shape, a_strides, b_strides, run = _merged(a, b, run_tokens)
    piece = min(_PIECE_WORDS, triton.next_power_of_2(run))
    pieces = triton.cdiv(run, piece)
    num_runs = triton.cdiv(num_tokens, run_tokens)
    num_pieces = num_runs * shape[0] * shape[1] * shape[2] * pieces
    launch(
        copy_runs,
        (min(num_pieces, max_programs),),
        a,
        source.ids,
        b,
        target.ids,
        num_pieces,
        a.stride(0),
        *a_strides,
        b.stride(0),
        *b_strides,
        tuning=TUNING,
        LAYERS=shape[0],
        PLANES=shape[1],
        HEADS=shape[2],
        SOURCE_RUNS=sizes[0] // run_tokens,
        TARGET_RUNS=sizes[1] // run_tokens,
        RUN=run,
        PIECES=pieces,
        PIECE=piece,
    )


def _merged(a: Tensor, b: Tensor, run_tokens: int) -> tuple[list[int], list[int], list[int], int]:
    """Return layers, planes, heads, their strides in both, and a run's words.

    Heads, planes and layers that follow one another in both make longer runs, and count 1.
    """
    shape, strides = list(a.shape[1:4]), (list(a.stride()[1:4]), list(b.stride()[1:4]))
    run = run_tokens * a.shape[5]
    for axis in (2, 1, 0):
        if shape[axis] > 1 and any(stride[axis] != run for stride in strides):
            break
        run *= shape[axis]
        shape[axis] = 1
    return shape, strides[0], strides[1], run


def _check(source: _Blocks, target: _Blocks, num_tokens: int) -> None:
    a, b = source.kv, target.kv
    if a.dtype != b.dtype or a.shape[1:4] != b.shape[1:4] or a.shape[5] != b.shape[5]:
        raise TypeError(f"cannot copy {a.dtype} {tuple(a.shape)} to {b.dtype} {tuple(b.shape)}")
    if max(a.shape[4], b.shape[4]) % min(a.shape[4], b.shape[4]):
        raise TypeError(f"blocks of {a.shape[4]} tokens have no runs of those of {b.shape[4]}")
    for kv in (a, b):
        if kv.stride(5) != 1 or kv.stride(4) != kv.shape[5] or kv.shape[5] * kv.itemsize % 4:
            raise TypeError(f"want whole tokens side by side, got {kv.shape} {kv.stride()}")
    for ids in (source.ids, target.ids):
        if ids is not None and (ids.dtype.is_floating_point or not ids.is_contiguous()):
            raise TypeError(f"want contiguous integers, got {ids.dtype} {ids.stride()}")
    if num_tokens > min(source.num_tokens, target.num_tokens):
        raise ValueError(
            f"{num_tokens} tokens are not in {source.num_tokens} and in {target.num_tokens}"
        )
