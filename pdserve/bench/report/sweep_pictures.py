"""Charts of sweeps: latency and throughput at each load.

Every plot has one line per sweep, and shows all measured loads. Knows no page.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pdserve.bench.digits import number
from pdserve.bench.figures import ALWAYS, METRICS, percentile_word
from pdserve.bench.report.charts import (
    NUM_COLOURS,
    Chart,
    Marker,
    Marks,
    Rule,
    Scale,
    Series,
)
from pdserve.bench.report.picture import Picture
from pdserve.bench.search import LoadAxis
from pdserve.bench.sweep import Point, Sweep

Value = Callable[[Mapping[str, Any]], float]
"""Takes a figure out of those of a run."""
_AIR: Final = 1.05


@dataclass(frozen=True, slots=True)
class Drawn:
    """A sweep among those of a page.

    Attributes:
        name: In legends; unique in the page.
        colour: Index of its colour.
    """

    sweep: Sweep
    name: str
    colour: int


def drawn_of(sweeps: Sequence[Sweep]) -> list[Drawn]:
    """Give each sweep a name and a colour of its own."""
    found: list[Drawn] = []
    for index, sweep in enumerate(sweeps):
        taken = {each.name for each in found}
        name, number_ = sweep.label, 2
        while name in taken:
            name, number_ = f"{sweep.label}, {number_}", number_ + 1
        found.append(Drawn(sweep, name, index % NUM_COLOURS))
    return found


@dataclass(frozen=True, kw_only=True)
class _Figure:
    """What is drawn over the load.

    Attributes:
        beside: Series that are drawn as they are, behind the sweeps' own.
        with_failed: Loads at which nothing was answered have this figure, too.
    """

    anchor: str
    title: str
    unit: str
    value: Value
    note: str = ""
    rules: Sequence[Rule] = ()
    beside: Sequence[Series] = ()
    is_log: bool = False
    ends: tuple[float, float] | None = None
    with_failed: bool = False


def pictures(sweeps: Sequence[Drawn]) -> list[Picture]:
    """All pictures there is data for.

    Args:
        sweeps: Over one axis, with the same objectives.
    """
    slo, share = sweeps[0].sweep.slo, sweeps[0].sweep.share
    tail = _percentile_of(share)
    wanted = [("ttft", 50.0), ("ttft", tail), ("ttft", 99.0), ("tpot", 50.0), ("itl", 99.0)]
    wanted += [("e2el", tail)] if "e2el" in slo else []
    found = [_latency(sweeps, *each) for each in dict.fromkeys(wanted)]
    found.append(_attainment(sweeps) if slo else None)
    found += [_answered(sweeps), _tokens(sweeps)]
    return [picture for picture in found if picture is not None]


def axis_words(sweep: Sweep) -> str:
    """What a load is, with its unit."""
    return "requests/s" if sweep.axis == LoadAxis.RATE.value else "requests at once"


def values_of(point: Point, value: Value) -> list[float]:
    """A figure of each run of a load that has answers: without one there is no latency."""
    return [value(run) for run in point.runs if run["completed"]]


def _percentile_of(share: float) -> float:
    """The percentile that passes an objective where fewer than `share` keep it."""
    return next((each for each in ALWAYS if each >= share * 100), max(ALWAYS))


def _latency(sweeps: Sequence[Drawn], metric: str, percent: float) -> Picture | None:
    word = percentile_word(percent)
    title = f"{METRICS[metric]} {word}"
    key = f"median_{metric}_ms" if percent == 50 else f"{word}_{metric}_ms"
    slo = sweeps[0].sweep.slo.get(metric)
    note = ""
    if slo is not None:
        share = percent_words(sweeps[0].sweep)
        note = f" The horizontal line is the objective for {share} of the requests"
        note += ", of each one's own gaps." if metric == "itl" else "."
    figure = _Figure(
        anchor=f"{metric}-{word}".replace(".", "-"),
        title=title,
        unit="ms",
        value=lambda run: float(run[key]),
        note=note,
        rules=[] if slo is None else [Rule(slo, f"objective {slo:g} ms")],
        is_log=True,
    )
    return _over_load(sweeps, figure)


def _attainment(sweeps: Sequence[Drawn]) -> Picture | None:
    share, in_words = sweeps[0].sweep.share, percent_words(sweeps[0].sweep)
    figure = _Figure(
        anchor="kept",
        title="Requests that met every objective",
        unit="share",
        value=lambda run: (
            run["pdserve"]["goodput"]["good"]
            / max(1, run["num_prompts"] - run["pdserve"]["cancelled"])
        ),
        note=f" Failed requests count as missed; {in_words} must meet the objectives.",
        rules=[Rule(share, f"{in_words} must")],
        ends=(0.0, 1.0),
        with_failed=True,
    )
    return _over_load(sweeps, figure)


def _answered(sweeps: Sequence[Drawn]) -> Picture | None:
    is_rate = sweeps[0].sweep.axis == LoadAxis.RATE.value
    points = [point for each in sweeps for point in each.sweep.points]
    most = max(run["request_throughput"] for point in points for run in point.runs)
    # No further than there is something to compare with: the rest would be pressed flat.
    end = min(max(point.load for point in points), most * _AIR)
    asked = Series(
        name="as many as asked for", colour=7, points=[(0.0, 0.0), (end, end)], is_dashed=True
    )
    figure = _Figure(
        anchor="answered",
        title="Answered requests",
        unit="requests/s",
        value=lambda run: float(run["request_throughput"]),
        note=(
            " A run also counts the time until its last answer has ended, so short runs stay "
            "below the dashed line."
        )
        if is_rate
        else "",
        beside=[asked] if is_rate else [],
        with_failed=True,
    )
    return _over_load(sweeps, figure)


def _tokens(sweeps: Sequence[Drawn]) -> Picture | None:
    figure = _Figure(
        anchor="tokens",
        title="Output tokens",
        unit="tokens/s",
        value=lambda run: float(run["output_throughput"]),
        with_failed=True,
    )
    return _over_load(sweeps, figure)


def _over_load(sweeps: Sequence[Drawn], figure: _Figure) -> Picture | None:
    """One figure over the load; None if no run has it."""
    title, unit = figure.title, figure.unit
    words = axis_words(sweeps[0].sweep)
    series = []
    for each in sweeps:
        have = []
        for point in each.sweep.points:
            found = (
                [figure.value(run) for run in point.runs]
                if figure.with_failed
                else values_of(point, figure.value)
            )
            found = [one for one in found if math.isfinite(one)]
            if found:
                have.append((point, statistics.median(found), min(found), max(found)))
        if have:
            series.append(
                Series(
                    name=each.name,
                    colour=each.colour,
                    points=[(point.load, middle) for point, middle, _, _ in have],
                    marks=Marks.LINE_AND_DOTS,
                    tips=[
                        f"{each.name}: {number(middle)} {unit} at {point.load:g} {words}"
                        + (f" ({number(low)} to {number(high)})" if high > low else "")
                        + _doubt(point)
                        for point, middle, low, high in have
                    ],
                    bars=[(low, high) for _, _, low, high in have],
                    hollow=[index for index, (point, *_) in enumerate(have) if point.why_not],
                )
            )
    if not series:
        return None
    highest = max(point.load for each in sweeps for point in each.sweep.points)
    markers = [
        Marker(each.sweep.best.load, f"{each.name}: {best_words(each.sweep)}", each.colour)
        for each in sweeps
        if each.sweep.best is not None
    ]
    return Picture(
        figure.anchor,
        title,
        "Median of the runs, with the lowest and the highest."
        + figure.note
        + (" The band is the highest load that meets the objectives." if markers else "")
        + (" Hollow: not valid." if any(s.hollow for s in series) else ""),
        [
            Chart(
                title=f"{title} over the load",
                description=f"{title} of each sweep at each load.",
                x=Scale(words, ends=(0.0, highest * _AIR)),
                y=Scale(
                    f"{title}, {unit}" if unit != "share" else "share",
                    is_log=figure.is_log,
                    ends=figure.ends,
                ),
                series=[*figure.beside, *series],
                rules=figure.rules,
                markers=markers,
            )
        ],
    )


def percent_words(sweep: Sweep) -> str:
    """The share of the requests that must meet the objectives."""
    return f"{sweep.share * 100:.4g}%"


def best_words(sweep: Sweep) -> str:
    """The highest load that meets the objectives, and whether it is certain."""
    best = sweep.best
    if best is None:
        return "no measured load meets the objectives"
    least = "" if sweep.is_bracketed else "at least "
    return f"{least}{best.load:g} {axis_words(sweep)}"


def _doubt(point: Point) -> str:
    failed = sum(run["failed"] for run in point.runs)
    words = [f"{failed} failed"] if failed else []
    words += ["not valid"] if point.why_not else []
    return "".join(f"; {each}" for each in words)
