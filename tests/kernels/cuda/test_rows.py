"""Norms, activation, rotation, digests and sums over ranks: as their references, row by row."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pdserve.kernels.backend import KernelBackend, NotTakenError
from pdserve.kernels.cases.attention import kv_cache, rope_table
from pdserve.kernels.cases.case import Case
from pdserve.kernels.cases.latent import latent_cache
from pdserve.kernels.cases.table import OPERATIONS, OperationSpec
from pdserve.kernels.cuda.backend import load

# As on a device, an exponential may be infinite.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")

CPU = torch.device("cpu")
NAMES = (
    "rms_norm",
    "add_rms_norm",
    "silu_and_mul",
    "gelu_and_mul",
    "sum_ranks",
    "rope_and_cache",
    "rope_and_latent",
    "kv_digests",
)
DTYPES = (torch.float32, torch.float16)  # the interpreter computes bf16 wrongly
ROWS = [
    pytest.param(
        OPERATIONS[name],
        case,
        dtype,
        id=f"{name}-{case.name}-{dtype}",
        # fp16 has every kernel's casts, too; a chunk has many rows.
        marks=pytest.mark.matrix if case.name == "chunk" or dtype is torch.float32 else [],
    )
    for name in NAMES
    for case in OPERATIONS[name].cases()
    for dtype in DTYPES
]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(scope="module")
def kernels() -> KernelBackend:
    return load(CPU, print)


@pytest.mark.slow
@pytest.mark.parametrize(("op", "case", "dtype"), ROWS)
def test_an_operation_agrees_with_its_reference(
    kernels: KernelBackend, op: OperationSpec, case: Case, dtype: torch.dtype
) -> None:
    wanted_args, args = case.make(dtype, CPU), case.make(dtype, CPU)
    wanted, found = op.reference(*wanted_args), op.of(kernels)(*args)
    _assert_close(op, dtype, found, wanted)
    for position in op.mutates:
        _assert_close(op, dtype, args[position], wanted_args[position])


def _assert_close(op: OperationSpec, dtype: torch.dtype, found: Any, wanted: Any) -> None:
    tolerance = op.tolerance[dtype]
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@dtypes
def test_row_operations_are_the_same_in_any_batch(
    kernels: KernelBackend, dtype: torch.dtype
) -> None:
    x, residual = torch.randn(2, 9, 578, generator=_seeded()).to(dtype)
    weight = torch.randn(578, generator=_seeded()).to(dtype)
    sums = [row.clone() for row in residual.split(1)]
    added = [kernels.add_rms_norm(x[i : i + 1], sums[i], weight, 1e-5) for i in range(len(x))]
    normed = [kernels.rms_norm(row, weight, 1e-5) for row in x.split(1)]
    gated = [kernels.silu_and_mul(row) for row in x.split(1)]
    by_gelu = [kernels.gelu_and_mul(row) for row in x.split(1)]

    assert torch.equal(kernels.add_rms_norm(x, residual, weight, 1e-5), torch.cat(added))
    assert torch.equal(residual, torch.cat(sums))
    assert torch.equal(kernels.rms_norm(x, weight, 1e-5), torch.cat(normed))
    assert torch.equal(kernels.silu_and_mul(x), torch.cat(gated))
    assert torch.equal(kernels.gelu_and_mul(x), torch.cat(by_gelu))


@pytest.mark.slow
@dtypes
def test_heads_are_rotated_the_same_in_any_batch_and_any_block(
    kernels: KernelBackend, dtype: torch.dtype
) -> None:
    tokens, heads, kv_heads, head_dim = 9, 6, 2, 64
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim, generator=_seeded()).to(dtype)
    norm = torch.randn(head_dim, generator=_seeded()).to(dtype)
    at, table = torch.arange(tokens), rope_table(tokens, head_dim, CPU)
    cache = kv_cache(4, kv_heads, 8, head_dim, dtype=dtype, device=CPU)
    slots = torch.randperm(4 * 8, generator=_seeded())[:tokens]
    whole = kernels.rope_and_cache(qkv, at, table, cache, slots, norm, norm, 1e-6)
    for i in range(tokens):
        row = slice(i, i + 1)
        elsewhere = kv_cache(1, kv_heads, 1, head_dim, dtype=dtype, device=CPU)
        one = kernels.rope_and_cache(
            qkv[row], at[row], table, elsewhere, torch.tensor([0]), norm, norm, 1e-6
        )
        assert torch.equal(one, whole[row])
        assert torch.equal(elsewhere[0, :, :, 0], cache[slots[i] // 8, :, :, slots[i] % 8])


@dtypes
def test_a_token_without_a_slot_leaves_the_cache_alone(
    kernels: KernelBackend, dtype: torch.dtype
) -> None:
    nowhere, at, table = torch.full((3,), -1), torch.arange(3), rope_table(3, 32, CPU)
    cache = kv_cache(2, 2, 4, 32, dtype=dtype, device=CPU).fill_(torch.nan)
    qkv = torch.randn(3, 6 * 32).to(dtype)
    found = kernels.rope_and_cache(qkv, at, table, cache, nowhere, None, None, 1e-6)
    assert found.isfinite().all()
    assert cache.isnan().all()
    latents = latent_cache(2, 4, 96, dtype=dtype, device=CPU).fill_(torch.nan)
    q, queries = torch.randn(3, 2, 48).to(dtype), torch.full((3, 2, 96), torch.nan, dtype=dtype)
    latent, norm = torch.randn(3, 96).to(dtype), torch.ones(64, dtype=dtype)
    kernels.rope_and_latent(q, queries, latent, at, table, latents, nowhere, norm, 1e-6)
    assert queries[..., 64:].isfinite().all()
    assert queries[..., :64].isnan().all()
    assert latents.isnan().all()


def test_what_is_not_taken_is_refused_before_anything_is_written(kernels: KernelBackend) -> None:
    x, residual = torch.ones(2, 4, dtype=torch.float64), torch.ones(2, 4, dtype=torch.float64)
    with pytest.raises(NotTakenError, match="float64"):
        kernels.add_rms_norm(x, residual, x[0], 1e-5)
    assert (residual == 1).all()
    with pytest.raises(NotTakenError, match="32768"):
        kernels.rms_norm(torch.ones(1, 40000), torch.ones(40000), 1e-5)
    with pytest.raises(TypeError, match="contiguous"):
        kernels.silu_and_mul(torch.ones(8, 4).T)


def test_a_span_outside_of_the_memory_is_refused(kernels: KernelBackend) -> None:
    kv, table, constants, keys, rows = OPERATIONS["kv_digests"].cases()[1].make(torch.float16, CPU)
    table[0, 1] = len(kv)
    with pytest.raises(IndexError):
        kernels.kv_digests(kv, table, constants, keys, rows)


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)
