"""The operations of a model's step, and which implementation runs them where.

Every operation is an `Op`: callable like a function, with a pure torch ``reference``, a ``cpu``
implementation (C++, built at first use; see ``cpu/build.py``), the input ``cases`` that all of them
must agree on, and the ``tolerance`` of that agreement. A call is dispatched by the device of its
first argument: the CPU kernels where they can be built and take its shape, else the reference.

    linear(x, weight, bias)                          [M, K] -> [M, N]
    PackedLinear(weight, bias, out_dtype=)(x, out=)  [M, K] -> [M, N]; for a weight used often
    rms_norm(x, weight, eps)                         [T, D] -> [T, D]
    add_rms_norm(x, residual, weight, eps)           [T, D] -> [T, D]; residual += x, in place
    silu_and_mul(x)                                  [T, 2 * I] -> [T, I]
    rope_and_cache(qkv, positions, cos_sin,          [T, (H + 2 * Hkv) * Dh] -> [T, H, Dh]
        kv_layer, slot_mapping,                      writes k and v into kv_layer
        q_norm, k_norm, eps)
    paged_attention(q, kv_layer, block_tables,       [T, H, Dh] -> [T, H * Dh]
        query_start, context_lens, scale, window)
    route(logits, bias, rule)                        [T, E] -> ids and weights, [T, k] each
    experts(x, ids, weights, gate_up, down)          [T, D] -> [T, D]
    PackedExperts(...)(x, ids, weights)              likewise; for experts used often
    head_linear(x, weight)                           [T, H, K] -> [T, H, N]
    PackedHeads(weight)(x, out=)                     likewise; for weights used often
    rope_and_latent(q, queries, latent, positions,   writes the last elements of queries, and the
        cos_sin, kv_layer, slot_mapping, norm, eps)  latent and its key into kv_layer
    latent_attention(q, kv_layer, block_tables,      [T, H, R + P] -> [T, H, R]
        query_start, context_lens, scale, latent_dim)
    kv_digests(kv, spans, constants, keys, num_rows) [num_blocks, L, P, H, block_size, Dh]
                                                     -> [num_rows, L, H]; bit for bit

``T`` is the number of tokens of a step, over all its requests. Tensors are contiguous, of one dtype
(bf16, fp16 or fp32) and on one device; ``kv_layer`` is the view ``kv[:, layer]`` of ``[num_blocks,
num_layers, 2, Hkv, block_size, Dh]`` (of latents: ``[num_blocks, num_layers, 1, 1, block_size, R +
P]``), hence strided over blocks. The reference functions document
each argument. `pdserve.kernels.halves` does the same work in two calls per layer, which is what a
decode step of few tokens should use.

The CPU kernels are *batch invariant*, bit for bit: a row of any result depends on that row's own
inputs alone, not on the other rows, their number, the number of threads, the chunks a prompt was
cut in, or the ids of the blocks. Each element has one accumulation order, fixed by K or by the
positions of the context. That is what makes the tokens of disaggregated and of colocated serving
the same. The reference promises no such thing. The number of threads is
``torch.get_num_threads()``, read at every call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Concatenate, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from pdserve.kernels import cases
from pdserve.kernels.cases import Case
from pdserve.kernels.cpu import native
from pdserve.kernels.cpu.native import NativeKernels
from pdserve.kernels.linear import PackedLinear
from pdserve.kernels.mla import PackedHeads
from pdserve.kernels.moe import PackedExperts, RoutingRule
from pdserve.kernels.reference import activation, attention, digest, mla, moe, norm, rope
from pdserve.kernels.reference import linear as products

__all__ = [
    "OPS",
    "Op",
    "PackedExperts",
    "PackedHeads",
    "PackedLinear",
    "RoutingRule",
    "add_rms_norm",
    "experts",
    "head_linear",
    "kv_digests",
    "latent_attention",
    "linear",
    "paged_attention",
    "rms_norm",
    "rope_and_cache",
    "rope_and_latent",
    "route",
    "silu_and_mul",
]

P = ParamSpec("P")
R_co = TypeVar("R_co", bound=Tensor | tuple[Tensor, ...], covariant=True)

_ELEMENTWISE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
_EXACT = dict.fromkeys(_ELEMENTWISE, 0.0)
_ACCUMULATED = {torch.float32: 5e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Op(Generic[P, R_co]):
    """One operation, its implementations, and what they must agree on.

    Attributes:
        name: As in `OPS`.
        reference: Defines the result, on any device.
        cpu: The same on a CPU with native kernels, which are its first argument.
        cases: Named inputs for tests and benchmarks.
        tolerance: Largest difference from the reference per dtype, relative and absolute alike.
        mutates: Positions of the arguments that the operation writes.
        takes: Whether ``cpu`` takes a call; what it does not take is the reference's.
    """

    name: str
    reference: Callable[Concatenate[Tensor, P], R_co]
    cpu: Callable[Concatenate[NativeKernels, Tensor, P], R_co]
    cases: Callable[[], list[Case]]
    tolerance: dict[torch.dtype, float]
    mutates: tuple[int, ...] = ()
    takes: Callable[Concatenate[Tensor, P], bool] | None = None

    def __call__(self, first: Tensor, /, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Run the implementation for the device of ``first``."""
        if first.is_cpu and (self.takes is None or self.takes(first, *args, **kwargs)):
            return self.on_cpu(first, *args, **kwargs)
        return self.reference(first, *args, **kwargs)

    @cached_property
    def on_cpu(self) -> Callable[Concatenate[Tensor, P], R_co]:
        """The native implementation if there is one here, else the reference."""
        kernels = native.kernels()
        return self.reference if kernels is None else partial(self.cpu, kernels)


