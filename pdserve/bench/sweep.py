"""Measures an endpoint at several loads, and finds the highest that meets the objectives.

Requested loads are measured in turn, and all of them `num_runs` times, so that a temporarily slow
machine affects all of them, not one. Loads that the search adds are measured `num_runs` times in a
row, because each determines the next. Between two runs engines reset their prefix caches, so that
no run benefits from another; an endpoint that cannot do that is reported. Repeats have different
seeds; all loads of one repeat have the same.

A load *holds* if the required share of all requests of all its runs was answered and met every
objective; failed requests count as missed. Knows neither HTTP nor data sets: `measure` does.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from pdserve.bench.files import write_file
from pdserve.bench.search import LoadAxis, Search, bracket
from pdserve.errors import ConfigError, PdserveError
from pdserve.wire.seal import UNREADABLE

KIND: Final = "sweep"

Figures = Mapping[str, Any]
Measure = Callable[[float, int], Awaitable[Figures]]
"""Runs one load once: maps (load, repeat from 0) to the run's `figures.figures`."""


class Point(msgspec.Struct, kw_only=True):
    """One load and its results.

    Attributes:
        rate: Requests per second, in a sweep over rates.
        concurrency: Requests in flight, in a sweep over those.
        runs: Figures of each run, by repeat.
        num_requests, num_kept: Over all runs: requests sent and not cancelled on purpose; and those
            answered within every objective.
        attainment: The share of the latter; None without objectives.
        holds: Whether that share is enough; None without objectives.
        why_not: Why its figures are not valid; empty if they are.
    """

    rate: float | None = None
    concurrency: int | None = None
    runs: list[dict[str, Any]] = []
    num_requests: int = 0
    num_kept: int | None = None
    attainment: float | None = None
    holds: bool | None = None
    why_not: list[str] = []

    @property
    def load(self) -> float:
        """Rate or concurrency."""
        return self.rate if self.rate is not None else float(self.concurrency or 0)


class Sweep(msgspec.Struct, kw_only=True):
    """A whole sweep, as in its file.

    Attributes:
        kind: Identifies the file as a sweep.
        slo: Objectives by name, in milliseconds; empty if none were given.
        share: Share of the requests that must meet them.
        axis: "rate" or "concurrency".
        points: Points by load, ascending.
        best_rate, best_concurrency: The highest load that holds with none below it that fails;
            None if there is none, or there are no objectives.
        is_bracketed: Whether a load above the best was measured and failed, so that the limit is
            known; False if the best is only a lower bound, or even the lowest load failed.
        statements: Sentences that belong to the result.
    """

    kind: str = KIND
    label: str
    base_url: str
    model: str
    dataset: str
    slo: dict[str, float]
    share: float
    axis: str
    points: list[Point] = []
    best_rate: float | None = None
    best_concurrency: int | None = None
    is_bracketed: bool = False
    statements: list[str] = []
    seed: int = 0
    num_runs: int = 1
    started_wall_s: float = 0.0
    environment: dict[str, Any] = {}

    @property
    def best(self) -> Point | None:
        """The point of the best load."""
        load = self.best_rate if self.axis == LoadAxis.RATE.value else self.best_concurrency
        return next((point for point in self.points if point.load == load), None)


async def carry_out(
    sweep: Sweep,
    search: Search,
    measure: Measure,
    *,
    num_runs: int,
    on_run: Callable[[Point, int], None],
) -> None:
    """Measure until the search is over, and write points, the best and statements into `sweep`.

    If the endpoint ends, the sweep ends too; earlier measurements stay, with a statement about it.

    Args:
        sweep: Filled while it runs.
        search: The loads to measure.
        measure: Runs one load.
        num_runs: Runs of each load.
        on_run: Called after each run with its point and repeat.
    """
    points: dict[float, Point] = {}

    async def run(load: float, repeat: int) -> None:
        figures = dict(await measure(load, repeat))
        point = points.get(load)
        if point is None:
            point = points[load] = _point(search.axis, load)
            sweep.points = sorted(points.values(), key=lambda each: each.load)
        _add(point, figures, sweep)
        on_run(point, repeat)

    try:
        for repeat in range(num_runs):
            for load in search.loads:
                await run(load, repeat)
        while (wanted := search.next_load(_verdicts(points))) is not None:
            for repeat in range(num_runs):
                await run(wanted, repeat)
    except PdserveError as error:
        sweep.statements.append(f"The sweep ended early: {error.message}")
        raise
    finally:
        conclude(sweep, search)


