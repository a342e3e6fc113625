"""Grouped-query attention over the paged KV cache, with the norm before it."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from pdserve.kernels.reference.attention import AttentionForm
from pdserve.kernels.reference.halves import AttentionWeights
from pdserve.models.layers.linear import QKV, RowParallel
from pdserve.models.layers.parameter import Parameter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from pdserve.kernels.reference import halves
    from pdserve.kernels.step import StepInputs
    from pdserve.models.arch import ModelArch
    from pdserve.models.layers.parameter import Placement
    from pdserve.models.weights import Slot


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
        self._norm = Parameter((arch.hidden_size,), placement)
        self._qkv = QKV(
            in_features or arch.hidden_size,
            arch.num_heads,
            arch.num_kv_heads,
            head_dim=arch.head_dim,
            placement=placement,
            bias=arch.qkv_bias,
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
        self._q_norm = Parameter((arch.head_dim,), placement) if arch.qk_norm else None
        self._k_norm = Parameter((arch.head_dim,), placement) if arch.qk_norm else None
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
        self._scale = arch.head_dim**-0.5
        self._window = arch.windows[layer]

    def slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        """Yield how to load each parameter; `prefix` is that of the layer."""
        yield f"{prefix}input_layernorm.weight", self._norm.slot()
        yield from self._qkv.slots(f"{prefix}self_attn.")
        yield from self._out.slots(f"{prefix}self_attn.")
        if self._q_norm is not None and self._k_norm is not None:
            yield f"{prefix}self_attn.q_norm.weight", self._q_norm.slot()
            yield f"{prefix}self_attn.k_norm.weight", self._k_norm.slot()
        if self._sinks is not None:
            yield f"{prefix}self_attn.sinks", self._sinks.slot()

    @cached_property
    def _half(self) -> halves.Attention:
        weights = AttentionWeights(
            norm=self._norm.value,
            eps=self._eps,
            qkv=self._qkv.packed,
            out=self._out.packed,
            cos_sin=self._cos_sin,
            q_norm=None if self._q_norm is None else self._q_norm.value,
            k_norm=None if self._k_norm is None else self._k_norm.value,
            scale=self._scale,
            form=AttentionForm(self._window, None if self._sinks is None else self._sinks.value),
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
