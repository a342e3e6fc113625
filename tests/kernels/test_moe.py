"""Packed experts and heads: loading, moving, and what they refuse."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pdserve.errors import InternalError
from pdserve.kernels.backend import REFERENCE, KernelBackend
from pdserve.kernels.cases.attention import rope_table
from pdserve.kernels.cases.latent import latent_cache, latent_inputs
from pdserve.kernels.reference import moe
from pdserve.kernels.reference.mla import head_linear
from pdserve.kernels.reference.moe import PackedExperts
from tests.kernels.builds import CPU, KERNELS, needs_native

implementations = pytest.mark.parametrize(
    "kernels", [pytest.param(KERNELS, marks=needs_native), REFERENCE], ids=["native", "torch"]
)
WIDTH, INNER = 40, 24


def packed(
    num_experts: int, dtype: torch.dtype = torch.float32, kernels: KernelBackend = KERNELS
) -> tuple[PackedExperts, Tensor]:
    """Random experts, and their gate, up and down, `[E, 3, I, D]`."""
    weights = torch.randn(num_experts, 3, INNER, WIDTH) / WIDTH**0.5
    experts = kernels.experts(num_experts, WIDTH, INNER, dtype=dtype, device=CPU)
    for expert, (gate, up, down) in enumerate(weights):
        # In an order that checkpoints have.
        experts.write_down(expert, down.T)
        experts.write_gate(expert, gate)
        experts.write_up(expert, up)
    return experts, weights


@implementations
def test_experts_compute_what_the_reference_does(kernels: KernelBackend) -> None:
    experts, weights = packed(3, kernels=kernels)
    x, ids, factors = torch.randn(7, WIDTH), torch.randint(-1, 3, (7, 2)), torch.rand(7, 2)
    gate_up, down = weights[:, :2].flatten(1, 2), weights[:, 2].transpose(1, 2)

    expected = moe.experts(x, ids, factors, gate_up, down)
    torch.testing.assert_close(experts(x, ids, factors), expected, rtol=1e-4, atol=1e-4)


@implementations
def test_bytes_of_an_expert_make_it_elsewhere(kernels: KernelBackend) -> None:
    source, _ = packed(2, torch.bfloat16, kernels)
    target, _ = packed(3, torch.bfloat16, kernels)
    x, factors = torch.randn(5, WIDTH).bfloat16(), torch.rand(5, 1)
    untouched = target(x, torch.ones(5, 1).long(), factors)
    data = source.read(1).clone()
    target.write(2, data)

    assert data.dtype == torch.uint8
    assert data.shape == target.read(2).shape
    moved, original = (
        experts(x, torch.full((5, 1), local), factors)
        for experts, local in ((target, 2), (source, 1))
    )
    assert torch.equal(moved, original)
    assert torch.equal(target(x, torch.ones(5, 1).long(), factors), untouched)


@needs_native
def test_an_expert_that_is_not_there_is_refused() -> None:
    experts, _ = packed(2)
    with pytest.raises(InternalError, match="an id"):
        experts(torch.randn(1, WIDTH), torch.tensor([[2]]), torch.ones(1, 1))


@needs_native
def test_more_rows_than_one_pass_takes_give_the_same() -> None:
    experts, _ = packed(2)
    x, ids, factors = torch.randn(80_000, WIDTH), torch.tensor([[1, 0]]), torch.rand(1, 2)
    whole = experts(x, ids.repeat(80_000, 1), factors.repeat(80_000, 1))
    part = experts(x[-70:], ids.repeat(70, 1), factors.repeat(70, 1))

    assert torch.equal(whole[-70:], part)


@implementations
def test_heads_write_between_what_lies_there(kernels: KernelBackend) -> None:
    x, weight = torch.randn(5, 3, 20)[..., :16], torch.randn(3, 24, 16)
    out = torch.full((5, 3, 40), 7.0)
    result = kernels.heads(weight)(x, out[..., :24])

    torch.testing.assert_close(result, head_linear(x, weight), rtol=1e-4, atol=1e-4)
    assert (out[..., 24:] == 7).all()


@pytest.mark.parametrize(
    "x",
    [torch.ones(2, 3, 4), torch.ones(2, 2, 5), torch.ones(2, 2, 4).half()],
    ids=["heads", "depth", "dtype"],
)
def test_heads_of_another_shape_are_refused(x: Tensor) -> None:
    with pytest.raises(TypeError):
        KERNELS.heads(torch.ones(2, 6, 4))(x)


@needs_native
@pytest.mark.parametrize(("position", "slot"), [(20, 0), (-1, 0), (0, 64)])
def test_positions_and_slots_of_latents_out_of_range_are_refused(position: int, slot: int) -> None:
    cache = latent_cache(4, 16, 48, dtype=torch.float32, device=CPU)
    before = cache.clone()
    with pytest.raises(InternalError):
        KERNELS.rope_and_latent(
            torch.ones(1, 2, 24),
            torch.ones(1, 2, 48),
            torch.ones(1, 48),
            torch.tensor([position]),
            rope_table(20, 16, CPU),
            cache,
            torch.tensor([slot]),
            torch.ones(32),
            1e-5,
        )
    assert torch.equal(cache, before)


@needs_native
def test_garbage_past_the_context_of_latents_changes_nothing() -> None:
    inputs = latent_inputs([1], [37], 4, (32, 16), dtype=torch.bfloat16, device=CPU)
    expected = KERNELS.latent_attention(*inputs)
    inputs[1][inputs[2][0, 2], :, :, 37 % 16 :] = float("nan")

    assert torch.equal(KERNELS.latent_attention(*inputs), expected)
