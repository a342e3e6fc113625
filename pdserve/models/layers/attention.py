"""Grouped-query attention over the paged KV cache, with the norm before it."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from pdserve.kernels.reference.attention import AttentionForm
from pdserve.kernels.reference.halves import AttentionWeights
from pdserve.models.arch import QkNorm
from pdserve.models.layers.linear import QKV, RowParallel, kv_heads_of
from pdserve.models.layers.norm import norm_weight
from pdserve.models.layers.parameter import Parameter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from pdserve.kernels.reference import halves
    from pdserve.kernels.step import StepInputs
    from pdserve.models.arch import ModelArch
    from pdserve.models.layers.parameter import Placement
    from pdserve.models.slots import Slot


class GroupedQueryAttention:
    """Norm, projections, optional q and k norms, rotation, cache write, attention, projection.

    Args:
        arch: Whole model.
        layer: Index of this layer, for its window.
        cos_sin: `[max_positions, head_dim]` fp32, shared by all layers.
        in_features: Input size of the projections, if they read more than the norm's result.
    """

    def __init__(
        self,
        arch: ModelArch,
        layer: int,
        cos_sin: Tensor,
        placement: Placement,
        *,
        in_features: int | None = None,
    ) -> None:
        self._norm = (
            norm_weight(arch.norms, arch.hidden_size, placement) if arch.norms.before else None
        )
        self._qkv = QKV(
            in_features or arch.hidden_size,
            arch.num_heads,
            arch.num_kv_heads,
            head_dim=arch.head_dim,
            placement=placement,
            bias=arch.qkv_bias,
            interleaved=arch.rotary_dim if arch.interleaved_rope else 0,
        )
        self._out = RowParallel(
            arch.num_heads * arch.head_dim,
            "o_proj",
            arch.hidden_size,
            placement=placement,
            bias=arch.o_bias,
        )
        self._stream = placement.stream
        self._kernels = placement.kernels
        self._q_norm, self._k_norm = (
            norm_weight(arch.norms, arch.head_dim, placement)
            if arch.qk_norm in (QkNorm.HEAD, QkNorm.ROTATED_HEAD)
            else None
            for _ in range(2)
        )
        self._norms_rotated = arch.qk_norm is QkNorm.ROTATED_HEAD
        self._all_heads = (
            NormsOfAllHeads(arch, placement) if arch.qk_norm is QkNorm.ALL_HEADS else None
        )
        self._far_queries = (
            None if arch.far_queries is None else FarQueries(arch, cos_sin, placement)
        )
        self._sinks = (
            Parameter(
                (arch.num_heads,),
                replace(placement, dtype=torch.float32),
                placement.part("num_attention_heads", arch.num_heads),
            )
            if arch.attention_sinks
            else None
        )
        self._cos_sin = cos_sin
        self._eps = arch.rms_norm_eps
        self._scale = arch.head_dim**-0.5 if arch.softmax_scale is None else arch.softmax_scale
        self._window = arch.windows[layer]

    def slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        """Yield how to load each parameter; `prefix` is that of the layer."""
        if self._norm is not None:
            yield f"{prefix}input_layernorm.weight", self._norm.slot()
        yield from self._qkv.slots(f"{prefix}self_attn.")
        yield from self._out.slots(f"{prefix}self_attn.")
        if self._q_norm is not None and self._k_norm is not None:
            yield f"{prefix}self_attn.q_norm.weight", self._q_norm.slot()
            yield f"{prefix}self_attn.k_norm.weight", self._k_norm.slot()
        if self._all_heads is not None:
            yield from self._all_heads.slots(f"{prefix}self_attn.")
        if self._sinks is not None:
            yield f"{prefix}self_attn.sinks", self._sinks.slot()

    @cached_property
    def _half(self) -> halves.Attention:
        q_norm, k_norm = (
            None if norm is None else norm.value for norm in (self._q_norm, self._k_norm)
        )
        q_scale = None
        if self._norms_rotated and q_norm is not None and k_norm is not None:
            # Rotation keeps the root mean square, and a score takes both weights from either side.
            q_scale = (q_norm.float() * k_norm.float()).to(q_norm.dtype)
            q_norm, k_norm = torch.ones_like(q_norm), torch.ones_like(k_norm)
        weights = AttentionWeights(
            norm=None if self._norm is None else self._norm.value,
            eps=self._eps,
            qkv=self._qkv.packed,
            out=self._out.packed,
            cos_sin=self._cos_sin,
            q_norm=q_norm,
            k_norm=k_norm,
            scale=self._scale,
            form=AttentionForm(self._window, None if self._sinks is None else self._sinks.value),
            between=self._all_heads or self._far_queries,
            q_scale=q_scale,
        )
        return self._kernels.attention(self._kernels, weights)

    def __call__(
        self, x: Tensor | None, residual: Tensor, step: StepInputs, kv_layer: Tensor
    ) -> Tensor:
        """Run the half layer. R rows of T are this rank's share of the residual stream, or all.

        Args:
            x: `[R, hidden_size]`, added to `residual` in place first; None adds nothing.
            residual: `[R, hidden_size]`.
            step: The tokens' places.
            kv_layer: `[num_blocks, 2, num_kv_heads, block_size, head_dim]`, of this rank's
                heads; this step's keys and values are written to it.

        Returns:
            `[R, hidden_size]`, summed over the TP group, not yet added to `residual`.
        """
        half, stream = self._half, self._stream
        if stream.is_alone or not stream.is_split(len(step.positions)):
            partial = half(x, residual, kv_layer, step)
            return partial if stream.is_alone else stream.sum(partial)
        normed = stream.gather(half.norm(x, residual), len(step.positions))
        return stream.sum(half.after_norm(normed, kv_layer, step))

    def norm(self, x: Tensor) -> Tensor:
        """Return the norm of `x`, `[T, hidden_size]`; `after_norm` may take a wider input."""
        return self._half.norm(None, x)

    def after_norm(self, normed: Tensor, step: StepInputs, kv_layer: Tensor) -> Tensor:
        """Run what follows the norm, over whole rows.

        Args:
            normed: `[T, in_features]`.

        Returns:
            `[T, hidden_size]`, not summed over the TP group.
        """
        return self._half.after_norm(normed, kv_layer, step)


class NormsOfAllHeads:
    """RMS norms of all heads of queries together, and of all of keys, whichever ranks have them.

    Each rank norms whole rows, so that a token has the same bits on any number of ranks.
    """

    def __init__(self, arch: ModelArch, placement: Placement) -> None:
        dim, num_q, num_kv = arch.head_dim, arch.num_heads, arch.num_kv_heads
        self._q = norm_weight(arch.norms, num_q * dim, placement)
        self._k = norm_weight(arch.norms, num_kv * dim, placement)
        heads = placement.part("num_attention_heads", num_q)
        kv_heads = kv_heads_of(num_kv, placement)
        self._widths = [len(heads) * dim, len(kv_heads) * dim, len(kv_heads) * dim]
        self._mine = [slice(each.start * dim, each.stop * dim) for each in (heads, kv_heads)]
        self._copies = max(1, placement.world.tp.size // num_kv)
        self._tp, self._eps = placement.world.tp, arch.rms_norm_eps
        self._rms_norm = placement.kernels.rms_norm

    def slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        """Yield how to load both weights."""
        yield f"{prefix}q_norm.weight", self._q.slot()
        yield f"{prefix}k_norm.weight", self._k.slot()

    def __call__(self, qkv: Tensor, positions: Tensor) -> Tensor:
        """Norm q and k of `[T, (H + 2 * Hkv) * Dh]`, this rank's heads; v stays."""
        of_q, of_k, of_v = self._widths
        both = self._tp.all_gather(qkv[:, : of_q + of_k].contiguous(), dim=1)
        q, k = torch.split(both.view(len(qkv), -1, of_q + of_k), [of_q, of_k], dim=2)
        normed = [
            self._rms_norm(part.flatten(1).contiguous(), weight.value, self._eps)[:, mine]
            for part, weight, mine in zip(
                (q, k[:, :: self._copies]), (self._q, self._k), self._mine, strict=True
            )
        ]
        return torch.cat((*normed, qkv[:, -of_v:]), dim=1)


class FarQueries:
    """Multiplies queries by a factor of their position."""

    def __init__(self, arch: ModelArch, cos_sin: Tensor, placement: Placement) -> None:
        far = arch.far_queries
        assert far is not None
        positions = torch.arange(len(cos_sin))
        factors = 1 + far.beta * torch.log(1 + torch.floor(positions / far.period))
        self._factors = factors.to(placement.device, placement.dtype)[:, None]
        self._width = len(placement.part("num_attention_heads", arch.num_heads)) * arch.head_dim

    def __call__(self, qkv: Tensor, positions: Tensor) -> Tensor:
        """Return `[T, (H + 2 * Hkv) * Dh]` with other queries."""
        queries = qkv[:, : self._width] * self._factors[positions]
        return torch.cat((queries, qkv[:, self._width :]), dim=1)
