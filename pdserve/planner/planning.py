"""Finds the layout of engines that meets objectives, and how certain that is.

Every figure comes from a simulation (`fleet`) with real policies and schedulers, and with given or
learned times. It simulates the layouts that a closed form considers likeliest, and engines for both
roles; then fewer engines or more, the highest load of the best layout, and that layout with all
times longer and shorter by their error.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec

from pdserve.bench.search import LoadAxis, Search, bracket
from pdserve.planner.candidates import demand_of, sized, splits
from pdserve.planner.figures import LoadFigures, load_figures
from pdserve.planner.fleet import Fleet
from pdserve.planner.work import FleetLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.bench.goodput import Slo
    from pdserve.planner.work import FleetCosts, Work

_NUM_SPLITS: Final = 7
"""Layouts of prefill and decode engines that are simulated."""
_NUM_TRIED: Final = 2
"""The same for each other number of engines."""
MAX_GROWTH: Final = 4
"""Multiple of the given engines up to which more engines are tried."""
MAX_LOAD: Final = 32.0
"""Highest load that is tried, as a multiple of the workload's rate."""
_TOLERANCE: Final = 0.1
"""Relative precision of the highest load."""


class TimesError(msgspec.Struct, frozen=True, kw_only=True):
    """Relative errors of the assumed times."""

    prefill: float
    step: float
    wire: float


class LayoutFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of the workload on one layout.

    Attributes:
        holds: Whether as many requests as required meet the objectives.
    """

    layout: str
    num_engines: int
    holds: bool
    figures: LoadFigures


class FleetPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The result of planning.

    Attributes:
        rows: Layouts of the given engines, the best first.
        best: The first of them.
        close: Other layouts that are as good as the best, within the error of the times.
        goodput_range: Goodput of the best layout, with all times longer and shorter by their error.
        fewest: The layout with the fewest engines that holds; None if no tried one does.
        most_engines: The most engines of a layout that was tried.
        highest_load: Highest load of the best layout, as a multiple of the workload's rate; None if
            it holds none.
    """

    rows: list[LayoutFigures]
    best: str
    close: list[str]
    goodput_range: tuple[float, float]
    fewest: LayoutFigures | None
    most_engines: int
    highest_load: float | None


@dataclass(frozen=True, kw_only=True)
class PlanQuestion:
    """The input of planning.

    Attributes:
        slos: Objectives of a request.
        share: Share of the requests that must meet them.
        settings: Fields of `ProxyConfig`: policies and their objectives.
        size: Size of an engine; its numbers of engines are ignored.
    """

    workload: Sequence[Work]
    slos: Sequence[Slo]
    share: float
    settings: dict[str, Any]
    costs: FleetCosts
    error: TimesError
    size: FleetLayout

    @property
    def itl_slo_s(self) -> float:
        """Objective for the time between tokens, in seconds."""
        return float(self.settings["itl_slo_s"])


