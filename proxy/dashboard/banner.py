"""What users of a deployment experience now, in one sentence, and why.

It says whether requests are answered and how fast, not how the page or each engine is. It judges by
how much the counters of `/metrics`, recorded once a second, grew in the last minute.
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
"""Share of a minute's requests whose failure makes the tone bad, not a warning."""
_SERVED: Final = ("ok", "disconnected")
_SPLIT: Final = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class Waits:
    """A histogram of waiting times.

    Attributes:
        bounds: Seconds, ascending; the last one is infinite.
        cumulative: Number of waits no longer than the bound at the same index.
    """

    bounds: tuple[float, ...]
    cumulative: tuple[float, ...]

    @staticmethod
    def of(histogram: Histogram | HistogramFamily) -> Waits:
        """Return a histogram's current counts, summed over all its labels."""
        counts: dict[float, float] = {}
        for family in histogram.collect():
            for sample in family.samples:
                if sample.name.endswith("_bucket"):
                    bound = float(sample.labels["le"])
                    counts[bound] = counts.get(bound, 0.0) + sample.value
        bounds = tuple(sorted(counts))
        return Waits(bounds, tuple(counts[bound] for bound in bounds))

    def since(self, before: Waits) -> Waits:
        """Return the waits added since `before`."""
        pairs = zip(self.cumulative, before.cumulative, strict=True)
        return Waits(self.bounds, tuple(now - then for now, then in pairs))

    @property
    def count(self) -> int:
        """Number of all waits."""
        return int(self.cumulative[-1]) if self.cumulative else 0

    def quantile(self, q: float) -> float | None:
        """Return an estimate in seconds, computed like Prometheus' `histogram_quantile`.

        None if less than one wait lies beyond it: one further wait could change it arbitrarily.
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
    """A proxy's counts at one moment, or between two.

    Attributes:
        outcomes: Number of requests by outcome.
        ttft, gaps: Waits for the first token, and for each one after the second.
    """

    outcomes: Mapping[str, int]
    ttft: Waits
    gaps: Waits

    def since(self, before: Tally) -> Tally:
        """Return the counts added since `before`."""
        grown = {name: n - before.outcomes.get(name, 0) for name, n in self.outcomes.items()}
        return Tally(grown, self.ttft.since(before.ttft), self.gaps.since(before.gaps))

    def ended(self, outcomes: Iterable[str]) -> int:
        """Return how many requests ended with one of these outcomes."""
        return sum(self.outcomes.get(each, 0) for each in outcomes)


class Minute:
    """The counts of the last `SPAN_S` seconds, recorded once a second."""

    def __init__(self) -> None:
        self._kept: deque[tuple[float, Tally]] = deque()

    def note(self, tally: Tally, now_s: float) -> None:
        """Record the counts at `now_s`, in monotonic seconds."""
        self._kept.append((now_s, tally))
        while len(self._kept) > 1 and now_s - self._kept[1][0] >= SPAN_S:
            self._kept.popleft()

    @property
    def span_s(self) -> float:
        """Seconds that the counts cover; at most about `SPAN_S`."""
        return self._kept[-1][0] - self._kept[0][0] if self._kept else 0.0

    @property
    def grown(self) -> Tally | None:
        """Counts added in that time; None before the first counts."""
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
    """The line at the top of the page.

    Attributes:
        tone: One of the journal's tones.
        headline: What users experience.
        details: Reasons and speeds; may be empty.
    """

    tone: str
    headline: str
    details: list[str] = []


@dataclass(frozen=True, slots=True)
class Felt:
    """The facts that determine the banner.

    Attributes:
        unserved: Why no request can be served now; None if requests can be served.
        ready, known: Number of engines by role.
        unwell: The name of each unavailable engine, and why it is unavailable.
        num_waiting: Requests that wait for a place at the proxy.
        minute: Counts of the last `span_s` seconds.
    """

    unserved: str | None
    ready: Mapping[str, int]
    known: Mapping[str, int]
    minute: Tally
    span_s: float
    unwell: Sequence[str] = field(default=())
    num_waiting: int = 0


def banner(felt: Felt) -> Banner:
    """Return the banner for the most serious condition that applies."""
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
    """Return the headline if one side of a split deployment does everything, else None."""
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
    """Return the request rate and latencies, as far as there are enough data."""
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
