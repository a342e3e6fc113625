"""The table of a comparison: figures of each deployment over its repeats, and ratios.

A figure is computed for every run separately; the table shows the median over the repeats, and the
lowest and highest show how reliable it is. Percentiles are numpy's (linear between neighbours), as
in vLLM. Knows no text and no plot.
"""

from __future__ import annotations

import enum
import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from pdserve.bench.compare.result import Comparison
from pdserve.bench.figures import prompt_figures
from pdserve.bench.goodput import Slo, is_within
from pdserve.bench.records import Outcome, Run

_BEHIND: Final = 0.25
"""Share of a schedule's length: a deployment that answers for longer after its end fell behind."""
_LEAST_BEHIND_S: Final = 2.0

STEADY: Final = "steady"
"""Group of `pd-interference` whose gaps between tokens disaggregation should improve."""


class Figure(enum.Enum):
    """A column of the table: name, unit, and whether less is better."""

    TTFT_P50 = ("TTFT p50", "ms", True)
    TTFT_P99 = ("TTFT p99", "ms", True)
    ITL_P50 = ("ITL p50", "ms", True)
    ITL_P99 = ("ITL p99", "ms", True)
    ITL_MAX = ("ITL max", "ms", True)
    TPOT_P50 = ("TPOT p50", "ms", True)
    THROUGHPUT = ("output", "tok/s", False)
    GOODPUT = ("goodput", "req/s", False)
    COMPUTED = ("computed", "prompt tok", True)
    CACHED = ("cached", "%", False)

    @property
    def title(self) -> str:
        """Its name."""
        return self.value[0]

    @property
    def unit(self) -> str:
        """Of its values."""
        return self.value[1]

    @property
    def less_is_better(self) -> bool:
        """Times; not rates."""
        return self.value[2]


@dataclass(frozen=True, slots=True)
class Value:
    """A figure over repeats.

    Attributes:
        median: The value in the table.
        low, high: Lowest and highest over the repeats.
    """

    median: float
    low: float
    high: float

    @property
    def noise(self) -> float:
        """From lowest to highest, as a share of the median."""
        return (self.high - self.low) / self.median if self.median else 0.0


@dataclass(frozen=True, slots=True)
class Ratio:
    """A deployment's improvement over the baseline, as a factor; below 1 it is worse.

    Attributes:
        median: Ratio of the two medians.
        low, high: Over the repeats, each against the same repeat of the baseline.
    """

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Row:
    """One deployment at one rate.

    Attributes:
        values: Figures; one is missing if no request had it.
        ratios: Ratios to the baseline; empty for the baseline itself.
        num_requests, num_failed: Totals over all repeats.
        why_not: Why runs of it are not valid; empty if all are.
        is_behind: Whether the deployment fell behind the schedule in some run.
    """

    label: str
    rate: float | None
    values: Mapping[Figure, Value]
    ratios: Mapping[Figure, Ratio]
    num_requests: int
    num_failed: int
    why_not: Sequence[str]
    is_behind: bool

    @property
    def is_valid(self) -> bool:
        """Whether all of its runs are valid."""
        return not self.why_not


def rows(comparison: Comparison, rate: float | None) -> list[Row]:
    """The table at one rate, in the order of the deployments."""
    by_label = {
        each.label: [figures_of(run, comparison.slos) for run in comparison.runs(each.label, rate)]
        for each in comparison.deployments
    }
    base = by_label.get(comparison.baseline, [])
    found = []
    for label, repeats in by_label.items():
        if not repeats:
            continue
        runs = comparison.runs(label, rate)
        values = {figure: _value([r[figure] for r in repeats if figure in r]) for figure in Figure}
        found.append(
            Row(
                label=label,
                rate=rate,
                values={figure: value for figure, value in values.items() if value is not None},
                ratios={} if label == comparison.baseline else _ratios(repeats, base),
                num_requests=sum(len(run.outcomes) for run in runs),
                num_failed=sum(one.has_failed for run in runs for one in run.outcomes),
                why_not=comparison.why_not(label, rate),
                is_behind=any(fell_behind(run) for run in runs),
            )
        )
    return found


def _value(values: Sequence[float]) -> Value | None:
    if not values:
        return None
    return Value(statistics.median(values), min(values), max(values))


def _ratios(
    repeats: Sequence[Mapping[Figure, float]], base: Sequence[Mapping[Figure, float]]
) -> dict[Figure, Ratio]:
    found = {}
    for figure in Figure:
        ours = _value([r[figure] for r in repeats if figure in r])
        theirs = _value([r[figure] for r in base if figure in r])
        if ours is None or theirs is None:
            continue
        pairs = [
            better(figure, mine[figure], other[figure])
            for mine, other in zip(repeats, base, strict=False)
            if figure in mine and figure in other
        ]
        known = [ratio for ratio in pairs if ratio is not None]
        median = better(figure, ours.median, theirs.median)
        if known and median is not None:
            found[figure] = Ratio(median, min(known), max(known))
    return found


