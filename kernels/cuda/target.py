"""The architectures that kernels have tiles for, and the one this process uses.

A process has one device or none; without one, kernels are interpreted, or compiled for a named
architecture.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch


class Architecture(enum.Enum):
    """Architectures with tables of tiles; newer devices use the tables of a similar one."""

    SM_80 = 80
    SM_89 = 89
    SM_90 = 90
    SM_100 = 100

    @property
    def shared_bytes(self) -> int:
        """Maximum shared memory of one program."""
        return {80: 163, 89: 99, 90: 227, 100: 227}[self.value] << 10

    @property
    def is_hopper_like(self) -> bool:
        """Whether kernels may overlap, and tiles be loaded by descriptors."""
        return self.value >= Architecture.SM_90.value


@dataclass(frozen=True, slots=True)
class LaunchTarget:
    """The device that kernels are launched for.

    Attributes:
        architecture: Chooses the tiles.
        multiprocessors: Number of multiprocessors.
    """

    architecture: Architecture
    multiprocessors: int


H100 = LaunchTarget(Architecture.SM_90, 132)
TARGETS = {
    each.architecture: each
    for each in (
        LaunchTarget(Architecture.SM_80, 108),
        LaunchTarget(Architecture.SM_89, 58),
        H100,
        LaunchTarget(Architecture.SM_100, 148),
    )
}
"""An A100, an L4, an H100 and a B200."""


def architecture_of(capability: tuple[int, int]) -> Architecture:
    """Return the architecture whose tiles a device uses, by its shared memory.

    Args:
        capability: Compute capability of the device, at least (8, 0).
    """
    major, minor = capability
    if major == 8:
        return Architecture.SM_80 if minor in (0, 7) else Architecture.SM_89
    if major == 9:
        return Architecture.SM_90
    return Architecture.SM_100 if major in (10, 11) else Architecture.SM_89


@cache
def _of_device() -> LaunchTarget:
    if not torch.cuda.is_available():
        return H100
    found = torch.cuda.get_device_properties()
    return LaunchTarget(architecture_of((found.major, found.minor)), found.multi_processor_count)


# Set by `assuming` alone, for tests that compile for devices that are not here: every launch asks
# for its target, wherever it is made.
_assumed: LaunchTarget | None = None


def target() -> LaunchTarget:
    """Return the target of launches: the device, or an H100 if there is none."""
    return _assumed or _of_device()


@contextmanager
def assuming(other: LaunchTarget) -> Iterator[None]:
    """Choose tiles for another target inside the block."""
    global _assumed  # noqa: PLW0603
    before, _assumed = _assumed, other
    try:
        yield
    finally:
        _assumed = before
