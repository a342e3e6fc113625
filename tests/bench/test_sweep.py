"""The search for the highest load, what a sweep concludes, and one sweep of a real server."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.bench.goodput import SloMetric
from pdserve.bench.records import Outcome
from pdserve.bench.search import LoadAxis, Search, bracket
from pdserve.bench.sweep import Point, Sweep, carry_out, load, run_line, save, summary
from pdserve.commands.bench_sweep import search_of
from pdserve.config.sweep import SweepConfig
from pdserve.errors import ConfigError, PeerError


def search(**fields: Any) -> Search:
    defaults = {"axis": LoadAxis.RATE, "highest": 1000.0, "is_narrowing": True, "tolerance": 0.05}
    return Search(**(defaults | fields))


def found_by(how: Search, capacity: float) -> dict[float, bool]:
    """Everything that is measured where loads up to `capacity` hold."""
    verdicts: dict[float, bool] = {}
    while (wanted := how.next_load(verdicts)) is not None:
        assert wanted not in verdicts
        verdicts[wanted] = wanted <= capacity
        assert len(verdicts) < 60
    return verdicts


# ---- the search ------------------------------------------------------------------------


@given(capacity=st.floats(0.01, 900), start=st.floats(0.1, 50), tolerance=st.floats(0.01, 0.5))
def test_any_rate_is_found_within_the_tolerance(capacity, start, tolerance):
    found = bracket(found_by(search(start=start, tolerance=tolerance), capacity))
    if found.held is None:
        assert found.failed > capacity
        assert found.failed <= start / 1024
    else:
        assert found.held <= capacity < found.failed
        assert found.failed <= found.held * (1 + tolerance)


@given(capacity=st.integers(0, 900), start=st.integers(1, 500))
def test_any_concurrency_is_found_exactly(capacity, start):
    how = search(axis=LoadAxis.CONCURRENCY, start=float(start), tolerance=0.0001)
    verdicts = found_by(how, capacity)
    assert all(wanted == int(wanted) >= 1 for wanted in verdicts)
    found = bracket(verdicts)
    assert found.failed == capacity + 1
    assert found.held == (capacity or None)


def test_growth_is_by_doubling_and_stops_at_the_highest():
    assert list(found_by(search(start=3.0, highest=20.0), 99)) == [3.0, 6.0, 12.0, 20.0]


def test_loads_that_were_asked_for_come_first_and_then_their_gap_is_narrowed():
    how = search(loads=(1.0, 2.0, 8.0), tolerance=0.4)
    assert list(found_by(how, 4.2)) == [1.0, 2.0, 8.0, 5.0, 3.5, 4.25]


def test_without_narrowing_only_what_was_asked_for_is_measured():
    how = search(loads=(1.0, 8.0), is_narrowing=False)
    assert list(found_by(how, 4)) == [1.0, 8.0]


def test_the_lowest_load_that_failed_counts_and_luck_above_it_is_told():
    found = bracket({1.0: True, 2.0: False, 4.0: True, 3.0: True, 8.0: False})
    assert (found.held, found.failed, found.contradictions) == (1.0, 2.0, (3.0, 4.0))


# ---- carrying it out ---------------------------------------------------------------------


def figures(
    num: int = 100,
    kept: int | None = 100,
    *,
    failed: int = 0,
    cancelled: int = 0,
    why_not: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Of one run, as far as a sweep looks at them."""
    names = ("request_throughput", "output_throughput", "median_ttft_ms", "p99_ttft_ms")
    names += ("median_tpot_ms", "p99_itl_ms")
    return {
        "num_prompts": num,
        "completed": num - failed - cancelled,
        "failed": failed,
        **dict.fromkeys(names, 1.0),
        "pdserve": {
            "valid": not why_not,
            "why_not": list(why_not),
            "cancelled": cancelled,
            "goodput": None if kept is None else {"good": kept, "share": kept / num},
        },
    }


