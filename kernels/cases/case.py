"""The definition of a case, and random tensors for cases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """Named arguments of one call.

    Attributes:
        name: Unique within its operation.
        make: From a dtype and a device to the positional arguments; the same values every time.
    """

    name: str
    make: Callable[[torch.dtype, torch.device], tuple[Any, ...]]


def draw(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, seed: int) -> Tensor:
    """Return random values, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)
