"""The numerics mode: whether an engine may trade the last bits of its results for speed."""

from __future__ import annotations

import enum


class NumericsMode(enum.Enum):
    """What the results of an engine may depend on."""

    EXACT = "exact"
    """A row's bits: on its own tokens alone."""
    FAST = "fast"
    """A row's last bits: on its batch, too."""