class Bench:
    """A server that keeps the objectives for `kept(load, repeat)` of 100 requests."""

    def __init__(self, kept: Any) -> None:
        self.kept = kept
        self.asked: list[tuple[float, int]] = []

    async def measure(self, wanted: float, repeat: int) -> dict[str, Any]:
        self.asked.append((wanted, repeat))
        answer = self.kept(wanted, repeat)
        return answer if isinstance(answer, dict) else figures(kept=answer)


def empty(**fields: Any) -> Sweep:
    defaults = {"slo": {"ttft": 100.0}, "share": 0.9, "axis": "rate"}
    return Sweep(label="it", base_url="u", model="m", dataset="d", **(defaults | fields))


async def swept(bench: Bench, how: Search, *, num_runs: int = 1, **fields: Any) -> Sweep:
    sweep = empty(axis=how.axis.value, **fields)
    await carry_out(sweep, how, bench.measure, num_runs=num_runs, on_run=lambda point, repeat: None)
    return sweep


def told(sweep: Sweep, words: str) -> bool:
    return any(words in sentence for sentence in sweep.statements)


def words_of(text: str) -> str:
    return " ".join(text.split())


async def test_repeats_of_the_loads_that_were_asked_for_are_interleaved():
    bench = Bench(lambda wanted, repeat: 100)
    await swept(bench, search(loads=(1.0, 2.0), is_narrowing=False), num_runs=3)
    assert bench.asked == [(wanted, repeat) for repeat in range(3) for wanted in (1.0, 2.0)]


async def test_loads_of_the_search_are_repeated_in_a_row():
    bench = Bench(lambda wanted, repeat: 100 if wanted <= 2 else 0)
    await swept(bench, search(start=2.0, tolerance=1.0), num_runs=2)
    assert bench.asked == [(2.0, 0), (2.0, 1), (4.0, 0), (4.0, 1)]


async def test_the_best_is_between_what_held_and_what_failed():
    sweep = await swept(Bench(lambda wanted, repeat: 100 if wanted <= 5 else 40), search())
    assert sweep.is_bracketed
    assert sweep.best_rate == pytest.approx(5, rel=0.05)
    assert sweep.best is not None
    assert sweep.best.holds
    assert [point.rate for point in sweep.points] == sorted(p.rate for p in sweep.points)
    assert told(sweep, "between")


async def test_a_share_is_of_all_requests_of_all_runs():
    shares = {0: 100, 1: 75, 2: 100}
    how = search(loads=(1.0,), is_narrowing=False)
    sweep = await swept(Bench(lambda wanted, repeat: shares[repeat]), how, num_runs=3)
    [point] = sweep.points
    assert (point.num_requests, point.num_kept) == (300, 275)
    assert point.attainment == pytest.approx(275 / 300)
    assert point.holds


async def test_exactly_the_wanted_share_holds():
    how = search(loads=(1.0, 2.0), is_narrowing=False)
    sweep = await swept(Bench(lambda wanted, repeat: {1.0: 90, 2.0: 89}[wanted]), how)
    assert [point.holds for point in sweep.points] == [True, False]


async def test_a_limit_that_was_not_reached_is_said_to_be_a_lower_bound():
    sweep = await swept(Bench(lambda wanted, repeat: 100), search(highest=4.0))
    assert (sweep.best_rate, sweep.is_bracketed) == (4.0, False)
    assert told(sweep, "The limit was not reached: 4 req/s still meets")
    assert told(sweep, "raise --max-rate")


async def test_if_even_the_lowest_load_fails_there_is_no_best():
    how = search(axis=LoadAxis.CONCURRENCY, start=4.0)
    sweep = await swept(Bench(lambda wanted, repeat: 10), how)
    assert (sweep.best_concurrency, sweep.is_bracketed, sweep.best) == (None, False, None)
    assert [point.concurrency for point in sweep.points] == [1, 2, 4]
    assert told(sweep, "No measured load meets the objectives: at 1 at once")


async def test_more_load_that_seems_easier_is_told_and_does_not_count():
    kept = {1.0: 95, 2.0: 60, 4.0: 99}
    how = search(loads=(1.0, 2.0, 4.0), is_narrowing=False)
    sweep = await swept(Bench(lambda wanted, repeat: kept[wanted]), how)
    assert sweep.best_rate == 1.0
    assert told(sweep, "4 req/s met the objectives although the lower load 2 req/s did not")
    assert told(sweep, "Attainment rose with the load, from 60.0% at 2 req/s to 99.0% at 4 req/s")


