from __future__ import annotations

import math
import resource
import shutil
import subprocess
from pathlib import Path

import pytest

from pdserve.bench.console import block, further, verdict
from pdserve.bench.figures import details, figures, percentile_word
from pdserve.bench.files import load, save, write_file
from pdserve.bench.goodput import parse_goodput
from pdserve.bench.records import RunHealth
from pdserve.errors import ConfigError
from tests.bench.runs import make_run, outcome

FIRST = outcome(0, 0.0, [0.1, 0.2, 0.4])
SECOND = outcome(1, 0.5, [0.8, 0.9, 1.0, 2.0])
ONE_TOKEN = outcome(2, 0.5, [0.6])
FAILED = outcome(3, 0.0, [0.3], error="HTTP 500")
CANCELLED = outcome(4, 0.0, [0.3], is_cancelled=True)


def test_latencies_are_vllms() -> None:
    found = figures(make_run(FIRST, SECOND, ONE_TOKEN))
    assert found["median_ttft_ms"] == pytest.approx(100)
    assert found["mean_ttft_ms"] == pytest.approx((100 + 300 + 100) / 3)
    # (E2EL - TTFT) / (n - 1), of requests with more than one token.
    assert found["mean_tpot_ms"] == pytest.approx((150 + 400) / 2)
    # Gaps of all requests, pooled.
    assert found["mean_itl_ms"] == pytest.approx((100 + 200 + 100 + 100 + 1000) / 5)
    assert found["median_itl_ms"] == pytest.approx(100)
    assert found["mean_e2el_ms"] == pytest.approx((400 + 1500 + 100) / 3)
    assert found["std_e2el_ms"] == pytest.approx(math.sqrt((800**2 + 2500**2 + 1700**2) / 27))
    # numpy's linear interpolation, as vLLM's.
    assert found["p99_ttft_ms"] == pytest.approx(100 + 0.98 * 200)


def test_rates_are_per_second_of_the_whole_run() -> None:
    found = figures(make_run(FIRST, SECOND, ONE_TOKEN))
    assert found["duration"] == 2.0
    assert found["request_throughput"] == pytest.approx(1.5)
    assert found["output_throughput"] == pytest.approx(8 / 2)
    assert found["total_token_throughput"] == pytest.approx((30 + 8) / 2)


def test_tpot_counts_tokens_where_chunks_have_several() -> None:
    merged = outcome(0, 0.0, [0.1, 0.5], chunk_tokens=[3, 2], num_output_tokens=5)
    assert figures(make_run(merged))["mean_tpot_ms"] == pytest.approx(100)


def test_failed_and_given_up_requests_are_counted_and_give_no_figure() -> None:
    found = figures(make_run(FIRST, FAILED, CANCELLED))
    assert (found["completed"], found["failed"], found["num_prompts"]) == (1, 1, 3)
    assert found["pdserve"]["cancelled"] == 1
    assert found["total_output_tokens"] == 3
    assert found["pdserve"]["errors"] == {"HTTP 500": 1}


def test_a_run_without_any_answer_has_figures_of_zero() -> None:
    found = figures(make_run(FAILED))
    assert (found["completed"], found["failed"], found["mean_ttft_ms"]) == (0, 1, 0.0)
    shown = block(found)
    assert "Failed requests:                         1" in shown
    assert "Mean TTFT (ms):                          none" in shown


def test_a_group_without_answers_has_no_latencies() -> None:
    idle = outcome(3, 0.0, [], error="HTTP 500", group="burst")
    shown = further(figures(make_run(FIRST, idle)))
    rows = {line.split()[0]: line.split()[1:] for line in shown.splitlines()}
    assert rows["burst"] == ["0", "1", "none", "none", "none", "none"]
    assert rows["-"][2:] == ["100.00", "100.00", "150.00", "199.00"]


