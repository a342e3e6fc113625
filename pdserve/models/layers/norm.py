"""RMS norms, and their weights as a family stores them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from pdserve.models.layers.parameter import Parameter

if TYPE_CHECKING:
    from torch import Tensor

    from pdserve.models.arch import ModelArch, NormArch
    from pdserve.models.layers.parameter import Placement
    from pdserve.models.slots import Slot


def norm_weight(norms: NormArch, size: int, placement: Placement) -> Parameter:
    """Return the weight of a norm of `size` elements, whole on every rank."""
    if norms.wide:
        placement = replace(placement, dtype=torch.float32)
    return Parameter((size,), placement, more=1.0 if norms.less_one else 0.0)


class RMSNorm:
    """Root mean square norm (Zhang and Sennrich 2019) of `hidden_size` elements."""

    def __init__(self, arch: ModelArch, placement: Placement) -> None:
        self._weight = norm_weight(arch.norms, arch.hidden_size, placement)
        self._eps = arch.rms_norm_eps
        self._rms_norm = placement.kernels.rms_norm
        self._add_rms_norm = placement.kernels.add_rms_norm

    def slot(self) -> Slot:
        """How to load the weight."""
        return self._weight.slot()

    def __call__(self, x: Tensor) -> Tensor:
        """Return the norm of `x`, `[T, hidden_size]`."""
        return self._rms_norm(x, self._weight.value, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add `x` to `residual` in place and return the norm of the sum, `[T, hidden_size]`."""
        return self._add_rms_norm(x, residual, self._weight.value, self._eps)


class ResidualScale:
    """A factor on what joins the residual stream."""

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product, `[T, hidden_size]`."""
        return x * self._factor
