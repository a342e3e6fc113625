"""The device and dtype of a layer's parameters, and this rank's part of each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from pdserve.errors import ConfigError
from pdserve.models.layers.stream import SPLIT_FROM, ResidualStream
from pdserve.models.slots import Slot
from pdserve.parallel.group import World

if TYPE_CHECKING:
    from torch import Tensor

    from pdserve.kernels.backend import KernelBackend
    from pdserve.parallel.dispatch import ExpertParallel


@dataclass(frozen=True, slots=True)
class Placement:
    """The device and dtype of one rank's parameters, and its part of each.

    A layer is written for one device; it gets from here the size and index of the group to slice
    by, and the group's sums.

    Attributes:
        kernels: The kernels for `device` that layers call.
        sequence_parallel: Whether each TP rank holds only a share of the tokens in norms and
            residuals, if a step has many.
        experts: How tokens reach experts; None for a model without any.
    """

    device: torch.device
    dtype: torch.dtype
    kernels: KernelBackend
    world: World = field(default_factory=World.alone)
    sequence_parallel: bool = False
    experts: ExpertParallel | None = None

    @property
    def stream(self) -> ResidualStream:
        """The residual stream of this rank's TP group; a layer calls this once."""
        split_from = SPLIT_FROM if self.sequence_parallel else None
        return ResidualStream(self.world.tp, split_from=split_from)

    def part(self, field: str, size: int) -> range:
        """This TP rank's part of `size` rows, columns or heads, in equal runs.

        Args:
            field: Name of the size's source, for the error.

        Raises:
            ConfigError: They do not divide.
        """
        tp = self.world.tp
        if size % tp.size:
            fitting = ", ".join(str(n) for n in range(1, min(size, 64) + 1) if size % n == 0)
            raise ConfigError(
                f"--tensor-parallel-size is {tp.size}, which does not divide the model's {field} "
                f"of {size}: use one of {fitting}",
                param="tensor-parallel-size",
            )
        each = size // tp.size
        return range(tp.index * each, (tp.index + 1) * each)

    def empty(self, *shape: int) -> Tensor:
        """Return an uninitialised tensor."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)


class Parameter:
    """A tensor that is used as it is stored, whole on every rank, or a rank's part of it.

    Args:
        part: This rank's elements of a tensor of one dim; None: all.
        more: Added to what is stored.

    Attributes:
        value: `shape`, or the part; allocated when it is loaded.
    """

    value: Tensor

    def __init__(
        self,
        shape: tuple[int, ...],
        placement: Placement,
        part: range | None = None,
        *,
        more: float = 0.0,
    ) -> None:
        self._shape = shape
        self._placement = placement
        self._more = more
        self._region = None if part is None else (slice(part.start, part.stop),)

    def slot(self) -> Slot:
        """How to load it."""
        return Slot(self._shape, self._load, self._region)

    def _load(self, tensor: Tensor) -> None:
        self.value = self._placement.empty(*tensor.shape).copy_(tensor)
        if self._more:
            self.value += self._more