@dataclass
class Planner:
    """Simulates the layouts that a question needs, each once.

    Attributes:
        on_simulated: Called after each simulation with its number, the layout and its figures.
    """

    question: PlanQuestion
    on_simulated: Callable[[int, str, LoadFigures], None] = lambda number, layout, figures: None
    _rows: dict[str, LayoutFigures] = field(default_factory=dict)
    _num: int = 0

    def plan(self, num_engines: int, layouts: Sequence[FleetLayout] = ()) -> FleetPlan:
        """Return the best of some layouts, or of all layouts of `num_engines` engines."""
        tried = layouts or self._layouts(num_engines, _NUM_SPLITS)
        rows = sorted((self.row(each) for each in tried), key=rank)
        best = rows[0]
        layout = next(each for each in tried if str(each) == best.layout)
        slower = self.simulate(layout, off=1.0).goodput
        faster = self.simulate(layout, off=-1.0).goodput
        low, high = min(slower, best.figures.goodput), max(faster, best.figures.goodput)
        return FleetPlan(
            rows=rows,
            best=best.layout,
            close=[each.layout for each in rows[1:] if each.figures.goodput >= low],
            goodput_range=(low, high),
            fewest=_fewest_of(rows) if layouts else self._search_fewest(best),
            most_engines=max(each.num_engines for each in self._rows.values()),
            highest_load=self._highest_load(layout, holds=best.holds),
        )

    def row(self, layout: FleetLayout) -> LayoutFigures:
        """Return the figures of the unchanged workload on a layout."""
        name = str(layout)
        if name not in self._rows:
            figures = self.simulate(layout)
            self._rows[name] = LayoutFigures(
                layout=name,
                num_engines=layout.num_engines,
                holds=self._holds(figures),
                figures=figures,
            )
        return self._rows[name]

    def simulate(self, layout: FleetLayout, *, load: float = 1.0, off: float = 0.0) -> LoadFigures:
        """Simulate the workload on a layout.

        Args:
            load: Factor of the workload's request rate.
            off: Multiple of their error by which times are longer.
        """
        asked = self.question
        fleet = Fleet(
            sized(layout, asked.size), asked.settings, longer(asked.costs, asked.error, off)
        )
        fleet.teach(asked.workload)
        workload = [dataclasses.replace(each, at_s=each.at_s / load) for each in asked.workload]
        outcomes = fleet.run(workload)
        figures = load_figures(
            [each.as_measured(number) for number, each in enumerate(outcomes)], asked.slos
        )
        self._num += 1
        self.on_simulated(self._num, str(layout), figures)
        return figures

    def _holds(self, figures: LoadFigures) -> bool:
        return figures.goodput >= self.question.share

    def _layouts(self, num_engines: int, num_splits: int) -> list[FleetLayout]:
        asked = self.question
        demand = demand_of(asked.workload, asked.costs)
        best = splits(num_engines, demand, asked.costs, asked.itl_slo_s)
        return [*best[:num_splits], FleetLayout(0, 0, num_engines)]

    def _first_that_holds(self, num_engines: int) -> LayoutFigures | None:
        rows = (self.row(each) for each in self._layouts(num_engines, _NUM_TRIED))
        return next((each for each in rows if each.holds), None)

    def _search_fewest(self, best: LayoutFigures) -> LayoutFigures | None:
        """Search for the fewest engines that hold, assuming that more engines are never worse."""
        failing, found = 0, best if best.holds else None
        limit = best.num_engines * MAX_GROWTH
        trying = best.num_engines
        while found is None and trying < limit:
            failing, trying = trying, min(limit, 2 * trying)
            found = self._first_that_holds(trying)
        while found is not None and found.num_engines - failing > 1:
            middle = (failing + found.num_engines) // 2
            fewer = self._first_that_holds(middle)
            failing, found = (middle, found) if fewer is None else (failing, fewer)
        return found

    def _highest_load(self, layout: FleetLayout, *, holds: bool) -> float | None:
        search = Search(
            axis=LoadAxis.RATE, highest=MAX_LOAD, is_narrowing=True, tolerance=_TOLERANCE
        )
        verdicts = {1.0: holds}
        while (load := search.next_load(verdicts)) is not None:
            verdicts[load] = self._holds(self.simulate(layout, load=load))
        return bracket(verdicts).held


def longer(costs: FleetCosts, error: TimesError, off: float) -> FleetCosts:
    """Return costs whose engine times are longer by `off` times their error."""
    factors = {
        "prefill": 1 + off * error.prefill,
        "decode": 1 + off * error.step,
        "wire": 1 + off * error.wire,
    }
    scaled = {
        name: seconds * factors[kind]
        for name, seconds in dataclasses.asdict(costs).items()
        if (kind := name.partition("_")[0]) in factors
    }
    return dataclasses.replace(costs, **scaled)


def _fewest_of(rows: Sequence[LayoutFigures]) -> LayoutFigures | None:
    """Return the first of those with the fewest engines that hold."""
    return min((each for each in rows if each.holds), key=lambda row: row.num_engines, default=None)


def rank(row: LayoutFigures) -> tuple[float, int, int, float, float]:
    """Rank by the highest goodput, then by the fewest engines and failures, then by latencies."""
    figures = row.figures
    return (
        -figures.goodput,
        row.num_engines,
        figures.num_failed,
        figures.ttft_p99_ms,
        figures.tpot_p99_ms,
    )
