"""RMS norm with the residual stream's addition fused in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.models.layers.parameter import Parameter

if TYPE_CHECKING:
    from torch import Tensor

    from pdserve.models.layers.parameter import Placement
    from pdserve.models.weights import Slot


class RMSNorm:
    """Root mean square norm (Zhang and Sennrich 2019)."""

    def __init__(self, dim: int, eps: float, placement: Placement) -> None:
        self._weight = Parameter((dim,), placement)
        self._eps = eps
        self._add_rms_norm = placement.kernels.add_rms_norm

    def slot(self) -> Slot:
        """How to load the weight."""
        return self._weight.slot()

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add `x` to `residual` in place and return the norm of the sum, `[T, dim]`."""
        return self._add_rms_norm(x, residual, self._weight.value, self._eps)