def _takes_heads(
    q: Tensor,
    kv_layer: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    scale: float,
    window: int | None = None,
) -> bool:
    return native.takes_attention(q.shape[2], q.shape[2], kv_layer.shape[3])


def _takes_latents(
    q: Tensor,
    kv_layer: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    scale: float,
    latent_dim: int,
) -> bool:
    return native.takes_attention(q.shape[2], latent_dim, kv_layer.shape[3])


linear = Op("linear", products.linear, NativeKernels.linear, cases.linear, _ACCUMULATED)
rms_norm = Op("rms_norm", norm.rms_norm, NativeKernels.rms_norm, cases.rms_norm, _ELEMENTWISE)
add_rms_norm = Op(
    "add_rms_norm",
    norm.add_rms_norm,
    NativeKernels.add_rms_norm,
    cases.add_rms_norm,
    _ELEMENTWISE,
    mutates=(1,),
)
silu_and_mul = Op(
    "silu_and_mul",
    activation.silu_and_mul,
    NativeKernels.silu_and_mul,
    cases.silu_and_mul,
    _ELEMENTWISE,
)
rope_and_cache = Op(
    "rope_and_cache",
    rope.rope_and_cache,
    NativeKernels.rope_and_cache,
    cases.rope_and_cache,
    _ELEMENTWISE,
    mutates=(3,),
)
paged_attention = Op(
    "paged_attention",
    attention.paged_attention,
    NativeKernels.paged_attention,
    cases.paged_attention,
    _ACCUMULATED,
    takes=_takes_heads,
)
route = Op("route", moe.route, NativeKernels.route, cases.route, _ELEMENTWISE)
experts = Op("experts", moe.experts, NativeKernels.experts, cases.experts, _ACCUMULATED)
head_linear = Op(
    "head_linear", mla.head_linear, NativeKernels.head_linear, cases.head_linear, _ACCUMULATED
)
rope_and_latent = Op(
    "rope_and_latent",
    mla.rope_and_latent,
    NativeKernels.rope_and_latent,
    cases.rope_and_latent,
    _ELEMENTWISE,
    mutates=(1, 5),
)
latent_attention = Op(
    "latent_attention",
    mla.latent_attention,
    NativeKernels.latent_attention,
    cases.latent_attention,
    _ACCUMULATED,
    takes=_takes_latents,
)
kv_digests = Op("kv_digests", digest.kv_digests, NativeKernels.kv_digests, cases.kv_digests, _EXACT)

OPS: dict[str, Op[..., Tensor | tuple[Tensor, ...]]] = {
    op.name: op
    for op in (
        linear,
        rms_norm,
        add_rms_norm,
        silu_and_mul,
        rope_and_cache,
        paged_attention,
        route,
        experts,
        head_linear,
        rope_and_latent,
        latent_attention,
        kv_digests,
    )
}