async def test_noise_within_its_own_size_is_not_reported_as_a_rise():
    kept = {1.0: 95, 2.0: 97}
    how = search(loads=(1.0, 2.0), is_narrowing=False)
    sweep = await swept(Bench(lambda wanted, repeat: kept[wanted]), how)
    assert not told(sweep, "rose")


async def test_a_client_that_was_late_is_told():
    late = figures(why_not=("The client was late.",))
    how = search(loads=(1.0, 2.0), is_narrowing=False)
    sweep = await swept(Bench(lambda wanted, repeat: late if wanted == 2 else 100), how)
    assert [point.why_not for point in sweep.points] == [[], ["The client was late."]]
    assert told(
        sweep,
        "Not valid at 2 req/s, where the figures do not measure the server alone. The client",
    )
    assert "not valid" in run_line(sweep.points[1], 0)


async def test_failed_requests_are_told_and_count_as_not_kept():
    how = search(loads=(1.0,), is_narrowing=False)
    sweep = await swept(Bench(lambda wanted, repeat: figures(kept=85, failed=15)), how)
    assert sweep.points[0].holds is False
    assert told(sweep, "Requests failed at 1 req/s.")


async def test_requests_that_were_given_up_on_purpose_do_not_count():
    how = search(loads=(1.0,), is_narrowing=False)
    sweep = await swept(Bench(lambda wanted, repeat: figures(kept=76, cancelled=20)), how)
    [point] = sweep.points
    assert (point.num_requests, point.attainment) == (80, 0.95)
    assert "95.0%" in run_line(point, 0)


async def test_a_load_whose_requests_were_all_given_up_on_purpose_is_told_as_too_few():
    kept = {1.0: figures(num=1, kept=0, cancelled=1), 2.0: figures()}
    how = search(loads=(1.0, 2.0), is_narrowing=False)
    sweep = await swept(Bench(lambda wanted, repeat: kept[wanted]), how)
    assert told(sweep, "0 requests at 1 req/s are too few")
    assert not told(sweep, "rose")


async def test_where_nothing_was_answered_no_latency_is_shown():
    how = search(loads=(1.0,), is_narrowing=False)
    sweep = await swept(Bench(lambda wanted, repeat: figures(kept=0, failed=100)), how)
    assert words_of(run_line(sweep.points[0], 0)) == "1 1 0 100 - - - - - - 0.0%"
    assert "- - - - - - 0.0% fails" in words_of(summary(sweep))


async def test_few_requests_for_a_share_are_told():
    how = search(loads=(1.0,), is_narrowing=False)
    sweep = await swept(Bench(lambda wanted, repeat: 100), how, share=0.99)
    assert told(sweep, "100 requests at 1 req/s are too few for a share of 99%")


async def test_an_endpoint_that_ends_ends_the_sweep_and_leaves_what_was_measured():
    def kept(wanted: float, repeat: int) -> int:
        if wanted > 2:
            raise PeerError("it is gone")
        return 100

    sweep = empty()
    with pytest.raises(PeerError):
        await carry_out(sweep, search(), Bench(kept).measure, num_runs=1, on_run=lambda *_: None)
    assert [point.rate for point in sweep.points] == [1.0, 2.0]
    assert sweep.best_rate == 2.0
    assert told(sweep, "The sweep ended early: it is gone")


async def test_without_objectives_there_is_no_best():
    how = search(loads=(1.0, 2.0), is_narrowing=False)
    sweep = await swept(Bench(lambda wanted, repeat: figures(kept=None)), how, slo={})
    assert sweep.best_rate is None
    assert all(point.attainment is None and point.holds is None for point in sweep.points)
    assert "holds" not in summary(sweep)


