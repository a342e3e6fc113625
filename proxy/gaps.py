"""Gaps between tokens, counted so that their number costs no memory."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class Gaps:
    """A histogram of gaps, exact to one part in 250, whose size does not grow with their number.

    Attributes:
        max_s: The longest; exact.
    """

    __slots__ = ("_counts", "_num", "max_s")

    def __init__(self) -> None:
        self.max_s = 0.0
        self._num = 0
        self._counts: Counter[int] = Counter()  # by exponent and the first 8 bits of the mantissa

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[tuple[float, int]]:
        """Yield (seconds, how often), the shortest first."""
        for key in sorted(self._counts):
            yield math.ldexp((key & 255) + 0.5, (key >> 8) - 8), self._counts[key]

    @property
    def median_s(self) -> float:
        """Of two in the middle the longer one; 0 if there are none."""
        left = self._num // 2
        for gap_s, number in self:
            left -= number
            if left < 0:
                return min(gap_s, self.max_s)
        return 0.0

    def add(self, gap_s: float) -> None:
        """Count one."""
        mantissa, exponent = math.frexp(max(gap_s, 1e-6))
        self._counts[exponent << 8 | int(mantissa * 256)] += 1
        self._num += 1
        self.max_s = max(self.max_s, gap_s)
