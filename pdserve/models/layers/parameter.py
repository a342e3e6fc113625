"""Where and in what dtype a layer's parameters live."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pdserve.models.weights import Slot

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Placement:
    """Device and dtype of every parameter of one rank."""

    device: torch.device
    dtype: torch.dtype

    def empty(self, *shape: int) -> Tensor:
        """Return an uninitialised tensor."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)


class Parameter:
    """One tensor that is used as it is stored.

    Attributes:
        value: `shape`, allocated when it is loaded.
    """

    value: Tensor

    def __init__(self, shape: tuple[int, ...], placement: Placement) -> None:
        self._shape = shape
        self._placement = placement

    def slot(self) -> Slot:
        """How it is loaded."""
        return Slot(self._shape, self._load)

    def _load(self, tensor: Tensor) -> None:
        self.value = self._placement.empty(*self._shape).copy_(tensor)
