"""Gated feed-forward layer (SwiGLU, Shazeer 2020), with the norm before it."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from pdserve.kernels.reference.halves import MlpWeights
from pdserve.models.layers.linear import ColumnParallel, RowParallel
from pdserve.models.layers.norm import norm_weight

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from pdserve.kernels.reference.halves import Mlp
    from pdserve.models.arch import ModelArch
    from pdserve.models.layers.parameter import Placement
    from pdserve.models.slots import Slot


class GatedMLP:
    """`down(activation(gate(norm(x))) * up(norm(x)))`."""

    def __init__(self, arch: ModelArch, placement: Placement) -> None:
        inner, bias = arch.intermediate_size, arch.mlp_bias
        self._norm = (
            norm_weight(arch.norms, arch.hidden_size, placement) if arch.norms.before else None
        )
        self._gate = arch.activation
        self._eps = arch.rms_norm_eps
        self._gate_up = ColumnParallel(
            arch.hidden_size, {"gate_proj": inner, "up_proj": inner}, placement, bias=bias
        )
        self._down = RowParallel(
            inner, "down_proj", arch.hidden_size, placement=placement, bias=bias
        )
        self._stream = placement.stream
        self._kernels = placement.kernels

    def slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        """Yield how to load each parameter; `prefix` is that of the layer."""
        if self._norm is not None:
            yield f"{prefix}post_attention_layernorm.weight", self._norm.slot()
        yield from self._gate_up.slots(f"{prefix}mlp.")
        yield from self._down.slots(f"{prefix}mlp.")

    @cached_property
    def _half(self) -> Mlp:
        kernels = self._kernels
        return kernels.mlp(
            kernels,
            MlpWeights(
                None if self._norm is None else self._norm.value,
                self._eps,
                self._gate_up.packed,
                self._down.packed,
                self._gate,
            ),
        )

    def __call__(self, x: Tensor, residual: Tensor, num_tokens: int) -> Tensor:
        """Run the half layer. R rows of T are this rank's share of the residual stream, or all.

        Args:
            x: `[R, hidden_size]`, added to `residual` in place first.
            residual: `[R, hidden_size]`.
            num_tokens: T.

        Returns:
            `[R, hidden_size]`, summed over the TP group, not yet added to `residual`.
        """
        half, stream = self._half, self._stream
        if stream.is_alone or not stream.is_split(num_tokens):
            partial = half(x, residual)
            return partial if stream.is_alone else stream.sum(partial)
        normed = stream.gather(half.norm(x, residual), num_tokens)
        return stream.sum(half.after_norm(normed))
