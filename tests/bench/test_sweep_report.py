"""The page of sweeps: what is in its pictures, and which files may stand side by side."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdserve.bench import files
from pdserve.bench import sweep as sweeps
from pdserve.bench.compare.result import save as save_comparison
from pdserve.bench.figures import figures
from pdserve.bench.report.charts import Chart, Marker, Rule
from pdserve.bench.report.sweep_page import render_sweeps
from pdserve.bench.report.sweep_pictures import drawn_of, pictures
from pdserve.bench.sweep import Point, Sweep
from pdserve.commands.bench_plot import drawn
from pdserve.errors import ConfigError
from tests.bench import synthetic


def point(rate: float, ttft_ms: float, *, kept: float = 1.0, **fields: Any) -> Point:
    """Two runs of ten requests, the second a little slower."""
    runs = []
    for repeat in range(2):
        found = figures(synthetic.run("x", num_steady=10, num_out=20, num_bursts=0))
        found |= {f"{word}_ttft_ms": ttft_ms + repeat for word in ("median", "p90", "p99")}
        found |= {"request_throughput": min(rate, 5.0), "output_throughput": min(rate, 5.0) * 20}
        found["pdserve"]["goodput"] = {"good": round(10 * kept), "share": kept}
        runs.append(found)
    own = {"num_requests": 20, "num_kept": round(20 * kept), "attainment": kept}
    return Point(rate=rate, runs=runs, **(own | {"holds": kept >= 0.9} | fields))


def sweep(label: str = "P/D", **fields: Any) -> Sweep:
    own = {
        "base_url": "http://127.0.0.1:1",
        "model": "boxed",
        "dataset": "random in=8 out=20",
        "slo": {"ttft": 100.0},
        "share": 0.9,
        "axis": "rate",
        "points": [point(2.0, 40.0), point(4.0, 80.0), point(8.0, 300.0, kept=0.2)],
        "best_rate": 4.0,
        "is_bracketed": True,
        "statements": ["The highest load is between 4 and 8."],
        "num_runs": 2,
        "environment": {"date": "2026-11-22", "cpu": "a test"},
    }
    return Sweep(label=label, **(own | fields))


def chart_of(anchor: str, *of: Sweep) -> Chart:
    [found] = [each for each in pictures(drawn_of(of)) if each.anchor == anchor]
    return found.charts[0]


def save(made: Sweep, path: Path) -> Path:
    sweeps.save(made, path)
    return path


def test_each_load_is_a_dot_at_its_median_with_least_and_greatest() -> None:
    [series] = chart_of("ttft-p90", sweep()).series
    assert series.tips == [
        "P/D: 40.5 ms at 2 requests/s (40.0 to 41.0)",
        "P/D: 80.5 ms at 4 requests/s (80.0 to 81.0)",
        "P/D: 300 ms at 8 requests/s (300 to 301)",
    ]
    assert series.points == [(2.0, 40.5), (4.0, 80.5), (8.0, 300.5)]
    assert series.bars == [(40.0, 41.0), (80.0, 81.0), (300.0, 301.0)]


def test_latency_has_its_objective_across_and_the_highest_load_that_holds_up() -> None:
    chart = chart_of("ttft-p90", sweep())
    assert chart.rules == [Rule(100.0, "objective 100 ms")]
    assert chart.markers == [Marker(4.0, "P/D: 4 requests/s", 0)]


def test_a_latency_without_an_objective_has_none_across() -> None:
    assert chart_of("tpot-p50", sweep()).rules == []


def test_a_limit_that_was_not_reached_is_said_to_be_at_least_that() -> None:
    made = sweep(is_bracketed=False)
    assert chart_of("tokens", made).markers[0].tip == "P/D: at least 4 requests/s"
    assert "at least, the limit was not reached" in render_sweeps([made])


@pytest.mark.parametrize(("share", "anchor"), [(0.5, "ttft-p50"), (0.93, "ttft-p95")])
def test_the_percentile_that_decides_is_drawn(share: float, anchor: str) -> None:
    assert chart_of(anchor, sweep(share=share)).series


def test_a_load_whose_runs_are_not_valid_is_hollow() -> None:
    points = [point(2.0, 40.0), point(4.0, 80.0, why_not=["The client was late."])]
    [series] = chart_of("tokens", sweep(points=points)).series
    assert series.hollow == [1]
    assert series.tips[1].endswith("; not valid")
    assert "not valid" not in series.tips[0]


def test_a_load_at_which_nothing_was_answered_has_no_latency_and_no_throughput() -> None:
    dead = point(8.0, 0.0, kept=0.0)
    for run in dead.runs:
        run |= {"completed": 0, "failed": 10, "output_throughput": 0.0, "request_throughput": 0.0}
    made = sweep(points=[point(2.0, 40.0), dead], best_rate=2.0)
    assert [x for x, _ in chart_of("ttft-p90", made).series[0].points] == [2.0]
    assert chart_of("tokens", made).series[0].tips[1] == (
        "P/D: 0 tokens/s at 8 requests/s; 20 failed"
    )


def test_sweeps_of_one_label_keep_apart() -> None:
    assert [each.name for each in drawn_of([sweep("a"), sweep("a"), sweep("b")])] == [
        "a",
        "a, 2",
        "b",
    ]


def test_a_sweep_without_objectives_is_drawn_without_a_best() -> None:
    points = [point(2.0, 40.0, holds=None, attainment=None), point(4.0, 80.0, holds=None)]
    for each in points:
        for run in each.runs:
            run["pdserve"]["goodput"] = None
    page = render_sweeps([sweep(slo={}, points=points, best_rate=None, statements=[])])
    assert "highest load" not in page
    assert "Without objectives" in page


def test_every_picture_is_in_the_page_and_a_label_stays_text() -> None:
    page = render_sweeps([sweep("a"), sweep("</script><b>&")])
    assert page.count('class="chart"') == 8
    assert "<b>&" not in page


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"slo": {"ttft": 50.0}}, "has the objectives ttft ≤ 50 ms for 90% of the requests"),
        ({"share": 0.99}, "99% of the requests"),
        (
            {"axis": "concurrency", "best_rate": None},
            "varies concurrency and that of a varies rate",
        ),
    ],
)
def test_sweeps_that_cannot_be_compared_are_refused(fields: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        render_sweeps([sweep("a"), sweep("b", **fields)])


def test_saved_sweeps_become_a_page(tmp_path: Path) -> None:
    paths = [save(sweep(name), tmp_path / f"{name}.json") for name in ("one", "two")]
    page = drawn(paths)
    assert "highest load that holds, one" in page
    assert "two: The highest load is between 4 and 8." in page


def test_a_sweep_beside_a_run_or_a_comparison_is_refused(tmp_path: Path) -> None:
    path = save(sweep(), tmp_path / "sweep.json")
    run = synthetic.run("a")
    files.save(run, figures(run), tmp_path / "run.json")
    save_comparison(synthetic.comparison(num_runs=1), tmp_path / "comparison.json")
    for name in ("run.json", "comparison.json"):
        with pytest.raises(ConfigError, match=rf"sweep.json is a sweep and .*{name} is not"):
            drawn([path, tmp_path / name])


def test_sweeps_in_which_nothing_was_answered_are_refused(tmp_path: Path) -> None:
    made = sweep()
    for each in made.points:
        for run in each.runs:
            run["completed"] = 0
    with pytest.raises(ConfigError, match="nothing to plot"):
        drawn([save(made, tmp_path / "s.json")])


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    content = msgspec.to_builtins(sweep()) | {"points": 3}
    (tmp_path / "s.json").write_bytes(msgspec.json.encode(content))
    with pytest.raises(ConfigError, match=r"s\.json is not a saved sweep"):
        drawn([tmp_path / "s.json"])