async def test_a_sweep_is_read_back_as_it_was_saved(tmp_path):
    sweep = await swept(Bench(lambda wanted, repeat: 100 if wanted <= 3 else 5), search())
    path = tmp_path / "below" / "sweep.json"
    save(sweep, path)
    assert load(path) == sweep
    saved = json.loads(path.read_text())
    assert saved["kind"] == "sweep"
    assert saved["points"][0]["runs"][0]["num_prompts"] == 100


def test_a_file_that_is_no_sweep_is_refused(tmp_path):
    path = tmp_path / "other.json"
    path.write_text('{"num_prompts": 3}')
    with pytest.raises(ConfigError, match=r"other.json is not a saved sweep"):
        load(path)


def test_the_summary_has_medians_over_runs():
    runs = [figures() | {"median_ttft_ms": ms} for ms in (10.0, 30.0, 20.0)]
    point = Point(rate=2.5, runs=runs, num_requests=300, num_kept=300, attainment=1.0, holds=True)
    sweep = empty(points=[point])
    [_, row] = summary(sweep).splitlines()
    assert words_of(row) == "2.5 3 runs 300 0 1.00 1 20.0 1.0 1.00 1.00 100.0% holds"


# ---- objectives and settings --------------------------------------------------------------


def gaps(*ms: float) -> Outcome:
    times = [0.0]
    for each in ms:
        times.append(times[-1] + each / 1e3)
    return Outcome(index=0, request_id="x", chunk_s=times)


@pytest.mark.parametrize(
    ("outcome", "ms"),
    [
        (gaps(*[5.0] * 49, 80.0), 80.0),
        (gaps(*[5.0] * 99, 80.0), 5.0),
        (gaps(*[5.0] * 98, 80.0, 80.0), 80.0),
        (gaps(), 0.0),
    ],
)
def test_an_answers_itl_is_what_99_of_100_of_its_gaps_do_not_exceed(outcome, ms):
    assert SloMetric.ITL.of(outcome) * 1e3 == pytest.approx(ms)


def test_a_share_among_the_objectives_says_for_how_many_requests():
    config = SweepConfig(slo=("ttft:500", "itl:50", "p99"))
    assert (config.objectives, config.share) == (("ttft:500", "itl:50"), 0.99)
    assert SweepConfig(slo=("ttft:500",)).share == 0.9


def test_loads_are_measured_in_ascending_order():
    assert search_of(SweepConfig(request_rates=("8,1", "2.5"))).loads == (1.0, 2.5, 8.0)
    how = search_of(SweepConfig(max_concurrencies=(16, 2)))
    assert (how.axis, how.loads) == (LoadAxis.CONCURRENCY, (2.0, 16.0))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "there is nothing to sweep"),
        ({"request_rates": ("1,x",)}, "--request-rates is x"),
        ({"request_rates": ("1", "1.0")}, "--request-rates is .* once"),
        ({"request_rates": ("0",)}, "--request-rates is 0"),
        ({"max_concurrencies": (0,)}, "--max-concurrencies is"),
        ({"request_rates": ("1",), "max_concurrencies": (1,)}, "cannot be combined"),
        ({"slo": ("ttft:5",), "bisect": False}, "--no-bisect leaves no loads"),
        ({"slo": ("ttft:5", "p99", "p90")}, "--slo is p99 p90"),
        ({"slo": ("ttft:5", "often")}, "--slo is often"),
        ({"request_rates": ("1",), "slo": ("p99",)}, "--slo is p99: a share needs objectives"),
        ({"slo": ("ttft:5", "p0")}, "--slo is p0: the share must be above 0"),
        ({"slo": ("ttft:5",), "start_rate": 2000.0}, "--start-rate is 2000.0: raise --max-rate"),
        ({"request_rates": ("1",), "num_runs": 0}, "--num-runs is 0"),
        ({"request_rates": ("1",), "tolerance": 0.0}, "--tolerance is 0"),
        ({"max_concurrencies": (1,), "seconds_per_run": 5.0}, "--seconds-per-run is 5.0"),
    ],
)
def test_impossible_settings_are_refused(fields, words):
    with pytest.raises(ConfigError, match=words):
        SweepConfig(**fields)
