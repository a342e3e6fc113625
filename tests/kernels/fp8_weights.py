"""Weights in FP8 for tests, and layers that keep them beside layers of the same, widened."""

from __future__ import annotations

import torch
from torch import Tensor

from pdserve.kernels.backend import KernelBackend
from pdserve.kernels.fp8 import WHOLE_ROW, Fp8Weight
from pdserve.kernels.reference.linear import PackedLinear
from pdserve.kernels.reference.moe import PackedExperts

CPU = torch.device("cpu")


def scaled(num_rows: int, depth: int, run: int = WHOLE_ROW) -> Fp8Weight:
    """Return a random weight, subnormal numbers and both zeros among its numbers."""
    numbers = torch.randn(num_rows, depth).mul_(8).to(torch.float8_e4m3fn)
    numbers.view(torch.uint8)[:, :: max(1, depth // 3)] = torch.tensor([[0x80], [0x03]]).repeat(
        num_rows // 2 + 1, 1
    )[:num_rows]
    num_runs = max(1, -(-depth // run))
    return Fp8Weight(numbers, torch.rand(num_rows, num_runs) * 0.01 + 1e-4, run)


def part(weight: Fp8Weight, rows: slice) -> Fp8Weight:
    """Return some rows."""
    return Fp8Weight(weight.numbers[rows], weight.scales[rows], weight.run)


def linears(
    kernels: KernelBackend, weight: Fp8Weight, dtype: torch.dtype
) -> tuple[PackedLinear, PackedLinear]:
    """Return a layer that was given a weight in FP8, in two pieces, and one with the widened."""
    kept, widened = (
        kernels.linear(*weight.numbers.shape, dtype=dtype, device=CPU, has_bias=True)
        for _ in range(2)
    )
    cut, bias = len(weight.numbers) // 3, torch.randn(len(weight.numbers))
    for rows in (slice(0, cut), slice(cut, None)):
        kept.write(rows.start, part(weight, rows))
        widened.write(rows.start, part(weight, rows).widened(dtype))
    for layer in (kept, widened):
        layer.write_bias(0, bias)
    return kept, widened


def experts(
    kernels: KernelBackend, sizes: tuple[int, int, int], run: int, dtype: torch.dtype
) -> tuple[PackedExperts, PackedExperts]:
    """Return experts that were given weights in FP8, and the same with the widened.

    Args:
        sizes: Number of experts, width and inner width.
    """
    num_experts, width, inner = sizes
    kept, widened = (
        kernels.experts(num_experts, width, inner, dtype=dtype, device=CPU) for _ in range(2)
    )
    for expert in range(num_experts):
        for shape, name in (
            ((inner, width), "write_gate"),
            ((inner, width), "write_up"),
            ((width, inner), "write_down"),
        ):
            weight = scaled(*shape, run)
            getattr(kept, name)(expert, weight)
            getattr(widened, name)(expert, weight.widened(dtype))
    return kept, widened


def routed(num_tokens: int, num_experts: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs of experts, of which each token has two."""
    ids = torch.stack([torch.randperm(num_experts)[:2] for _ in range(num_tokens)])
    return torch.randn(num_tokens, width), ids, torch.rand(num_tokens, 2)
