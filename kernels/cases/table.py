"""Every operation, with inputs on which backends must match the reference, and tolerances.

A `Case` makes its arguments anew at each call, always the same values, so that operations that
write to their arguments can be compared. Used by tests and benchmarks only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from pdserve.kernels.backend import KernelBackend
from pdserve.kernels.cases import attention, chunks, latent, moe, rows
from pdserve.kernels.cases.case import Case
from pdserve.kernels.ops import Ops
from pdserve.kernels.reference import linear as products
from pdserve.kernels.reference import mla
from pdserve.kernels.reference import moe as experts
from pdserve.kernels.reference.activation import ClampedGlu

_ELEMENTWISE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
_EXACT = dict.fromkeys(_ELEMENTWISE, 0.0)
_ACCUMULATED = {torch.float32: 5e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class OperationSpec:
    """One operation, and what its implementations must agree on.

    Attributes:
        name: As in `OPERATIONS`.
        reference: Defines the result, on any device.
        of: The same as a function of one backend.
        cases: Named inputs.
        tolerance: Largest difference from the reference per dtype, relative and absolute alike.
        mutates: Positions of the arguments that the operation writes.
    """

    name: str
    reference: Callable[..., Any]
    of: Callable[[KernelBackend], Callable[..., Any]]
    cases: Callable[[], list[Case]]
    tolerance: dict[torch.dtype, float]
    mutates: tuple[int, ...] = ()


def _linear(kernels: KernelBackend) -> Callable[..., Tensor]:
    def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return kernels.linear_of(weight, bias)(x)

    return run


def _heads(kernels: KernelBackend) -> Callable[..., Tensor]:
    def run(x: Tensor, weight: Tensor) -> Tensor:
        return kernels.heads(weight)(x)

    return run


def _experts(kernels: KernelBackend) -> Callable[..., Tensor]:
    def run(
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
        biases: tuple[Tensor, Tensor] | None,
        glu: ClampedGlu | None,
    ) -> Tensor:
        num_experts, width, inner = down.shape
        form = experts.ExpertForm(biases is not None, glu)
        layer = kernels.experts(
            num_experts, width, inner, dtype=x.dtype, device=x.device, form=form
        )
        for expert in range(num_experts):
            layer.write_gate(expert, gate_up[expert, :inner])
            layer.write_up(expert, gate_up[expert, inner:])
            layer.write_down(expert, down[expert])
            if biases is not None:
                gate, up = biases[0][expert].chunk(2)
                layer.write_gate_bias(expert, gate)
                layer.write_up_bias(expert, up)
                layer.write_down_bias(expert, biases[1][expert])
        return layer(x, ids, weights)

    return run


def _op(
    name: str,
    cases: Callable[[], list[Case]],
    tolerance: dict[torch.dtype, float],
    *mutates: int,
) -> OperationSpec:
    of = attrgetter(name)
    return OperationSpec(name, of(Ops()), of, cases, tolerance, mutates)


OPERATIONS: dict[str, OperationSpec] = {
    operation.name: operation
    for operation in (
        OperationSpec("linear", products.linear, _linear, rows.linear, _ACCUMULATED),
        OperationSpec("head_linear", mla.head_linear, _heads, latent.head_linear, _ACCUMULATED),
        OperationSpec("experts", experts.experts, _experts, moe.experts, _ACCUMULATED),
        _op("rms_norm", rows.rms_norm, _ELEMENTWISE),
        _op("add_rms_norm", rows.add_rms_norm, _ELEMENTWISE, 1),
        _op("silu_and_mul", rows.gated, _ELEMENTWISE),
        _op("gelu_and_mul", rows.gated, _ELEMENTWISE),
        _op("sum_ranks", rows.sum_ranks, _EXACT),
        _op("rope_and_cache", attention.rope_and_cache, _ELEMENTWISE, 3),
        _op("paged_attention", attention.paged_attention, _ACCUMULATED),
        _op("route", moe.route, _ELEMENTWISE),
        _op("rope_and_latent", latent.rope_and_latent, _ELEMENTWISE, 1, 5),
        _op("latent_attention", latent.latent_attention, _ACCUMULATED),
        _op("kv_digests", attention.kv_digests, _EXACT),
        _op("gather_chunks", chunks.gather_chunks, _EXACT, 2),
        _op("scatter_chunks", chunks.scatter_chunks, _EXACT, 0),
    )
}