def test_goodput_counts_requests_within_all_limits() -> None:
    slos = parse_goodput(["ttft:150", "tpot:200"])
    found = figures(make_run(FIRST, SECOND, ONE_TOKEN), slos)
    assert found["request_goodput"] == pytest.approx(2 / 2.0)
    assert found["pdserve"]["goodput"]["share"] == pytest.approx(2 / 3)
    assert figures(make_run(FIRST))["request_goodput"] is None
    left = outcome(9, 0.0, [0.1], is_cancelled=True)  # on purpose, so it is no failure
    found = figures(make_run(FIRST, SECOND, ONE_TOKEN, left), slos)
    assert found["pdserve"]["goodput"]["share"] == pytest.approx(2 / 3)


def test_a_limit_holds_at_its_value() -> None:
    exact = outcome(0, 0.0, [0.25, 0.5])
    for limit, good in (("ttft:250", 1), ("ttft:249.9", 0), ("e2el:500", 1), ("e2el:499", 0)):
        found = figures(make_run(exact), parse_goodput([limit]))
        assert found["pdserve"]["goodput"]["good"] == good


@pytest.mark.parametrize("word", ["ttft", "speed:5", "ttft:-1", "ttft:x", "ttft:inf", "ttft:nan"])
def test_an_objective_that_is_none_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="--goodput"):
        parse_goodput([word])


def test_one_figure_cannot_have_two_limits() -> None:
    with pytest.raises(ConfigError, match="already has the limit 1"):
        parse_goodput(["ttft:1", "ttft:2"])


def test_peaks_are_of_one_second() -> None:
    found = figures(make_run(FIRST, SECOND, outcome(2, 0.2, [1.3, 1.4])))
    # From 0 to 1 s: three of the first, two of the second (its third comes at 1.0).
    assert found["max_output_tokens_per_s"] == 5
    assert found["max_concurrent_requests"] == 3


def test_requests_at_one_moment_are_told_where_those_of_one_second_are_more() -> None:
    after_one_another = [outcome(n, n * 0.2, [n * 0.2 + 0.1, n * 0.2 + 0.2]) for n in range(4)]
    found = figures(make_run(*after_one_another, outcome(4, 0.1, [0.3])))
    assert found["max_concurrent_requests"] == 5
    assert found["pdserve"]["max_in_flight"] == 2
    assert "At most 2 requests were in flight at once" in further(found)
    assert "in flight" not in further(figures(make_run(FIRST)))


def test_computed_and_cached_tokens_are_counted_by_group_where_the_server_tells_them() -> None:
    first = outcome(0, group="turn 1", num_prompt_tokens=100, num_cached_tokens=0)
    second = outcome(1, group="turn 2", num_prompt_tokens=300, num_cached_tokens=200)
    found = figures(make_run(first, second, FAILED))
    assert found["pdserve"]["prompts"] == {
        "told": 2,
        "tokens": 400,
        "cached_tokens": 200,
        "computed_tokens": 200,
        "hit_rate": 0.5,
    }
    assert found["pdserve"]["groups"]["turn 2"]["prompts"]["computed_tokens"] == 100
    shown = further(found)
    assert "Prompts: 200 of 400 tokens computed, 200 (50.0%) cached" in shown
    line = next(line for line in shown.splitlines() if line.startswith("turn 2"))
    assert line.split()[-2:] == ["100", "66.7%"]


def test_a_server_that_tells_no_cached_tokens_gives_no_figure_of_them() -> None:
    found = figures(make_run(FIRST, SECOND))
    assert found["pdserve"]["prompts"] is None
    assert "cached" not in further(found)


def test_groups_have_figures_of_their_own() -> None:
    steady = outcome(0, 0.0, [0.1, 0.2], group="steady")
    burst = outcome(1, 0.0, [0.5, 0.9], group="burst")
    groups = figures(make_run(steady, burst))["pdserve"]["groups"]
    assert groups["steady"]["median_itl_ms"] == pytest.approx(100)
    assert groups["burst"]["median_ttft_ms"] == pytest.approx(500)
    assert figures(make_run(steady))["pdserve"]["groups"] == {}


def test_stages_are_summed_up_by_term_with_what_lies_outside_the_server() -> None:
    first = outcome(0, 0.0, [0.1, 0.2], stages={"queue": 10.0, "prefill": 80.0}, kv_mode="push")
    second = outcome(1, 0.0, [0.1, 0.2], stages={"prefill": 94.0})
    stages = figures(make_run(first, second))["pdserve"]["stages"]
    assert stages["first_token"]["prefill"]["p50_ms"] == pytest.approx(87)
    assert stages["first_token"]["queue"]["mean_ms"] == pytest.approx(5)
    assert stages["outside_server"]["p50_ms"] == pytest.approx(8)
    assert stages["kv_modes"] == {"push": 1, "none": 1}
    assert figures(make_run(FIRST))["pdserve"]["stages"] is None


