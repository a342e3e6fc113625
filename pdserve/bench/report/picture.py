"""What the charts of a report share: form, colours, and which run represents a deployment.

Knows no kind of chart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pdserve.bench.compare.result import Comparison
from pdserve.bench.compare.summary import percentiles, typical
from pdserve.bench.records import Run
from pdserve.bench.report.charts import Chart

_LEAST_MS: Final = 0.05
_COLOURS: Final = (0, 1, 2, 3, 7, 6)
_COLOURS_OF_PD: Final = (4, 5)


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture of the report.

    Attributes:
        anchor: Unique in the page.
        caption: What one sees, and of which runs.
        charts: One, or several below one another.
        names: Above each chart, if there are several.
        is_wide: It takes the page's whole width.
    """

    anchor: str
    title: str
    caption: str
    charts: Sequence[Chart]
    names: Sequence[str] = ()
    is_wide: bool = False


def colours(comparison: Comparison) -> dict[str, int]:
    """A colour for each deployment, the same in all pictures."""
    chosen = {}
    for kind, places in (
        ([each for each in comparison.deployments if each.is_disaggregated], _COLOURS_OF_PD),
        ([each for each in comparison.deployments if not each.is_disaggregated], _COLOURS),
    ):
        for index, each in enumerate(kind):
            chosen[each.label] = places[index % len(places)]
    return chosen


def typical_runs(comparison: Comparison, rate: float | None) -> dict[str, Run]:
    """The run that stands for each deployment; a deployment without runs is left out."""
    found = {}
    for each in comparison.deployments:
        runs = [run for run in comparison.runs(each.label, rate) if run.answered]
        if runs:
            found[each.label] = typical(runs)
    return found


def at_rate(rate: float | None) -> str:
    """The end of a sentence that says at which rate."""
    return "" if rate is None else f" at {rate:g} requests/s"


def ends_of(values_ms: Sequence[float]) -> tuple[float, float]:
    """Ends of an axis by powers of ten: but for the least 1 %, as of tokens that came together."""
    long = [ms for ms in values_ms if ms >= _LEAST_MS] or [_LEAST_MS]
    return percentiles(long, 1)[0], max(long)
