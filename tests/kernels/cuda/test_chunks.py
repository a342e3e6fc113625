"""Chunks between KV blocks and a pool: the bytes and the digests of every other backend."""

from __future__ import annotations

import pytest
import torch

from pdserve.kernels.backend import KernelBackend
from pdserve.kernels.cases.case import Case
from pdserve.kernels.cases.table import OPERATIONS, OperationSpec
from pdserve.kernels.cuda.backend import load
from pdserve.kernels.cuda.chunks import ChunkCopy, copied
from pdserve.kernels.digest import place_keys, word_constants
from tests.connectors.test_lmcache_slots import HERE, NUM_CHUNKS, THERE, Stage
from tests.kernels.builds import CPU, KERNELS

NAMES = ("gather_chunks", "scatter_chunks")
QUICK = {"tokens_outside", "some_heads", "odd_words", "small_blocks", "kept_blocks"}
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CHUNK = 256
"""Tokens of a chunk, as stores have them."""

POOL_BYTES = (1 << 15) + 16


@pytest.fixture(scope="module")
def kernels() -> KernelBackend:
    return load(CPU, print)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "case", "dtype"),
    [
        pytest.param(
            OPERATIONS[name],
            case,
            dtype,
            id=f"{name}-{case.name}-{dtype}",
            marks=[] if case.name in QUICK and dtype == DTYPES[0] else pytest.mark.matrix,
        )
        for name in NAMES
        for case in OPERATIONS[name].cases()
        for dtype in DTYPES
    ],
)
def test_a_copy_and_its_digests_are_those_of_the_reference(
    kernels: KernelBackend, op: OperationSpec, case: Case, dtype: torch.dtype
) -> None:
    wanted_args, args = case.make(dtype, CPU), case.make(dtype, CPU)
    assert torch.equal(op.of(kernels)(*args), op.reference(*wanted_args))
    for position in op.mutates:
        assert torch.equal(args[position], wanted_args[position])


def a_pool() -> torch.Tensor:
    """Of two chunks, and a little more."""
    return torch.zeros(POOL_BYTES, dtype=torch.uint8)


class Blocks:
    """Two chunks of 256 tokens in blocks of some size, all of a model of one layer."""

    planes, heads, head_dim = 2, 2, 8

    def __init__(self, block_size: int, seed: int) -> None:
        each = CHUNK // block_size
        generator = torch.Generator().manual_seed(seed)
        shape = 2 * each + 1, 1, self.planes, self.heads, block_size, self.head_dim
        self.kv = torch.randn(shape, generator=generator).to(torch.bfloat16)
        self.table = torch.randperm(2 * each + 1, generator=generator)[: 2 * each].view(2, each)

    def tokens(self) -> torch.Tensor:
        return self.kv[self.table.flatten(), 0].permute(1, 2, 0, 3, 4).flatten(2, 3)

    def copy(self, pool: torch.Tensor, first: int = 0) -> ChunkCopy:
        """To or from a pool in which the first head of the first chunk begins somewhere."""
        size = self.planes * CHUNK * self.head_dim * 2
        starts = first + torch.arange(2 * self.heads).view(2, self.heads) * size
        constants = word_constants(CHUNK, self.head_dim // 2)
        keys = place_keys(range(1), self.planes, range(self.heads))
        return ChunkCopy(self.kv, self.table, pool, starts, constants, keys)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("from_size", "to_size"), [(16, 64), pytest.param(64, 16, marks=pytest.mark.matrix)]
)
def test_what_a_cpu_has_saved_is_loaded_into_blocks_of_another_size_and_saved_alike(
    kernels: KernelBackend, from_size: int, to_size: int
) -> None:
    here, there = Blocks(from_size, 1), Blocks(to_size, 2)
    pool, again = a_pool(), a_pool()
    saved = KERNELS.gather_chunks(*here.copy(pool))
    assert torch.equal(kernels.scatter_chunks(*there.copy(pool)), saved)
    assert torch.equal(there.tokens(), here.tokens())
    assert torch.equal(kernels.gather_chunks(*there.copy(again)), saved)
    assert torch.equal(again, pool)


@pytest.mark.slow
def test_a_pool_may_be_larger_than_4_gib() -> None:
    blocks, first = Blocks(64, 1), (5 << 30) - POOL_BYTES
    pool, small = torch.empty(5 << 30, dtype=torch.uint8), a_pool()
    found = copied(blocks.copy(pool, first), to_pool=True)
    assert torch.equal(found, copied(blocks.copy(small), to_pool=True))
    assert torch.equal(pool[first:], small)


@pytest.mark.parametrize("max_programs", [1, 5])
def test_any_number_of_programs_copies_all(max_programs: int) -> None:
    blocks, pool, wanted = Blocks(64, 1), a_pool(), a_pool()
    digests = KERNELS.gather_chunks(*blocks.copy(wanted, 4))
    found = copied(blocks.copy(pool, 4), to_pool=True, max_programs=max_programs)
    assert torch.equal(found, digests)
    assert torch.equal(pool, wanted)


def test_what_does_not_fit_is_refused_before_anything_is_copied(kernels: KernelBackend) -> None:
    copy = Blocks(64, 1).copy(a_pool())
    blocks = copy.blocks.clone()
    blocks[0, 0] = -1
    with pytest.raises(IndexError, match="no block"):
        kernels.gather_chunks(*copy._replace(blocks=blocks))
    with pytest.raises(IndexError, match="outside"):
        kernels.scatter_chunks(*copy._replace(starts=copy.starts + (1 << 14)))
    with pytest.raises(TypeError, match="constants"):
        kernels.gather_chunks(*copy._replace(constants=copy.constants[:255]))
    with pytest.raises(TypeError, match="starts"):
        kernels.gather_chunks(*copy._replace(starts=copy.starts[:, :1].contiguous()))


@pytest.mark.slow
def test_engines_on_cpus_and_on_cuda_load_what_the_others_have_saved(
    kernels: KernelBackend,
) -> None:
    for writer, reader in ((KERNELS, kernels), (kernels, KERNELS)):
        stage = Stage(writer)
        stage.memory = stage.memory_of(reader)
        assert stage.load() == [NUM_CHUNKS] * 3
        assert torch.equal(stage.kv[THERE], stage.kv[HERE])
