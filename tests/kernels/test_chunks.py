"""Chunks between blocks and a pool: only what is named is written, digests are of what passes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pdserve.errors import InternalError
from pdserve.kernels.backend import REFERENCE, KernelBackend
from pdserve.kernels.digest import place_keys, word_constants
from tests.kernels.builds import KERNELS

LAYERS, PLANES, HEADS, VECTOR_BYTES = 2, 2, 3, 40
CHUNK = 48
BODY_BYTES = LAYERS * PLANES * CHUNK * VECTOR_BYTES
CONSTANTS = word_constants(CHUNK, VECTOR_BYTES // 4)
KEYS = place_keys(range(LAYERS), PLANES, range(HEADS))
STARTS = torch.arange(2 * HEADS).view(2, HEADS) * BODY_BYTES

each_backend = pytest.mark.parametrize("kernels", [KERNELS, REFERENCE], ids=["here", "reference"])


def memory(block_size: int, seed: int = 0) -> Tensor:
    """Blocks of random bytes in which four chunks have room."""
    generator = torch.Generator().manual_seed(seed)
    shape = (4 * CHUNK // block_size, LAYERS, PLANES, HEADS, block_size, VECTOR_BYTES)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def table(block_size: int, seed: int = 0) -> Tensor:
    """Blocks of two chunks."""
    each = CHUNK // block_size
    order = torch.randperm(4 * each, generator=torch.Generator().manual_seed(seed))
    return order[: 2 * each].view(2, each)


def a_pool() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 256, (2 * HEADS * BODY_BYTES,), generator=generator, dtype=torch.uint8)


def by_token(kv: Tensor, blocks: Tensor) -> Tensor:
    """`[layers, planes, heads, tokens, bytes]`."""
    return kv[blocks.flatten()].permute(1, 2, 3, 0, 4, 5).flatten(3, 4)


@each_backend
def test_what_was_gathered_is_scattered_into_blocks_of_another_size_with_the_same_digests(
    kernels: KernelBackend,
) -> None:
    here, there, pool = memory(16), memory(8, seed=1), a_pool()
    blocks, others = table(16), table(8, seed=1)
    saved = kernels.gather_chunks(here, blocks, pool, STARTS, CONSTANTS, KEYS)
    loaded = kernels.scatter_chunks(there, others, pool, STARTS, CONSTANTS, KEYS)

    assert torch.equal(saved, loaded)
    assert torch.equal(by_token(there, others), by_token(here, blocks))


@each_backend
@pytest.mark.parametrize("tokens_outside", [False, True])
def test_digests_of_chunks_are_those_of_their_blocks(
    kernels: KernelBackend, tokens_outside: bool
) -> None:
    kv, blocks = memory(16), table(16)
    if tokens_outside:
        kv = kv.transpose(3, 4).contiguous().transpose(3, 4)
    spans = torch.tensor(
        [[c, int(blocks[c, i]), 0, 16, 16 * i] for c in range(2) for i in range(blocks.shape[1])]
    )
    expected = REFERENCE.kv_digests(kv, spans, CONSTANTS, KEYS, 2)

    found = kernels.gather_chunks(kv, blocks, a_pool(), STARTS, CONSTANTS, KEYS)
    assert torch.equal(found, expected)


@each_backend
def test_only_the_blocks_layers_and_heads_that_are_named_are_written(
    kernels: KernelBackend,
) -> None:
    whole, before, blocks, pool = memory(16), memory(16), table(16), a_pool()
    blocks[0, 1] = -1
    share, starts = whole[:, 1:, :, 1:], STARTS[:, 1:].contiguous()
    keys = KEYS[1:, :, 1:].contiguous()
    found = kernels.scatter_chunks(share, blocks, pool, starts, CONSTANTS, keys)

    written = blocks[blocks >= 0]
    assert (share[written] != before[written][:, 1:, :, 1:]).any()
    whole[written, 1:, :, 1:] = before[written, 1:, :, 1:]
    assert torch.equal(whole, before)
    blocks[0, 1] = 11  # what is kept counts as if it were loaded
    anywhere = memory(16)[:, 1:, :, 1:]
    assert torch.equal(
        found, kernels.scatter_chunks(anywhere, blocks, pool, starts, CONSTANTS, keys)
    )


@each_backend
def test_nothing_of_the_pool_is_written_but_the_heads_that_are_named(
    kernels: KernelBackend,
) -> None:
    starts, pool, before = STARTS.clone(), a_pool(), a_pool()
    starts[0, 2] = starts[1, 0] = -1
    found = kernels.gather_chunks(memory(16), table(16), pool, starts, CONSTANTS, KEYS)

    between = slice(2 * BODY_BYTES, 4 * BODY_BYTES)
    assert torch.equal(pool[between], before[between])
    assert not found[0, :, 2].any()
    assert not found[1, :, 0].any()
    assert (pool != before).any()


@each_backend
@pytest.mark.parametrize("shift", [0, 4])
def test_a_chunk_is_the_same_alone_and_wherever_it_lies(kernels: KernelBackend, shift: int) -> None:
    kv, blocks, pool = memory(16), table(16), a_pool()
    together = kernels.gather_chunks(kv, blocks, pool, STARTS, CONSTANTS, KEYS)
    for chunk in range(2):
        for head in range(HEADS):
            part = kv[:, :, :, head : head + 1]
            keys = KEYS[:, :, head : head + 1].contiguous()
            alone = torch.zeros(BODY_BYTES + shift, dtype=torch.uint8)
            start = torch.tensor([[shift]])
            table_of_one = blocks[chunk : chunk + 1]
            found = kernels.gather_chunks(part, table_of_one, alone, start, CONSTANTS, keys)
            assert torch.equal(found[0, :, 0], together[chunk, :, head])
            there = int(STARTS[chunk, head])
            assert torch.equal(alone[shift:], pool[there : there + BODY_BYTES])


@each_backend
def test_any_bit_that_differs_changes_the_digest_of_its_layer(kernels: KernelBackend) -> None:
    pool, blocks = a_pool(), table(16)
    before = kernels.scatter_chunks(memory(16), blocks, pool, STARTS, CONSTANTS, KEYS)
    for bit in range(0, 8 * BODY_BYTES, 8 * 157 + 3):
        pool[bit // 8] ^= 1 << bit % 8
        found = kernels.scatter_chunks(memory(16), blocks, pool, STARTS, CONSTANTS, KEYS)
        pool[bit // 8] ^= 1 << bit % 8
        layer = bit // (8 * BODY_BYTES // LAYERS)
        assert (found != before).nonzero().tolist() == [[0, layer, 0]]


@each_backend
@pytest.mark.parametrize(
    ("block", "start"), [(12, 0), (-1, 0), (0, len(a_pool()) - BODY_BYTES + 4)]
)
def test_what_is_outside_of_memory_or_pool_is_refused_and_nothing_is_written(
    kernels: KernelBackend, block: int, start: int
) -> None:
    kv, pool, blocks, starts = memory(16), a_pool(), table(16), STARTS.clone()
    blocks[1, 2], starts[1, 2] = block, start
    with pytest.raises((InternalError, IndexError)):
        kernels.gather_chunks(kv, blocks, pool, starts, CONSTANTS, KEYS)
    if block >= 0:
        with pytest.raises((InternalError, IndexError)):
            kernels.scatter_chunks(kv, blocks, pool, starts, CONSTANTS, KEYS)

    assert torch.equal(kv, memory(16))
    assert torch.equal(pool, a_pool())
