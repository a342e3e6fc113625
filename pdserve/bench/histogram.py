"""Histogram of durations, for percentiles of a run that is still in progress."""

from __future__ import annotations

import math
from typing import Final

_STEP: Final = math.log(1.02)


class Histogram:
    """Durations in buckets 2 % wide; a percentile is accurate to 1 %."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._num = 0

    def add(self, seconds: float) -> None:
        """Add one."""
        bucket = math.floor(math.log(max(seconds, 1e-6)) / _STEP)
        self._counts[bucket] = self._counts.get(bucket, 0) + 1
        self._num += 1

    def percentile(self, percent: float) -> float | None:
        """Return the duration that `percent` of them do not exceed; None if there are none."""
        if not self._num:
            return None
        left = percent / 100 * self._num
        for bucket in sorted(self._counts):
            left -= self._counts[bucket]
            if left <= 0:
                break
        return math.exp((bucket + 0.5) * _STEP)
