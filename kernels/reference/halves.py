"""The two halves of a dense decoder layer, made of the operations of a backend, called in turn.

A backend may do a half in fewer calls, bit for bit the same, which is what a decode step of few
tokens should use. Nothing here knows of tensor parallelism: the caller sums partial results over
ranks after each half. A caller whose ranks hold a share of the residual stream each calls ``norm``
on its rows, gathers, and goes on with ``after_norm``: the same operations, in two calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from pdserve.kernels.gates import Activation
from pdserve.kernels.ops import Ops
from pdserve.kernels.reference.attention import PLAIN, AttentionForm
from pdserve.kernels.reference.linear import PackedLinear
from pdserve.kernels.step import StepInputs


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """Norm, gate and up projection, gated activation, down projection.

    Attributes:
        norm: ``[D]``, weight of the norm; None: there is none.
        eps: Of the norm.
        gate_up: ``[D] -> [2 * I]``.
        down: ``[I] -> [D]``.
        gate: The activation.
    """

    norm: Tensor | None
    eps: float
    gate_up: PackedLinear
    down: PackedLinear
    gate: Activation = Activation.SILU


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWeights:
    """Norm, qkv projection, rotation and cache write, attention, output projection.

    Attributes:
        norm: ``[D]``, weight of the norm; None: there is none.
        eps: Of this norm and of those of q and k.
        qkv: ``[D] -> [(H + 2 * Hkv) * Dh]``.
        out: ``[H * Dh] -> [D]``.
        cos_sin: ``[max_pos, rotary_dim]`` fp32.
        q_norm: ``[Dh]`` or None.
        k_norm: ``[Dh]`` or None.
        scale: Factor on the scores.
        form: Window and sinks of the attention.
        between: Changes what the qkv projection returns before it is rotated, given the tokens'
            positions; None: nothing.
        q_scale: ``[Dh]``, factors on rotated queries; None: nothing.
    """

    norm: Tensor | None
    eps: float
    qkv: PackedLinear
    out: PackedLinear
    cos_sin: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    scale: float
    form: AttentionForm = PLAIN
    between: Callable[[Tensor, Tensor], Tensor] | None = None
    q_scale: Tensor | None = None


class Mlp:
    """The feed-forward half."""

    def __init__(self, ops: Ops, weights: MlpWeights) -> None:
        self._ops, self._weights = ops, weights

    def __call__(self, x: Tensor | None, residual: Tensor) -> Tensor:
        """Run the half layer.

        Args:
            x: ``[T, D]``, added to ``residual`` in place first; None adds nothing.
            residual: ``[T, D]``.

        Returns:
            ``[T, D]``, not yet added to ``residual``.
        """
        return self.after_norm(self.norm(x, residual))

    def norm(self, x: Tensor | None, residual: Tensor) -> Tensor:
        """Add ``x`` to ``residual`` in place and return the norm of the sum, ``[T, D]``."""
        return _normed(self._ops, x, residual, self._weights)

    def after_norm(self, normed: Tensor) -> Tensor:
        """Run what follows the norm: ``[T, D] -> [T, D]``."""
        weights = self._weights
        is_silu = weights.gate is Activation.SILU
        gated = self._ops.silu_and_mul if is_silu else self._ops.gelu_and_mul
        return weights.down(gated(weights.gate_up(normed)))


class Attention:
    """The attention half.

    Args:
        padded: Operations for steps that are padded; None for the same.
    """

    def __init__(self, ops: Ops, weights: AttentionWeights, padded: Ops | None = None) -> None:
        self._ops, self._weights, self._padded = ops, weights, padded or ops

    def __call__(
        self, x: Tensor | None, residual: Tensor, kv_layer: Tensor, step: StepInputs
    ) -> Tensor:
        """Run the half layer.

        Args:
            x: ``[T, D]``, added to ``residual`` in place first; None adds nothing.
            residual: ``[T, D]``.
            kv_layer: As `rope_and_cache` writes and `paged_attention` reads it.
            step: The tokens' places.

        Returns:
            ``[T, D]``, not yet added to ``residual``.
        """
        return self.after_norm(self.norm(x, residual), kv_layer, step)

    def norm(self, x: Tensor | None, residual: Tensor) -> Tensor:
        """Add ``x`` to ``residual`` in place and return the norm of the sum, ``[T, D]``."""
        return _normed(self._ops, x, residual, self._weights)

    def after_norm(self, normed: Tensor, kv_layer: Tensor, step: StepInputs) -> Tensor:
        """Run what follows the norm: ``[T, D] -> [T, D]``; arguments as of a call."""
        ops, weights = self._padded if step.is_padded else self._ops, self._weights
        qkv = weights.qkv(normed)
        q = ops.rope_and_cache(
            qkv if weights.between is None else weights.between(qkv, step.positions),
            step.positions,
            weights.cos_sin,
            kv_layer,
            step.slot_mapping,
            weights.q_norm,
            weights.k_norm,
            weights.eps,
        )
        attended = ops.paged_attention(
            q if weights.q_scale is None else q * weights.q_scale,
            kv_layer,
            step.block_tables,
            step.query_start,
            step.context_lens,
            weights.scale,
            weights.form,
        )
        return weights.out(attended)


def _normed(
    ops: Ops, x: Tensor | None, residual: Tensor, weights: MlpWeights | AttentionWeights
) -> Tensor:
    if weights.norm is None:
        return (residual if x is None else residual.add_(x)).clone()
    if x is None:
        return ops.rms_norm(residual, weights.norm, weights.eps)
    return ops.add_rms_norm(x, residual, weights.norm, weights.eps)
