"""What users of a deployment experience now, in one sentence, and why.

Not how the page is, nor how each engine is: whether requests are answered, and how fast, by what
the counters of `/metrics` have grown by in the last minute. They are remembered once a second.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec

from pdserve.proxy.dashboard.journal import BAD, FAILED, GOOD, PLAIN, WARN

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from prometheus_client import Counter, Histogram

    from pdserve.observe.metrics import HistogramFamily

SPAN_S: Final = 60.0
MANY_FAILED: Final = 0.05
"""Share of the requests of a minute above which it is no mishap."""
_SERVED: Final = ("ok", "disconnected")
_SPLIT: Final = ("prefill", "decode")


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


class Banner(msgspec.Struct, frozen=True, kw_only=True):
    """What stands above everything else.

    Attributes:
        tone: One of the journal's.
        headline: What users feel.
        details: Why, and how fast; may be empty.
    """

    tone: str
    headline: str
    details: list[str] = []


@dataclass(frozen=True, slots=True)
class Felt:
    """What it is judged by.

    Attributes:
        unserved: Why nobody can be served now; None if somebody can.
        ready, known: Engines by role.
        unwell: Of each engine that is not ready: which it is, and why.
        num_waiting: Requests that wait for a place at the proxy.
        minute: What came in the last `span_s`.
    """

    unserved: str | None
    ready: Mapping[str, int]
    known: Mapping[str, int]
    minute: Tally
    span_s: float
    unwell: Sequence[str] = field(default=())
    num_waiting: int = 0


def banner(felt: Felt) -> Banner:
    """Return what to say; the gravest comes first."""
    if felt.unserved is not None:
        return _said(BAD, "Nobody is served", felt.unserved, *felt.unwell)
    details = [*_failures(felt), *_queue(felt), *felt.unwell, *_waits(felt)]
    num_failed, num_ended = felt.minute.ended(FAILED), felt.minute.ended((*_SERVED, *FAILED))
    if num_failed >= MANY_FAILED * num_ended and num_failed:
        return _said(BAD, f"{num_failed:,} of {num_ended:,} requests failed", *details)
    if (alone := _alone(felt)) is not None:
        return _said(WARN, alone, "Long prompts hold up other people's tokens", *details)
    if num_failed:
        return _said(WARN, f"{num_failed:,} of {num_ended:,} requests failed", *details)
    if felt.num_waiting:
        return _said(WARN, "Requests wait for a place", *details)
    if felt.unwell:
        return _said(WARN, "Requests are served, by fewer engines than there are", *details)
    if num_ended or felt.minute.gaps.count:
        return _said(GOOD, "Requests are served", *details)
    return _said(PLAIN, "Ready; nobody has asked for a minute")


def _said(tone: str, headline: str, *details: str) -> Banner:
    return Banner(tone=tone, headline=headline, details=[each for each in details if each])


def _alone(felt: Felt) -> str | None:
    """What is said where one side of a split deployment does everything."""
    for role, other in (_SPLIT, _SPLIT[::-1]):
        if felt.ready.get(role) and not felt.ready.get(other) and not felt.ready.get("both"):
            missing = "is ready" if felt.known.get(other) else "is here"
            return f"{role.capitalize()} engines do everything: no {other} engine {missing}"
    return None


def _failures(felt: Felt) -> list[str]:
    grown = felt.minute.outcomes
    parts = [f"{grown[name]:,} {what}" for name, what in FAILED.items() if grown.get(name)]
    return [f"In the last {felt.span_s:.0f} s: {', '.join(parts)}"] if parts else []


def _queue(felt: Felt) -> list[str]:
    if not felt.num_waiting:
        return []
    return [f"{felt.num_waiting:,} wait for a place at the proxy"]


def _waits(felt: Felt) -> list[str]:
    """How fast it is, as far as there is enough to tell."""
    rate = felt.minute.ended(_SERVED) / felt.span_s if felt.span_s else 0.0
    parts = [f"{rate:.1f} requests/s" if rate else ""]
    parts += [_quantiles("first token", felt.minute.ttft), _quantiles("gap", felt.minute.gaps)]
    said = " · ".join(part for part in parts if part)
    return [said] if said else []


def _quantiles(what: str, waits: Waits) -> str:
    known = [(q, waits.quantile(q)) for q in (0.5, 0.9, 0.99)]
    parts = [f"p{round(100 * q)} {_spoken(wait)}" for q, wait in known if wait is not None]
    return f"{what} {' '.join(parts)}" if parts else ""


def _spoken(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1.0 else f"{1e3 * seconds:.3g} ms"
