"""How the tensors of a checkpoint reach the layers that take them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    import torch
    from torch import Tensor

    from pdserve.kernels.fp8 import Fp8Weight


@dataclass(frozen=True, slots=True, eq=False)
class Keep:
    """How a layer takes a weight in FP8 as it is stored: all of its weights, or none.

    Attributes:
        layer: The same for all slots of a layer.
        num_slots: How many weights it has. If one of them is changed as it loads, and so has no
            `Keep`, none is kept.
        dtype: What the layer widens it to.
        load: Copies its argument, as `Slot.load` does.
    """

    layer: Hashable
    num_slots: int
    dtype: torch.dtype
    load: Callable[[Fp8Weight], None]


@dataclass(frozen=True, slots=True)
class Slot:
    """One named tensor of the checkpoint format, and the layer that takes it.

    Attributes:
        shape: As in the checkpoint, whole.
        load: Copies its argument, which is invalid after the call. None: the tensor belongs to
            another rank (its layer, its expert), and is not read here.
        region: This rank's part of the tensor, which is passed to `load`: one slice per dim,
            without steps. None is all of it.
        keep: For a weight that need not be widened if it is in FP8.
    """

    shape: tuple[int, ...]
    load: Callable[[Tensor], None] | None
    region: tuple[slice, ...] | None = None
    keep: Keep | None = None

    def elsewhere(self) -> Slot:
        """The same tensor, as seen by a rank that owns none of it."""
        return Slot(self.shape, None)

    @property
    def num_elements(self) -> int:
        """Elements that this rank reads."""
        if self.load is None:
            return 0
        if self.region is None:
            return math.prod(self.shape)
        return math.prod(
            len(range(size)[part]) for size, part in zip(self.shape, self.region, strict=True)
        )
