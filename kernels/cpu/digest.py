"""Digests of KV memory, and copies of chunks with their digests."""

from __future__ import annotations

import ctypes
import struct

import torch
from torch import Tensor

from pdserve.kernels.cpu.marshal import refused

_DIGEST = struct.Struct("@5P14q").pack
_CHUNKS = struct.Struct("@7P14q").pack


class DigestOps:
    """Calls of these kernels in one library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._digest = library.pd_digest
        self._gather = library.pd_gather_chunks
        self._scatter = library.pd_scatter_chunks

    def kv_digests(
        self, kv: Tensor, spans: Tensor, constants: Tensor, keys: Tensor, num_rows: int
    ) -> Tensor:
        """See ``reference.digest.kv_digests``; runs only on the caller's thread.

        Raises:
            InternalError: A span is outside the memory, the constants or the rows.
        """
        num_blocks, num_layers, num_planes, num_heads, block_size, _ = kv.shape
        words = _words(kv, constants, keys)
        if spans.shape[1:] != (5,):
            raise TypeError(f"got spans {spans.shape}")
        _check_int64(spans)
        out = torch.zeros((num_rows, num_layers, num_heads), dtype=torch.int64)
        status = self._digest(
            _DIGEST(
                kv.data_ptr(),
                spans.data_ptr(),
                constants.data_ptr(),
                keys.data_ptr(),
                out.data_ptr(),
                len(spans),
                len(constants),
                num_rows,
                num_blocks,
                num_layers,
                num_planes,
                num_heads,
                block_size,
                words,
                *_strides(kv),
            )
        )
        if status:
            raise refused("kv_digests", status)
        return out

    def gather_chunks(
        self,
        kv: Tensor,
        blocks: Tensor,
        pool: Tensor,
        starts: Tensor,
        constants: Tensor,
        keys: Tensor,
    ) -> Tensor:
        """See ``reference.chunks.gather_chunks``; runs on the caller's thread, past its caches.

        Raises:
            InternalError: A block is outside the memory, or a chunk outside the pool.
        """
        out, arguments = _chunks(kv, blocks, pool, starts, constants, keys)
        if status := self._gather(arguments):
            raise refused("gather_chunks", status)
        return out

    def scatter_chunks(
        self,
        kv: Tensor,
        blocks: Tensor,
        pool: Tensor,
        starts: Tensor,
        constants: Tensor,
        keys: Tensor,
    ) -> Tensor:
        """See ``reference.chunks.scatter_chunks`` and `gather_chunks`."""
        out, arguments = _chunks(kv, blocks, pool, starts, constants, keys)
        if status := self._scatter(arguments):
            raise refused("scatter_chunks", status)
        return out


def _chunks(
    kv: Tensor, blocks: Tensor, pool: Tensor, starts: Tensor, constants: Tensor, keys: Tensor
) -> tuple[Tensor, bytes]:
    """Return zeros for the result, and a struct with the arguments."""
    num_blocks, num_layers, num_planes, num_heads, block_size, _ = kv.shape
    words = _words(kv, constants, keys)
    num_chunks, each = blocks.shape
    if starts.shape != (num_chunks, num_heads) or each * block_size > len(constants):
        raise TypeError(
            f"got starts {starts.shape} and {len(constants)} constants for blocks {blocks.shape} "
            f"of {block_size} tokens and {num_heads} heads"
        )
    if pool.dtype != torch.uint8 or pool.dim() != 1 or not pool.is_contiguous():
        raise TypeError(f"want contiguous bytes, got {pool.dtype} {pool.shape} {pool.stride()}")
    _check_int64(blocks, starts)
    out = torch.zeros((num_chunks, num_layers, num_heads), dtype=torch.int64)
    return out, _CHUNKS(
        kv.data_ptr(),
        pool.data_ptr(),
        blocks.data_ptr(),
        starts.data_ptr(),
        constants.data_ptr(),
        keys.data_ptr(),
        out.data_ptr(),
        num_chunks,
        each,
        len(pool),
        num_blocks,
        num_layers,
        num_planes,
        num_heads,
        block_size,
        words,
        *_strides(kv),
    )


def _words(kv: Tensor, constants: Tensor, keys: Tensor) -> int:
    """Check that constants and keys match the memory; return the words of a vector."""
    words, odd_bytes = divmod(kv.shape[5] * kv.element_size(), 4)
    if odd_bytes or kv.stride(5) != 1 or constants.shape[1] != words:
        raise TypeError(
            f"got vectors of {kv.shape[5]} {kv.dtype} {kv.element_size() * kv.stride(5)} bytes "
            f"apart, and {constants.shape[1]} constants for each of their 32-bit words"
        )
    if keys.shape != kv.shape[1:4]:
        raise TypeError(f"got keys {keys.shape} for {kv.shape}")
    if constants.dtype != torch.int32 or not constants.is_contiguous():
        raise TypeError(f"want contiguous int32, got {constants.dtype} {constants.stride()}")
    _check_int64(keys)
    return words


def _check_int64(*tables: Tensor) -> None:
    for each in tables:
        if each.dtype != torch.int64 or not each.is_contiguous():
            raise TypeError(f"want contiguous int64, got {each.dtype} {each.stride()}")


def _strides(kv: Tensor) -> list[int]:
    """Return the strides in bytes, from blocks down to tokens."""
    return [stride * kv.element_size() for stride in kv.stride()[:5]]
