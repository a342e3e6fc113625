"""What a proxy's users have felt in the last minute: how requests ended, and how long they waited.

The counters of `/metrics` are remembered once a second, and what they have grown by is told.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from prometheus_client import Counter, Histogram

    from pdserve.observe.metrics import HistogramFamily

SPAN_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Waits:
    """A histogram: how many waited no longer than each bound.

    Attributes:
        bounds: Seconds, ascending; the last one is infinite.
        cumulative: How many waited no longer than the bound at the same place.
    """

    bounds: tuple[float, ...]
    cumulative: tuple[float, ...]

    @staticmethod
    def of(histogram: Histogram | HistogramFamily) -> Waits:
        """Return what a histogram has now, over all its labels."""
        counts: dict[float, float] = {}
        for family in histogram.collect():
            for sample in family.samples:
                if sample.name.endswith("_bucket"):
                    bound = float(sample.labels["le"])
                    counts[bound] = counts.get(bound, 0.0) + sample.value
        bounds = tuple(sorted(counts))
        return Waits(bounds, tuple(counts[bound] for bound in bounds))

    def since(self, before: Waits) -> Waits:
        """Return what has come after `before`."""
        pairs = zip(self.cumulative, before.cumulative, strict=True)
        return Waits(self.bounds, tuple(now - then for now, then in pairs))

    @property
    def count(self) -> int:
        """How many waited at all."""
        return int(self.cumulative[-1]) if self.cumulative else 0

    def quantile(self, q: float) -> float | None:
        """Return an estimate in seconds, as Prometheus' `histogram_quantile` makes it.

        None where a single further wait could move it at will: fewer than one lie beyond it.
        """
        if self.count * (1.0 - q) < 1.0 - 1e-9:
            return None
        rank = q * self.count
        at = bisect_left(self.cumulative, rank)
        if math.isinf(self.bounds[at]):
            return self.bounds[at - 1]
        low, below = (self.bounds[at - 1], self.cumulative[at - 1]) if at else (0.0, 0.0)
        inside = self.cumulative[at] - below
        return low + (self.bounds[at] - low) * (rank - below) / inside


@dataclass(frozen=True, slots=True)
class Tally:
    """What a proxy has counted at a moment, or between two.

    Attributes:
        outcomes: Requests by how they ended.
        ttft, gaps: Waits for the first token, and for each after the second.
    """

    outcomes: Mapping[str, int]
    ttft: Waits
    gaps: Waits

    def since(self, before: Tally) -> Tally:
        """Return what has come after `before`."""
        grown = {name: n - before.outcomes.get(name, 0) for name, n in self.outcomes.items()}
        return Tally(grown, self.ttft.since(before.ttft), self.gaps.since(before.gaps))

    def ended(self, outcomes: Iterable[str]) -> int:
        """Return how many requests ended in one of these ways."""
        return sum(self.outcomes.get(each, 0) for each in outcomes)


class Minute:
    """The counts of the last `SPAN_S`, remembered once a second."""

    def __init__(self) -> None:
        self._kept: deque[tuple[float, Tally]] = deque()

    def note(self, tally: Tally, now_s: float) -> None:
        """Remember what is counted at `now_s`, monotonic."""
        self._kept.append((now_s, tally))
        while len(self._kept) > 1 and now_s - self._kept[1][0] >= SPAN_S:
            self._kept.popleft()

    @property
    def span_s(self) -> float:
        """For how long there are counts; at most about `SPAN_S`."""
        return self._kept[-1][0] - self._kept[0][0] if self._kept else 0.0

    @property
    def grown(self) -> Tally | None:
        """What has come in that time; None before the first counts."""
        return self._kept[-1][1].since(self._kept[0][1]) if self._kept else None


def by_labels(counter: Counter) -> dict[tuple[str, ...], int]:
    """Return a counter's values by the values of its labels."""
    return {
        tuple(sample.labels.values()): int(sample.value)
        for family in counter.collect()
        for sample in family.samples
        if sample.name.endswith("_total")
    }
