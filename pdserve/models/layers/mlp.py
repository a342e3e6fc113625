"""Gated feed-forward layer (SwiGLU, Shazeer 2020), with the norm before it."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from pdserve.kernels import halves
from pdserve.models.layers.linear import Linear
from pdserve.models.layers.parameter import Parameter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from pdserve.models.arch import ModelArch
    from pdserve.models.layers.parameter import Placement
    from pdserve.models.weights import Slot


class GatedMLP:
    """`down(silu(gate(norm(x))) * up(norm(x)))`."""

    def __init__(self, arch: ModelArch, placement: Placement) -> None:
        inner, bias = arch.intermediate_size, arch.mlp_bias
        self._norm = Parameter((arch.hidden_size,), placement)
        self._eps = arch.rms_norm_eps
        self._gate_up = Linear(
            arch.hidden_size, {"gate_proj": inner, "up_proj": inner}, placement, bias=bias
        )
        self._down = Linear(inner, {"down_proj": arch.hidden_size}, placement, bias=bias)

    def slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        """Yield how each parameter is loaded; `prefix` is the layer's."""
        yield f"{prefix}post_attention_layernorm.weight", self._norm.slot()
        yield from self._gate_up.slots(f"{prefix}mlp.")
        yield from self._down.slots(f"{prefix}mlp.")

    @cached_property
    def _half(self) -> halves.Mlp:
        return halves.Mlp(self._norm.value, self._eps, self._gate_up.packed, self._down.packed)

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """Run the half layer.

        Args:
            x: `[T, hidden_size]`, added to `residual` in place first.
            residual: `[T, hidden_size]`.

        Returns:
            `[T, hidden_size]`, not yet added to `residual`.
        """
        return self._half(x, residual)
