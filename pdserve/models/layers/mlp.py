"""Gated feed-forward layer (SwiGLU, Shazeer 2020)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.kernels.ops import silu_and_mul
from pdserve.models.layers.linear import Linear

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from pdserve.models.arch import ModelArch
    from pdserve.models.layers.parameter import Placement
    from pdserve.models.weights import Slot


class GatedMLP:
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, arch: ModelArch, placement: Placement) -> None:
        inner, bias = arch.intermediate_size, arch.mlp_bias
        self._gate_up = Linear(
            arch.hidden_size, {"gate_proj": inner, "up_proj": inner}, placement, bias=bias
        )
        self._down = Linear(inner, {"down_proj": arch.hidden_size}, placement, bias=bias)

    def slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        """Yield how each parameter is loaded, by name."""
        yield from self._gate_up.slots(prefix)
        yield from self._down.slots(prefix)

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, hidden_size] -> [T, hidden_size]`."""
        return self._down.packed(silu_and_mul(self._gate_up.packed(x)))
