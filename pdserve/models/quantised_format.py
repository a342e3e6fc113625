"""What a format of quantised weights says: which tensors make a weight, and in which schemes.

A weight is stored as several tensors, each with a role: `numbers` has its elements, `scale` their
factors; see the schemes for others. Free of torch until something is widened.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, dtype

    from pdserve.models.weight_file import StoredTensor

Region = tuple[slice, ...]

NUMBERS = "numbers"
"""Role of the tensor that has a weight's elements."""


class Scheme(Protocol):
    """One way to store a weight."""

    def fits(self, shape: tuple[int, ...], stored: Mapping[str, StoredTensor]) -> bool:
        """Whether a weight of this shape can be stored in these tensors, by role."""
        ...

    def regions(self, shape: tuple[int, ...], region: Region | None) -> dict[str, Region]:
        """Return what is read of each tensor for a region of a weight, by role."""
        ...

    def widened(
        self,
        tensors: Mapping[str, Tensor],
        *,
        shape: tuple[int, ...],
        region: Region | None,
        to: dtype,
    ) -> Tensor:
        """Return a region of a weight.

        Args:
            tensors: Those of `regions`, by role.
            shape, region: See `Slot`.

        Raises:
            ValueError: What is stored contradicts the configuration.
        """
        ...


class QuantisedFormat(msgspec.Struct, frozen=True):
    """How a checkpoint's quantised weights are named and stored.

    Attributes:
        roles: Roles of tensors, by the ends of their names.
        schemes: The first that fits a weight is its scheme.
        dtypes: Those, in safetensors, of numbers that have the weight's own name.
        stem: What follows in a weight's name in place of such an end.
        unused: Suffixes of names of tensors that are not read.
    """

    roles: dict[str, str]
    schemes: tuple[Scheme, ...]
    dtypes: tuple[str, ...] = ()
    stem: str = ""
    unused: tuple[str, ...] = ()

    def grouped(self, stored: Mapping[str, StoredTensor]) -> dict[str, dict[str, str]]:
        """Return the names of the tensors of each quantised weight, by its name and their roles."""
        found: dict[str, dict[str, str]] = {}
        for name, each in stored.items():
            end = next((end for end in self.roles if name.endswith(end)), None)
            if end is not None:
                weight = name.removesuffix(end) + self.stem
                found.setdefault(weight, {}).setdefault(self.roles[end], name)
            elif each.dtype in self.dtypes:
                found.setdefault(name, {}).setdefault(NUMBERS, name)
        return {weight: parts for weight, parts in found.items() if NUMBERS in parts}

    def scheme(self, shape: tuple[int, ...], stored: Mapping[str, StoredTensor]) -> Scheme | None:
        """Return the scheme of a weight, whose tensors are given by role; None if none fits."""
        return next((each for each in self.schemes if each.fits(shape, stored)), None)
