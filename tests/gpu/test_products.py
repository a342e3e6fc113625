"""Products on CUDA: a row's bits are its own, in any number of rows, at any place, in a graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from pdserve.kernels.reference.moe import RoutingRule
from pdserve.kernels.reference.moe import route as reference_route
from pdserve.kernels.registry import kernels_on

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from pdserve.kernels.reference.moe import PackedExperts

pytestmark = pytest.mark.gpu

# Of every bucket of the tables, and across their borders.
PARTS = [(0, 1), (7, 8), (3, 5), (1, 17), (100, 164), (11, 76), (200, 328), (5, 518), (0, 2047)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def random(device: torch.device, dtype: torch.dtype, *shape: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator(device).manual_seed(sum(shape))
    return (torch.randn(shape, device=device, generator=generator) * scale).to(dtype)


def assert_rows_are_their_own(call: Callable[[Tensor], Tensor], x: Tensor) -> None:
    whole = call(x)
    for first, last in PARTS:
        if last <= len(x):
            part = call(x[first:last].contiguous())
            assert torch.equal(part, whole[first:last]), (first, last)


@dtypes
@pytest.mark.parametrize("shape", [(4096, 4096), (9000, 1536), (100, 577)], ids=str)
def test_a_row_of_a_linear_layer(
    cuda: torch.device, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    n, k = shape
    layer = kernels_on(cuda).linear_of(
        random(cuda, dtype, n, k, scale=k**-0.5), random(cuda, dtype, n)
    )
    assert_rows_are_their_own(layer, random(cuda, dtype, 2048, k))


@dtypes
def test_a_row_of_logits_in_fp32(cuda: torch.device, dtype: torch.dtype) -> None:
    weight = random(cuda, dtype, 32000, 1024, scale=0.03)
    layer = kernels_on(cuda).linear_of(weight, out_dtype=torch.float32)
    x = random(cuda, dtype, 600, 1024)
    assert_rows_are_their_own(layer, x)
    exact = x[:8].double() @ weight.double().T
    torch.testing.assert_close(layer(x[:8]).double(), exact, rtol=1e-4, atol=1e-4)


@dtypes
def test_a_row_of_heads(cuda: torch.device, dtype: torch.dtype) -> None:
    heads = kernels_on(cuda).heads(random(cuda, dtype, 16, 512, 128, scale=0.1))
    assert_rows_are_their_own(heads, random(cuda, dtype, 600, 16, 128))


@dtypes
def test_a_product_with_its_activation(cuda: torch.device, dtype: torch.dtype) -> None:
    # Not interpreted: where there is no device, other tests are the first to import it.
    from pdserve.kernels.cuda.linear import CudaLinear

    kernels = kernels_on(cuda)
    layer = kernels.linear_of(random(cuda, dtype, 3000, 512, scale=0.05))
    assert isinstance(layer, CudaLinear)
    x = random(cuda, dtype, 600, 512)
    assert torch.equal(layer.call_gated(x), kernels.silu_and_mul(layer(x)))
    assert_rows_are_their_own(layer.call_gated, x)


def experts_on(device: torch.device, dtype: torch.dtype) -> PackedExperts:
    num_experts, width, inner = 8, 512, 384
    layer = kernels_on(device).experts(num_experts, width, inner, dtype=dtype, device=device)
    for expert in range(num_experts):
        layer.write_gate(
            expert, random(device, dtype, inner, width + expert, scale=0.05)[:, :width]
        )
        layer.write_up(expert, random(device, dtype, inner + expert, width, scale=0.05)[:inner])
        layer.write_down(expert, random(device, dtype, width + expert, inner, scale=0.05)[:width])
    return layer


@dtypes
def test_what_experts_make_of_a_token(cuda: torch.device, dtype: torch.dtype) -> None:
    layer = experts_on(cuda, dtype)
    generator = torch.Generator(cuda).manual_seed(1)
    ids = torch.rand(2048, 8, device=cuda, generator=generator).argsort(1)[:, :2].contiguous()
    weights = torch.rand(2048, 2, device=cuda, generator=generator)
    x = random(cuda, dtype, 2048, 512)
    whole = layer(x, ids, weights)
    for first, last in PARTS:
        part = layer(x[first:last], ids[first:last], weights[first:last])
        assert torch.equal(part, whole[first:last]), (first, last)


@pytest.mark.parametrize(
    "rule",
    [
        RoutingRule(2, normalize=True),
        RoutingRule(
            8,
            sigmoid=True,
            normalize=True,
            scale=2.5,
            num_groups=8,
            top_k_groups=4,
            rank_groups_by_two=True,
        ),
    ],
    ids=["mixtral", "deepseek_v3"],
)
def test_a_router_chooses_as_on_a_cpu(cuda: torch.device, rule: RoutingRule) -> None:
    num_experts = 8 if rule.top_k == 2 else 256
    logits = random(cuda, torch.float32, 500, num_experts)
    route = kernels_on(cuda).route
    ids, weights = route(logits, None, rule)
    expected_ids, expected = reference_route(logits.cpu(), None, rule)
    # Scores an ulp apart may be in another order: exp differs in the last bits.
    assert (ids.cpu() == expected_ids).all(1).float().mean() > 0.99
    torch.testing.assert_close(weights.cpu(), expected, rtol=1e-4, atol=1e-6)
    for first, last in PARTS[:6]:
        part_ids, part = route(logits[first:last].contiguous(), None, rule)
        assert torch.equal(part_ids, ids[first:last])
        assert torch.equal(part, weights[first:last])


def test_a_graph_gives_the_bits_of_eager_calls(cuda: torch.device) -> None:
    layer = kernels_on(cuda).linear_of(random(cuda, torch.bfloat16, 512, 512, scale=0.05))
    experts = experts_on(cuda, torch.bfloat16)
    rule = RoutingRule(2, normalize=True)
    x = random(cuda, torch.bfloat16, 5, 512)
    logits = random(cuda, torch.float32, 5, 8)

    def step() -> Tensor:
        ids, weights = kernels_on(cuda).route(logits, None, rule)
        return experts(layer(x), ids, weights)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for seed in range(3):
        x.copy_(random(cuda, torch.bfloat16, 5, 512 + seed)[:, :512])
        logits.copy_(random(cuda, torch.float32, 5 + seed, 8)[:5])
        graph.replay()
        assert torch.equal(out, step())


@pytest.mark.parametrize("num_rows", [1, 40, 100, 300])
def test_products_that_overlap_wait_for_what_they_read(cuda: torch.device, num_rows: int) -> None:
    from pdserve.kernels.cuda.launch import without_overlap

    kernels = kernels_on(cuda)
    width = 1024
    layers = [
        kernels.linear_of(random(cuda, torch.bfloat16, width, width + i, scale=0.03)[:, :width])
        for i in range(8)
    ]
    norm = torch.ones(width, device=cuda, dtype=torch.bfloat16)
    x = random(cuda, torch.bfloat16, num_rows, width)

    def step() -> Tensor:
        found = x
        for i in range(40):
            found = layers[i % 8](found)
            if i % 3:
                found = kernels.rms_norm(found, norm, 1e-5)
        return found

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for seed in range(5):
        x.copy_(random(cuda, torch.bfloat16, num_rows, width + seed)[:, :width])
        with without_overlap():
            expected = step()
        assert torch.equal(step(), expected)
        graph.replay()
        assert torch.equal(out, expected)
