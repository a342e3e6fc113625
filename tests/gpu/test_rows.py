"""Row operations and copies on the device: each row by itself, and captured in a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pdserve.kernels.cases.attention import kv_cache, rope_table
from pdserve.kernels.registry import kernels_on

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def random(cuda: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator(cuda).manual_seed(5)
    return torch.randn(shape, generator=generator, device=cuda).to(dtype)


@dtypes
@pytest.mark.parametrize("width", [578, 4096, 16384])
def test_rows_are_the_same_in_any_batch(cuda: torch.device, dtype: torch.dtype, width: int) -> None:
    kernels = kernels_on(cuda)
    x, residual = random(cuda, dtype, 2, 131, width)
    weight = random(cuda, dtype, width)
    sums = [row.clone() for row in residual.split(1)]
    added = [kernels.add_rms_norm(x[i : i + 1], sums[i], weight, 1e-5) for i in range(len(x))]
    normed = [kernels.rms_norm(row, weight, 1e-5) for row in x.split(1)]
    gated = [kernels.silu_and_mul(row) for row in x.split(1)]

    assert torch.equal(kernels.add_rms_norm(x, residual, weight, 1e-5), torch.cat(added))
    assert torch.equal(residual, torch.cat(sums))
    assert torch.equal(kernels.rms_norm(x, weight, 1e-5), torch.cat(normed))
    assert torch.equal(kernels.silu_and_mul(x), torch.cat(gated))


@dtypes
def test_heads_are_rotated_the_same_in_any_batch_and_any_block(
    cuda: torch.device, dtype: torch.dtype
) -> None:
    kernels = kernels_on(cuda)
    tokens, heads, kv_heads, head_dim = 90, 32, 8, 128
    qkv = random(cuda, dtype, tokens, (heads + 2 * kv_heads) * head_dim)
    norm = random(cuda, dtype, head_dim)
    at, table = torch.arange(tokens, device=cuda), rope_table(tokens, head_dim, cuda)
    cache = kv_cache(8, kv_heads, 16, head_dim, dtype=dtype, device=cuda)
    slots = torch.randperm(8 * 16, device=cuda)[:tokens]
    whole = kernels.rope_and_cache(qkv, at, table, cache, slots, norm, norm, 1e-6)
    elsewhere = kv_cache(2, kv_heads, 64, head_dim, dtype=dtype, device=cuda)
    alone = [
        kernels.rope_and_cache(
            qkv[i : i + 1], at[i : i + 1], table, elsewhere, at[i : i + 1], norm, norm, 1e-6
        )
        for i in range(tokens)
    ]

    assert torch.equal(torch.cat(alone), whole)
    found = elsewhere.transpose(2, 3).transpose(1, 2).flatten(0, 1)[:tokens]
    wanted = cache.transpose(2, 3).transpose(1, 2).flatten(0, 1)[slots]
    assert torch.equal(found, wanted)


def test_a_graph_replays_what_was_captured(cuda: torch.device) -> None:
    kernels, dtype = kernels_on(cuda), torch.bfloat16
    x, residual, weight = (random(cuda, dtype, *shape) for shape in ((3, 64), (3, 64), (64,)))
    table = rope_table(64, 64, cuda)
    cache = kv_cache(4, 1, 16, 64, dtype=dtype, device=cuda)
    qkv = random(cuda, dtype, 3, 4 * 64)
    places = torch.tensor([5, 9, 33], device=cuda)

    def step() -> tuple[Tensor, ...]:
        q = kernels.rope_and_cache(qkv, places, table, cache, places, None, None, 1e-6)
        return q, kernels.add_rms_norm(x, residual, weight, 1e-5), kernels.silu_and_mul(qkv)

    assert _equal_when_replayed(step, [x, residual, qkv, cache])


def _equal_when_replayed(step: Callable[[], tuple[Tensor, ...]], inputs: list[Any]) -> bool:
    """Whether a replay, of inputs that changed since it was captured, equals a call."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for tensor in inputs:
        tensor.copy_(torch.randn_like(tensor))
    before = [tensor.clone() for tensor in inputs]
    graph.replay()
    after = [tensor.clone() for tensor in inputs]
    for tensor, old in zip(inputs, before, strict=True):
        tensor.copy_(old)
    wanted = step()
    pairs = [*zip(results, wanted, strict=True), *zip(after, inputs, strict=True)]
    return all(torch.equal(found, want) for found, want in pairs)
