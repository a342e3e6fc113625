"""Copies of chunks between KV blocks and a pool in the host's memory, with their digests.

The pool is memory registered with the driver (`cudaHostRegister`), so programs read and write it
directly over the bus. The bus, not the device, limits a copy: a few programs keep it busy, and
leave the multiprocessors to concurrent steps. Digests are sums of integers, the same in any order
and on every backend.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.backend import NotTakenError
from pdserve.kernels.cuda.checks import check_integers
from pdserve.kernels.cuda.digest import kept_on
from pdserve.kernels.cuda.launch import Tuning, launch
from pdserve.kernels.cuda.sizes import divided_up, next_power_of_2
from pdserve.kernels.reference.chunks import check_chunks

MAX_PROGRAMS = 32
"""Of 4 warps and 8 KiB in flight each: some 256 KiB, several times what a bus takes to be busy."""

TUNING = Tuning(warps=4)
_PIECE_WORDS = 2048


class ChunkCopy(NamedTuple):
    """The arguments of ``gather_chunks`` and ``scatter_chunks``; see their reference."""

    kv: Tensor
    blocks: Tensor
    pool: Tensor
    starts: Tensor
    constants: Tensor
    keys: Tensor


@triton.jit
def _unsigned(words: tl.tensor) -> tl.tensor:
    return words.to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit(do_not_specialize=["num_chunks", "num_layers", "num_pieces"])
def pass_pieces(
    words: tl.tensor,
    pool: tl.tensor,
    tables: tl.tensor,
    constants: tl.tensor,
    out: tl.tensor,
    num_chunks: tl.tensor,
    num_layers: tl.tensor,
    num_pieces: tl.tensor,
    stride_block: tl.tensor,
    stride_layer: tl.tensor,
    stride_plane: tl.tensor,
    stride_head: tl.tensor,
    stride_token: tl.tensor,
    TO_POOL: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    HAS_RUNS: tl.constexpr,
    PLANES: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCKS: tl.constexpr,
    WORDS: tl.constexpr,
    RUN: tl.constexpr,
    PIECES: tl.constexpr,
    PIECE: tl.constexpr,
) -> None:
    """Copy pieces in turn, in the pool's order, and add each one's share to its digest.

    A run is what the pool has side by side of a block's layer, plane and head: its tokens, which
    lie side by side in the block, too, if HAS_RUNS. ``tables`` holds blocks, starts and keys.
    """
    starts = tables + num_chunks * BLOCKS
    keys = starts + num_chunks * HEADS
    lane = tl.arange(0, PIECE)
    for index in range(tl.program_id(0), num_pieces, tl.num_programs(0)):
        offset = index % PIECES * PIECE + lane
        run = index // PIECES
        block = run % BLOCKS
        plane = run // BLOCKS % PLANES
        layer = run // (BLOCKS * PLANES) % num_layers
        chunk_head = run // (BLOCKS * PLANES) // num_layers
        chunk, head = chunk_head // HEADS, chunk_head % HEADS
        start = tl.load(starts + chunk_head)
        if start >= 0:
            place = tl.load(tables + chunk * BLOCKS + block)
            here = place * stride_block + layer.to(tl.int64) * stride_layer
            here += plane * stride_plane + head * stride_head
            there = start // 4 + ((layer * PLANES + plane) * BLOCKS + block).to(tl.int64) * RUN
            if IS_ALIGNED:  # to 16 bytes
                here = tl.multiple_of(here, 4)
                there = tl.multiple_of(there, 4)
            in_block = offset if HAS_RUNS else offset // WORDS * stride_token + offset % WORDS
            in_block = words + here + in_block
            in_pool = pool + there + offset
            inside = offset < RUN
            value = tl.load(in_block if TO_POOL else in_pool, mask=inside, other=0)
            if TO_POOL:
                tl.store(in_pool, value, mask=inside)
            else:
                tl.store(in_block, value, mask=inside & (place >= 0))
            factor = tl.load(constants + block * RUN + offset, mask=inside, other=0)
            key = tl.load(keys + (layer * PLANES + plane) * HEADS + head)
            total = tl.sum(_unsigned(value) * _unsigned(factor) * key, 0)
            into = out + (chunk * num_layers + layer) * HEADS + head
            tl.atomic_add(into, total, sem="relaxed")


def gather_chunks(
    kv: Tensor, blocks: Tensor, pool: Tensor, starts: Tensor, constants: Tensor, keys: Tensor
) -> Tensor:
    """See ``reference.chunks.gather_chunks``; on the current stream, and waits for it.

    Raises:
        NotTakenError: The pool is not registered with the driver.
        TypeError: A vector is not a whole number of words, or an argument has another shape or
            dtype.
        IndexError: A block is outside the memory, or a chunk outside the pool.
    """
    copy = ChunkCopy(kv, blocks, pool, starts, constants, keys)
    _check(copy, needs_blocks=True)
    return copied(copy, to_pool=True).cpu()


def scatter_chunks(
    kv: Tensor, blocks: Tensor, pool: Tensor, starts: Tensor, constants: Tensor, keys: Tensor
) -> Tensor:
    """See ``reference.chunks.scatter_chunks`` and `gather_chunks`."""
    copy = ChunkCopy(kv, blocks, pool, starts, constants, keys)
    _check(copy, needs_blocks=False)
    return copied(copy, to_pool=False).cpu()


def copied(copy: ChunkCopy, *, to_pool: bool, max_programs: int = MAX_PROGRAMS) -> Tensor:
    """Start a copy with checked arguments; return its digests on the device of ``kv``."""
    kv, blocks, pool, starts, constants, keys = copy
    num_layers, num_planes, num_heads, block_size = kv.shape[1:5]
    num_chunks, num_blocks = blocks.shape
    words, pool_words = kv.view(torch.int32), pool[: len(pool) // 4 * 4].view(torch.int32)
    num_words = words.shape[-1]
    run = block_size * num_words
    piece = min(_PIECE_WORDS, next_power_of_2(run))
    pieces = divided_up(run, piece)
    num_pieces = num_chunks * num_heads * num_layers * num_planes * num_blocks * pieces
    tables = torch.cat([each.flatten() for each in (blocks, starts, keys)])
    out = torch.zeros((num_chunks, num_layers, num_heads), dtype=torch.int64, device=kv.device)
    launch(
        pass_pieces,
        (min(num_pieces, max_programs),),
        words,
        pool_words,
        tables.to(kv.device, non_blocking=True),
        kept_on(kv.device, constants),
        out,
        num_chunks,
        num_layers,
        num_pieces,
        *words.stride()[:5],
        tuning=TUNING,
        TO_POOL=to_pool,
        IS_ALIGNED=_is_aligned(words, pool, starts, run),
        HAS_RUNS=words.stride(4) == num_words,
        PLANES=num_planes,
        HEADS=num_heads,
        BLOCKS=num_blocks,
        WORDS=num_words,
        RUN=run,
        PIECES=pieces,
        PIECE=piece,
    )
    return out


def _is_aligned(words: Tensor, pool: Tensor, starts: Tensor, run: int) -> bool:
    """Whether all runs begin and end at multiples of 16 bytes."""
    in_words = (run, *words.stride()[:4])
    in_bytes = (words.data_ptr(), pool.data_ptr())
    is_regular = not any(each % 4 for each in in_words) and not any(each % 16 for each in in_bytes)
    return is_regular and not bool((starts.clamp(min=0) % 16).any())


def _check(copy: ChunkCopy, *, needs_blocks: bool) -> None:
    kv, blocks, pool, starts, constants, keys = copy
    check_chunks(kv, blocks, pool, starts, needs_blocks=needs_blocks)
    check_integers(torch.int64, blocks, starts, keys)
    check_integers(torch.int32, constants)
    check_integers(torch.uint8, pool)
    num_places, num_words = blocks.shape[1] * kv.shape[4], kv.shape[5] * kv.element_size() // 4
    is_known = constants.shape[1] == num_words and len(constants) >= num_places
    if keys.shape != kv.shape[1:4] or not is_known:
        raise TypeError(f"got keys {keys.shape} and constants {constants.shape} for {kv.shape}")
    if kv.is_cuda and not pool.is_pinned():
        raise NotTakenError("the CUDA kernels copy to and from memory that the driver knows")