def _point(axis: LoadAxis, load: float) -> Point:
    return Point(rate=load) if axis is LoadAxis.RATE else Point(concurrency=int(load))


def _add(point: Point, figures: dict[str, Any], sweep: Sweep) -> None:
    point.runs.append(figures)
    own = figures["pdserve"]
    point.num_requests += _num_counted(figures)
    point.why_not += [why for why in own["why_not"] if why not in point.why_not]
    if sweep.slo:
        point.num_kept = (point.num_kept or 0) + own["goodput"]["good"]
        point.attainment = point.num_kept / max(1, point.num_requests)
        point.holds = point.attainment >= sweep.share


def _num_counted(figures: Figures) -> int:
    """Number of requests that the client did not cancel on purpose."""
    return int(figures["num_prompts"]) - int(figures["pdserve"]["cancelled"])


def _verdicts(points: Mapping[float, Point]) -> dict[float, bool]:
    """Without objectives every load counts as held, and no search follows."""
    return {load: point.holds is not False for load, point in points.items()}


def conclude(sweep: Sweep, search: Search) -> None:
    """Write the best load, and statements about it, into `sweep`."""
    axis, points = search.axis, {point.load: point for point in sweep.points}
    doubtful = [point for point in sweep.points if point.why_not]
    if doubtful:
        sweep.statements.append(
            f"Not valid at {_loads([point.load for point in doubtful], axis)}, where the figures "
            f"do not measure the server alone. {doubtful[0].why_not[0]} All reasons are in "
            "why_not of the runs."
        )
    failed = [load for load, point in points.items() if any(run["failed"] for run in point.runs)]
    if failed:
        sweep.statements.append(f"Requests failed at {_loads(failed, axis)}.")
    if not sweep.slo or not points:
        return
    found = bracket(_verdicts(points))
    if axis is LoadAxis.RATE:
        sweep.best_rate = found.held
    elif found.held is not None:
        sweep.best_concurrency = int(found.held)
    sweep.is_bracketed = found.held is not None and found.failed is not None
    share = f"{sweep.share * 100:.4g}%"
    if found.held is None:
        assert found.failed is not None
        sweep.statements.append(
            f"No measured load meets the objectives: at {_load(found.failed, axis)} "
            f"{_share(points[found.failed])} of the requests met them, and {share} must. Measure "
            "lower loads, or loosen --slo."
        )
    elif found.failed is None:
        sweep.statements.append(
            f"The limit was not reached: {_load(found.held, axis)} still meets the objectives, so "
            "the highest load that does is at least that; "
            + ("raise --max-rate" if axis is LoadAxis.RATE else "raise --max-concurrency-limit")
            + " or measure higher loads."
        )
    else:
        sweep.statements.append(
            f"The highest load that meets the objectives for {share} of the requests is between "
            f"{_load(found.held, axis)} ({_share(points[found.held])}) and "
            f"{_load(found.failed, axis)} ({_share(points[found.failed])})."
        )
    if found.contradictions:
        sweep.statements.append(
            f"{_loads(found.contradictions, axis).capitalize()} met the objectives although the "
            f"lower load {_load(found.failed or 0.0, axis)} did not: the runs are noisy or too "
            "short. The lower load counts; raise --num-runs or make the runs longer."
        )
    for lower, higher in _rises(sweep.points):
        sweep.statements.append(
            f"Attainment rose with the load, from {_share(lower)} at {_load(lower.load, axis)} to "
            f"{_share(higher)} at {_load(higher.load, axis)}: all figures contain noise of that "
            "size."
        )
    for point in sweep.points:
        if point.num_requests < _needed(sweep.share):
            sweep.statements.append(
                f"{point.num_requests} requests at {_load(point.load, axis)} are too few for a "
                f"share of {share}, because a single request decides. Send more (--num-prompts, "
                "--seconds-per-run or --num-runs)."
            )
            break


def _rises(points: Sequence[Point]) -> list[tuple[Point, Point]]:
    """Neighbours whose higher load did clearly better: by over two standard errors."""
    found = []
    counted = [point for point in points if point.num_requests]
    for lower, higher in itertools.pairwise(counted):
        one, other = lower.attainment, higher.attainment
        if one is None or other is None or other <= one:
            continue
        error = math.sqrt(
            one * (1 - one) / lower.num_requests + other * (1 - other) / higher.num_requests
        )
        if other - one > 2 * error:
            found.append((lower, higher))
    return found


