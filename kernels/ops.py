"""The operations of a model's step on one kind of device.

    rms_norm(x, weight, eps)                         [T, D] -> [T, D]
    add_rms_norm(x, residual, weight, eps)           [T, D] -> [T, D]; residual += x, in place
    silu_and_mul(x), gelu_and_mul(x)                 [T, 2 * I] -> [T, I]
    rope_and_cache(qkv, positions, cos_sin,          [T, (H + 2 * Hkv) * Dh] -> [T, H, Dh]
        kv_layer, slot_mapping,                      writes k and v into kv_layer
        q_norm, k_norm, eps)
    paged_attention(q, kv_layer, block_tables,       [T, H, Dh] -> [T, H * Dh]
        query_start, context_lens, scale, form)
    route(logits, bias, rule)                        [T, E] -> ids and weights, [T, k] each
    rope_and_latent(q, queries, latent, positions,   writes the last elements of queries, and the
        cos_sin, kv_layer, slot_mapping, norm, eps)  latent and its key into kv_layer
    latent_attention(q, kv_layer, block_tables,      [T, H, R + P] -> [T, H, R]
        query_start, context_lens, scale, latent_dim)
    kv_digests(kv, spans, constants, keys, num_rows) [num_blocks, L, P, H, block_size, Dh]
                                                     -> [num_rows, L, H]; bit for bit
    gather_chunks(kv, blocks, pool, starts,          [C, blocks of a chunk], [C, H] -> [C, L, H]:
        constants, keys)                             digests of what is copied into the pool
    scatter_chunks(kv, blocks, pool, starts,         the same, of what is copied into the blocks
        constants, keys)
    sum_ranks(parts)                                 [R, n] -> [n], in rank order

``T`` is the number of tokens of a step, over all its requests. Tensors are contiguous, of one dtype
(bf16, fp16 or fp32) and on one device; ``kv_layer`` is the view ``kv[:, layer]`` of ``[num_blocks,
num_layers, 2, Hkv, block_size, Dh]`` (of latents: ``[num_blocks, num_layers, 1, 1, block_size, R +
P]``), hence strided over blocks. The reference functions document each argument. What is made once
and called often (weights, half layers) is in `pdserve.kernels.backend`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from pdserve.kernels.reference import (
    activation,
    attention,
    chunks,
    digest,
    logprobs,
    masks,
    mla,
    moe,
    norm,
    ranks,
    rope,
    rules,
    sampling,
)
from pdserve.kernels.reference.attention import AttentionForm
from pdserve.kernels.reference.logprobs import Described
from pdserve.kernels.reference.moe import RoutingRule
from pdserve.kernels.reference.rules import Ruled, RuleTables
from pdserve.kernels.reference.sampling import Draws

PagedAttention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float, AttentionForm], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ops:
    """One implementation of each operation; what is not given is the reference's.

    Operations are called by position.
    """

    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = norm.rms_norm
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor] = norm.add_rms_norm
    silu_and_mul: Callable[[Tensor], Tensor] = activation.silu_and_mul
    gelu_and_mul: Callable[[Tensor], Tensor] = activation.gelu_and_mul
    rope_and_cache: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, float], Tensor
    ] = rope.rope_and_cache
    paged_attention: PagedAttention = attention.paged_attention
    route: Callable[[Tensor, Tensor | None, RoutingRule], tuple[Tensor, Tensor]] = moe.route
    rope_and_latent: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float], Tensor
    ] = mla.rope_and_latent
    latent_attention: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float, int], Tensor] = (
        mla.latent_attention
    )
    kv_digests: Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor] = digest.kv_digests
    gather_chunks: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] = (
        chunks.gather_chunks
    )
    scatter_chunks: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] = (
        chunks.scatter_chunks
    )
    sum_ranks: Callable[[Tensor], Tensor] = ranks.sum_ranks


class DrawTokens(Protocol):
    """Draws tokens, as `reference.sampling.draw`, whose arguments these are."""

    def __call__(
        self,
        logits: Tensor,
        peaks: Tensor,
        draws: Draws,
        tokens: Tensor,
        *,
        by_k: bool,
        by_p: bool,
    ) -> None:
        """Write the tokens of the drawn rows."""


class RuleLogits(Protocol):
    """Rules rows of logits, as `reference.rules.rule`, whose arguments these are."""

    def __call__(
        self, logits: Tensor, tables: RuleTables, ruled: Ruled, *, by_bias: bool, avoids: bool
    ) -> None:
        """Change the ruled rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOps:
    """How tokens are chosen and described where logits lie.

    On the host, `draw` and `describe` alone are used.
    """

    largest: Callable[[Tensor], tuple[Tensor, Tensor]] = sampling.largest
    draw: DrawTokens = sampling.draw
    describe: Callable[[Tensor, Tensor, Tensor], Described] = logprobs.describe
    rule: RuleLogits = rules.rule
    note: Callable[[Tensor, Tensor, Tensor, Tensor], None] = rules.note
    mask: Callable[[Tensor, Tensor], None] = masks.mask