def better(figure: Figure, value: float, base: float) -> float | None:
    """Return the improvement of `value` over `base` as a factor; None if one of them is 0."""
    if value <= 0 or base <= 0:
        return None
    return base / value if figure.less_is_better else value / base


def figures_of(run: Run, slos: Sequence[Slo]) -> dict[Figure, float]:
    """The figures of one run.

    TTFT and rates cover all requests; ITL and TPOT only the steady group if there is one.
    """
    good = run.answered
    figures: dict[Figure, float] = {}
    if run.duration_s > 0:
        tokens = sum(one.num_output_tokens for one in good)
        figures[Figure.THROUGHPUT] = tokens / run.duration_s
        if slos:
            num_kept = sum(is_within(one, slos) for one in good)
            figures[Figure.GOODPUT] = num_kept / run.duration_s
    if not good:
        return figures
    ttft = [one.ttft_s * 1e3 for one in good]
    gaps = [gap * 1e3 for one in steady(run) for gap in one.itl_s]
    tpot = [one.tpot_s * 1e3 for one in steady(run) if one.tpot_s is not None]
    figures[Figure.TTFT_P50], figures[Figure.TTFT_P99] = percentiles(ttft, 50, 99)
    if gaps:
        figures[Figure.ITL_P50], figures[Figure.ITL_P99] = percentiles(gaps, 50, 99)
        figures[Figure.ITL_MAX] = max(gaps)
    if tpot:
        figures[Figure.TPOT_P50] = percentiles(tpot, 50)[0]
    if (prompts := prompt_figures(good)) is not None:
        figures[Figure.COMPUTED] = float(prompts["computed_tokens"])
        figures[Figure.CACHED] = 100 * prompts["hit_rate"]
    return figures


def percentiles(values: Sequence[float], *percents: float) -> list[float]:
    """Percentiles of values, in the values' unit."""
    return [float(value) for value in np.percentile(np.asarray(values), percents)]


def steady(run: Run) -> list[Outcome]:
    """Answered requests of the steady group; without one, all of them."""
    return [one for one in run.answered if one.group == STEADY] or run.answered


def others(run: Run) -> list[Outcome]:
    """Requests of the other groups, whose prompts interfere; none without a steady group."""
    if not has_steady(run):
        return []
    return [one for one in run.answered if one.group != STEADY]


def has_steady(run: Run) -> bool:
    """Whether the run's data set marks steady decoders."""
    return any(one.group == STEADY for one in run.outcomes)


def fell_behind(run: Run) -> bool:
    """Whether answers were still missing long after the last request was due.

    Long is a quarter of the schedule plus the best time of a request of the slowest group.
    """
    good = run.answered
    if not good:
        return False
    due_s = max(one.scheduled_s for one in run.outcomes)
    best_s: dict[str, float] = {}
    for one in good:
        best_s[one.group] = min(best_s.get(one.group, one.e2el_s), one.e2el_s)
    return run.duration_s - due_s > max(_LEAST_BEHIND_S, _BEHIND * due_s) + max(best_s.values())


def typical(runs: Sequence[Run]) -> Run:
    """The run for plots of single requests: the one with the median ITL p99."""

    def height(run: Run) -> float:
        return figures_of(run, ()).get(Figure.ITL_P99, 0.0)

    return sorted(runs, key=height)[(len(runs) - 1) // 2]


_PREFILL: Final = "prefill"
"""The stage in which the prompt is computed, as a pdserve server reports it."""


def prefill_of(one: Outcome) -> tuple[float, float]:
    """The time in which a request's prompt was computed, in seconds of the run.

    As the server reports it; otherwise from its sending to its first token, which includes the
    queue.
    """
    if _PREFILL not in one.stages:
        return one.sent_s, one.chunk_s[0]
    at = one.sent_s
    for name, ms in one.stages.items():
        if name == _PREFILL:
            return at, at + ms / 1e3
        at += ms / 1e3
    raise AssertionError("the stage is there")


def beside_prefills(run: Run) -> tuple[int, int]:
    """Count the steady decoders' gaps that overlap an interfering prefill, and all gaps."""
    spans = np.array(sorted(prefill_of(one) for one in others(run))).reshape(-1, 2)
    gaps = np.array(
        [pair for one in steady(run) for pair in itertools.pairwise(one.chunk_s)]
    ).reshape(-1, 2)
    if not len(spans):
        return 0, len(gaps)
    # A gap overlaps a span if more spans have begun before its end than had ended by its start.
    begun = np.searchsorted(spans[:, 0], gaps[:, 1], side="left")
    ended = np.searchsorted(np.sort(spans[:, 1]), gaps[:, 0], side="right")
    return int(np.count_nonzero(begun > ended)), len(gaps)
