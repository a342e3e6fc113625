"""Reference copies of chunks between blocks and a pool, digested as they pass.

In the pool, a head of a chunk is one run of bytes, ``[L, P, tokens of a chunk, bytes of a
vector]``, whatever the block size and the other heads of who wrote it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pdserve.kernels.reference.digest import kv_digests


def gather_chunks(
    kv: Tensor, blocks: Tensor, pool: Tensor, starts: Tensor, constants: Tensor, keys: Tensor
) -> Tensor:
    """Copy chunks out of blocks into a pool.

    Args:
        kv: ``[num_blocks, L, P, H, block_size, Dh]`` of any dtype, may be strided but for its last
            dimension, which has a multiple of 4 bytes.
        blocks: ``[C, blocks of a chunk]`` int64, on the CPU: the blocks of each chunk.
        pool: ``[num_bytes]`` uint8, on the CPU. No two chunks overlap in it.
        starts: ``[C, H]`` int64, on the CPU: where each head of a chunk begins in the pool, in
            bytes, a multiple of 4; negative: that head is not copied.
        constants: ``[num_places, words per vector]`` int32, on the CPU; a token's place is that in
            its chunk.
        keys: ``[L, P, H]`` int64, on the CPU.

    Returns:
        What `kv_digests` gives of each chunk as one row, ``[C, L, H]`` int64, on the CPU: of the
        bytes that were copied. Zero where a head is not copied.

    Raises:
        TypeError: A vector is not a whole number of words.
        IndexError: A block is outside of the memory, or a chunk of the pool.
    """
    check_chunks(kv, blocks, pool, starts, needs_blocks=True)
    out = _zeros(kv, blocks)
    for chunk, head, body in _bodies(kv, blocks, pool, starts):
        found = kv[blocks[chunk].to(kv.device), :, :, head].view(torch.uint8)
        body.copy_(found.permute(1, 2, 0, 3, 4))
        out[chunk, :, head] = _digests(body, constants, keys[:, :, head])
    return out


def scatter_chunks(
    kv: Tensor, blocks: Tensor, pool: Tensor, starts: Tensor, constants: Tensor, keys: Tensor
) -> Tensor:
    """Copy chunks out of a pool into blocks; see `gather_chunks`.

    Args:
        blocks: Negative ones are not written: their tokens are digested where they lie.
    """
    check_chunks(kv, blocks, pool, starts, needs_blocks=False)
    out = _zeros(kv, blocks)
    for chunk, head, body in _bodies(kv, blocks, pool, starts):
        out[chunk, :, head] = _digests(body, constants, keys[:, :, head])
        wanted = blocks[chunk] >= 0
        found = body[:, :, wanted].permute(2, 0, 1, 3, 4).to(kv.device)
        kv[blocks[chunk, wanted].to(kv.device), :, :, head] = found.contiguous().view(kv.dtype)
    return out


def check_chunks(
    kv: Tensor, blocks: Tensor, pool: Tensor, starts: Tensor, *, needs_blocks: bool
) -> None:
    """Check the arguments of a copy that memory is read and written by.

    Args:
        needs_blocks: There are no negative ones.

    Raises:
        TypeError: A vector is not a whole number of words, or the tables do not belong together.
        IndexError: A block is outside of the memory, or a chunk of the pool.
    """
    num_layers, num_planes, num_heads, block_size, head_dim = kv.shape[1:]
    if head_dim * kv.element_size() % 4:
        raise TypeError(f"a vector of {head_dim} {kv.dtype} is no whole number of 32-bit words")
    if starts.shape != (len(blocks), num_heads):
        raise TypeError(f"got starts {starts.shape} for blocks {blocks.shape} and {kv.shape}")
    if needs_blocks and bool((blocks < 0).any()):
        raise IndexError("a chunk has no block to be copied from")
    size = num_layers * num_planes * blocks.shape[1] * block_size * head_dim * kv.element_size()
    is_outside = (starts >= 0) & (starts > len(pool) - size)
    if bool((blocks >= len(kv)).any()) or bool(is_outside.any()):
        raise IndexError("a block is outside of the memory, or a chunk of the pool")


def _zeros(kv: Tensor, blocks: Tensor) -> Tensor:
    return torch.zeros((len(blocks), kv.shape[1], kv.shape[3]), dtype=torch.int64)


def _bodies(
    kv: Tensor, blocks: Tensor, pool: Tensor, starts: Tensor
) -> Iterator[tuple[int, int, Tensor]]:
    """Chunks, heads, and where these lie: ``[L, P, blocks, block_size, bytes of a vector]``."""
    _, num_layers, num_planes, _, block_size, head_dim = kv.shape
    shape = (num_layers, num_planes, blocks.shape[1], block_size, head_dim * kv.element_size())
    size = torch.Size(shape).numel()
    for chunk, head in (starts >= 0).nonzero().tolist():
        start = int(starts[chunk, head])
        yield chunk, head, pool[start : start + size].view(shape)


def _digests(body: Tensor, constants: Tensor, keys: Tensor) -> Tensor:
    """``[L]``, of one head of a chunk."""
    row = body.flatten(2, 3)[None, :, :, None]
    spans = torch.tensor([[0, 0, 0, row.shape[4], 0]])
    return kv_digests(row, spans, constants, keys[:, :, None], 1)[0, :, 0]