def test_the_block_has_vllms_lines() -> None:
    text = block(
        figures(make_run(FIRST, SECOND), percentiles=[99.9]),
        request_rate=4,
        max_concurrency=8,
        metrics=("ttft", "e2el"),
        percentiles=(50.0, 99.9),
    )
    assert text.splitlines() == [
        "============ Serving Benchmark Result ============",
        "Successful requests:                     2         ",
        "Failed requests:                         0         ",
        "Maximum request concurrency:             8         ",
        "Request rate configured (RPS):           4.00      ",
        "Benchmark duration (s):                  2.00      ",
        "Total input tokens:                      20        ",
        "Total generated tokens:                  7         ",
        "Request throughput (req/s):              1.00      ",
        "Output token throughput (tok/s):         3.50      ",
        "Peak output token throughput (tok/s):    5.00      ",
        "Peak concurrent requests:                2.00      ",
        "Total token throughput (tok/s):          13.50     ",
        "---------------Time to First Token----------------",
        "Mean TTFT (ms):                          200.00    ",
        "Median TTFT (ms):                        200.00    ",
        "P50 TTFT (ms):                           200.00    ",
        "P99.9 TTFT (ms):                         299.80    ",
        "----------------End-to-end Latency----------------",
        "Mean E2EL (ms):                          950.00    ",
        "Median E2EL (ms):                        950.00    ",
        "P50 E2EL (ms):                           950.00    ",
        "P99.9 E2EL (ms):                         1498.90   ",
        "==================================================",
    ]


def test_a_run_that_is_not_valid_says_so_and_why() -> None:
    health = RunHealth(valid=False, why_not=["The client was late."])
    text = verdict(figures(make_run(FIRST, health=health)))
    assert "NOT VALID" in text
    assert "The client was late." in text
    assert verdict(figures(make_run(FIRST))) == ""


def test_errors_and_hang_ups_are_shown() -> None:
    text = further(figures(make_run(FIRST, FAILED, CANCELLED)))
    assert "1 x HTTP 500" in text
    assert "1 requests were cancelled on purpose" in text


def test_details_have_one_entry_a_request() -> None:
    found = details(make_run(FIRST, FAILED))
    assert all(len(values) == 2 for values in found.values())
    assert found["ttfts"] == [pytest.approx(0.1), 0.0]


def test_a_file_without_details_is_refused_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    save(None, figures(make_run(FIRST)), path)
    with pytest.raises(ConfigError, match="--save-detailed"):
        load(path)


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    with pytest.raises(ConfigError, match="No such file"):
        load(path)
    path.write_text("[1]")
    with pytest.raises(ConfigError, match="not a saved run"):
        load(path)


def test_figures_of_a_run_of_no_duration_are_not_a_number() -> None:
    assert math.isnan(figures(make_run())["request_throughput"])


def test_a_file_that_cannot_be_opened_for_writing_stays(tmp_path: Path) -> None:
    busy = tmp_path / "run.json"
    shutil.copy("/bin/sleep", busy)
    running = subprocess.Popen([busy, "60"])
    try:
        with pytest.raises(ConfigError, match="cannot be written: Text file busy"):
            write_file(busy, b"{}")
    finally:
        running.kill()
        running.wait()
    assert busy.read_bytes() == Path("/bin/sleep").read_bytes()


def test_a_file_for_which_the_disk_has_no_room_leaves_no_part_of_itself(tmp_path: Path) -> None:
    _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(ConfigError, match="cannot be written"):
            write_file(tmp_path / "run.json", bytes(5000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


def test_percentiles_close_to_the_maximum_have_names_of_their_own() -> None:
    assert [percentile_word(each) for each in (99.9, 99.99999, 100.0)] == [
        "p99.9",
        "p99.99999",
        "p100",
    ]
