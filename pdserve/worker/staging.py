"""Host arrays that a step fills with numpy and hands to the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


class Staged:
    """A flat host array, reused by every step, and its way to the device.

    On the CPU the tensor is the array itself. Elsewhere the array is pinned and copied
    without blocking, so it may be rewritten only after the device has finished the step.

    Args:
        size: Elements.
    """

    array: NDArray[Any]

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._host = torch.zeros(size, dtype=dtype, pin_memory=device.type == "cuda")
        self._device = device
        self.array = self._host.numpy()

    def upload(self, size: int) -> Tensor:
        """Return the first `size` elements on the device; valid for one step."""
        return self._host[:size].to(self._device, non_blocking=True)