def _needed(share: float) -> float:
    """Number of requests below which a single one can move the share over its limit."""
    return 2 / (1 - share) if share < 1 else 1.0


# ---- words -----------------------------------------------------------------------------

COLUMNS: Final = (
    ("req/s", "request_throughput", ".2f"),
    ("out tok/s", "output_throughput", ".0f"),
    ("TTFT p50", "median_ttft_ms", ".1f"),
    ("p99", "p99_ttft_ms", ".1f"),
    ("TPOT p50", "median_tpot_ms", ".2f"),
    ("ITL p99", "p99_itl_ms", ".2f"),
)


def heading(sweep: Sweep) -> str:
    """The table's first line; times are in milliseconds."""
    names = [sweep.axis, "run", "done", "failed", *(name for name, _, _ in COLUMNS)]
    return _line([*names, "kept" if sweep.slo else ""])


def run_line(point: Point, repeat: int) -> str:
    """One run in the table."""
    figures = point.runs[-1]
    goodput = figures["pdserve"]["goodput"]
    kept = "" if goodput is None else f"{goodput['good'] / max(1, _num_counted(figures)):.1%}"
    marks = "" if figures["pdserve"]["valid"] else "  not valid"
    return (
        _line(
            [
                f"{point.load:g}",
                str(repeat + 1),
                str(figures["completed"]),
                str(figures["failed"]),
                *_medians([figures]),
                kept,
            ]
        )
        + marks
    )


def summary(sweep: Sweep) -> str:
    """All loads, medians over their runs, and statements."""
    lines = [heading(sweep)]
    for point in sweep.points:
        verdict = {True: "  holds", False: "  fails", None: ""}[point.holds]
        lines.append(
            _line(
                [
                    f"{point.load:g}",
                    f"{len(point.runs)} runs" if len(point.runs) != 1 else "1 run",
                    str(sum(run["completed"] for run in point.runs)),
                    str(sum(run["failed"] for run in point.runs)),
                    *_medians(point.runs),
                    "" if point.attainment is None else f"{point.attainment:.1%}",
                ]
            )
            + verdict
        )
    return "\n".join([*lines, "", *sweep.statements]).rstrip()


def _medians(runs: Sequence[Figures]) -> list[str]:
    """Median over the runs with answers, because the others have no latency."""
    answered = [run for run in runs if run["completed"]]
    if not answered:
        return ["-"] * len(COLUMNS)
    return [
        format(statistics.median(run[key] for run in answered), form) for _, key, form in COLUMNS
    ]


def _line(cells: Sequence[str]) -> str:
    widths = (11, 7, 6, 6, *([10] * len(COLUMNS)), 7)
    return " ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def _load(load: float, axis: LoadAxis) -> str:
    return f"{load:g} {axis.unit}"


def _loads(loads: Sequence[float], axis: LoadAxis) -> str:
    return f"{', '.join(f'{load:g}' for load in sorted(loads))} {axis.unit}"


def _share(point: Point) -> str:
    return "none" if point.attainment is None else f"{point.attainment:.1%}"


# ---- file ------------------------------------------------------------------------------


def save(sweep: Sweep, path: Path) -> None:
    """Write the sweep as one JSON object. Its directory is created if missing.

    Raises:
        ConfigError: The file cannot be written.
    """
    write_file(path, msgspec.json.format(msgspec.json.encode(sweep), indent=1))


def is_sweep(content: bytes) -> bool:
    """Whether a file's content was written by `save`."""
    try:
        return bool(msgspec.json.decode(content, type=_AnyFile).kind == KIND)
    except UNREADABLE:
        return False


class _AnyFile(msgspec.Struct):
    kind: Any = None


def load(path: Path) -> Sweep:
    """Read a file of `save`.

    Raises:
        ConfigError: The file cannot be read, or is not a sweep.
    """
    try:
        sweep = msgspec.json.decode(path.read_bytes(), type=Sweep)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except UNREADABLE as error:
        raise ConfigError(f"{path} is not a saved sweep: {error}") from error
    if sweep.kind != KIND:
        raise ConfigError(f"{path} is not a saved sweep: its kind is {sweep.kind!r}")
    return sweep
