"""`pdserve bench` as a user runs it, against real deployments: split ones, and one engine for both.

What the client says is held against what the server says of the same requests.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from pdserve.bench import files, sweep
from tests.cli.process import ROOT, environment, pdserve, pdserve_here

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pdserve.bench.records import Outcome, Run
    from tests.e2e.deployment import Deployment

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

NUM_PROMPTS, NUM_IN, NUM_OUT = 24, 64, 16
NUM_AMID = 80
"""Requests of a run amid which an engine dies: it must still go on when that happens."""
LOAD = (
    *("--random-input-len", str(NUM_IN), "--random-output-len", str(NUM_OUT)),
    *("--ignore-eos", "--no-progress"),
    "--allow-invalid",  # the machine may be busy: whether the client kept up is another test's
)

# To what a server's times are told.
ROUNDED_MS = 0.001

# What vllm bench serve writes with --save-result --save-detailed, of version 0.11.
VLLM_KEYS = {
    *("date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts"),
    *("request_rate", "burstiness", "max_concurrency", "duration", "completed", "failed"),
    *("total_input_tokens", "total_output_tokens", "request_throughput", "request_goodput"),
    *("output_throughput", "total_token_throughput", "max_output_tokens_per_s"),
    *("max_concurrent_requests", "input_lens", "output_lens", "ttfts", "itls", "start_times"),
    *("generated_texts", "errors"),
    *(f"{how}_{what}_ms" for how in ("mean", "median", "std", "p99") for what in ("ttft", "tpot")),
    *(f"{how}_itl_ms" for how in ("mean", "median", "std", "p99")),
}


@dataclass(frozen=True)
class Seen:
    """One run: what the command printed and saved, and what the server says of its requests."""

    done: subprocess.CompletedProcess[str]
    path: Path
    run: Run
    saved: dict[str, Any]
    told: dict[str, dict[str, Any]]

    def pairs(self) -> Iterator[tuple[Outcome, dict[str, Any]]]:
        """Each request by the client's and by the server's account."""
        for outcome in self.run.outcomes:
            yield outcome, self.told[outcome.request_id]


def serve(url: str, path: Path, *arguments: str) -> Seen:
    done = pdserve(
        *("bench", "serve", "--base-url", url, *LOAD, *arguments, "--save-result"),
        *("--num-prompts", str(NUM_PROMPTS)),
        *("--save-detailed", "--result-dir", str(path.parent), "--result-filename", path.name),
        timeout_s=120.0,
    )
    assert path.is_file(), done.stdout + done.stderr
    return Seen(done, path, *files.load(path), told_by(url))


def told_by(url: str) -> dict[str, dict[str, Any]]:
    page = httpx.get(f"{url}/debug/requests?finished=4096", timeout=10, verify=False).json()
    return {each["request_id"]: each for each in page["finished"]}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench")


@pytest.fixture(scope="module")
def split(boxed: Deployment, directory: Path) -> Seen:
    """A run against prefill, decode and proxy."""
    path = directory / "split.json"
    url = boxed.url("proxy")
    return serve(url, path, "--request-rate", "20", "--goodput", "ttft:60000", "--label", "P/D")


@pytest.fixture(scope="module")
def whole(boxed: Deployment, directory: Path) -> Seen:
    """A run against one engine for both."""
    path = directory / "whole.json"
    url = boxed.url("serve")
    return serve(url, path, "--max-concurrency", "4", "--seed", "1", "--label", "colocated")


@pytest.fixture(params=["split", "whole"])
def seen(request: pytest.FixtureRequest) -> Seen:
    found: Seen = request.getfixturevalue(request.param)
    return found


def test_a_run_without_a_failure_ends_with_code_0(seen: Seen) -> None:
    assert seen.done.returncode == 0, seen.done.stdout + seen.done.stderr
    assert f"Successful requests:                     {NUM_PROMPTS} " in seen.done.stdout


def test_every_key_of_vllms_result_is_there(seen: Seen) -> None:
    assert VLLM_KEYS - set(seen.saved) == set()


def test_requests_and_tokens_are_as_many_as_were_asked_for(seen: Seen) -> None:
    saved = seen.saved
    assert (saved["completed"], saved["failed"]) == (NUM_PROMPTS, 0)
    assert saved["total_input_tokens"] == NUM_PROMPTS * NUM_IN
    assert saved["total_output_tokens"] == NUM_PROMPTS * NUM_OUT
    assert saved["input_lens"] == [NUM_IN] * NUM_PROMPTS
    assert saved["output_lens"] == [NUM_OUT] * NUM_PROMPTS


def test_the_server_counts_the_same_tokens(seen: Seen) -> None:
    counted = [(told["prompt_tokens"], told["output_tokens"]) for _, told in seen.pairs()]
    assert counted == [(NUM_IN, NUM_OUT)] * NUM_PROMPTS


def test_the_stages_of_every_request_add_up_to_the_servers_ttft(seen: Seen) -> None:
    assert seen.saved["pdserve"]["stages"]["told"] == NUM_PROMPTS
    for outcome, told in seen.pairs():
        assert sum(outcome.stages.values()) == pytest.approx(told["ttft_ms"], abs=0.1)


def test_every_client_waits_longer_than_the_server_says(seen: Seen) -> None:
    outside_ms = [outcome.ttft_s * 1e3 - told["ttft_ms"] for outcome, told in seen.pairs()]
    assert min(outside_ms) > -ROUNDED_MS
    spread = seen.saved["pdserve"]["stages"]["outside_server"]
    assert spread["p50_ms"] == pytest.approx(statistics.median(outside_ms), abs=0.1)


def test_no_request_arrives_before_it_was_sent(seen: Seen) -> None:
    for outcome, told in seen.pairs():
        sent_wall_s = seen.run.started_wall_s + outcome.sent_s
        assert told["arrived_wall_s"] >= sent_wall_s - 1e-3


def test_a_split_deployment_is_told_by_its_engines(split: Seen, boxed: Deployment) -> None:
    own = split.saved["pdserve"]
    assert own["topology"] == [
        {"role": role, "url": boxed.url(role)} for role in ("decode", "prefill")
    ]
    assert sum(own["stages"]["kv_modes"].values()) == NUM_PROMPTS
    assert set(own["stages"]["kv_modes"]) <= {"push", "pull"}


def test_the_second_token_of_a_split_request_has_stages_too(split: Seen) -> None:
    terms = set(split.saved["pdserve"]["stages"]["second_token"])
    assert {"kv", "handover"} <= terms
    assert all(outcome.second_stages for outcome in split.run.outcomes)


def test_a_limit_of_requests_at_once_is_kept(whole: Seen) -> None:
    edges = [(one.sent_s, 1) for one in whole.run.outcomes]
    edges += [(one.end_s, -1) for one in whole.run.outcomes]
    at_once, most = 0, 0
    for _, step in sorted(edges):
        at_once += step
        most = max(most, at_once)
    assert most == 4


@pytest.fixture(scope="module")
def swept(
    boxed: Deployment, directory: Path
) -> tuple[subprocess.CompletedProcess[str], Path, float]:
    """A sweep over two rates; and how many prompt tokens came out of caches meanwhile."""
    path = directory / "sweep.json"
    before = cached_tokens(boxed)
    done = pdserve_here(
        *("bench", "sweep", "--base-url", boxed.url("proxy"), *LOAD, "--seed", "2"),
        *("--num-prompts", str(NUM_PROMPTS)),
        *("--request-rates", "15,30", "--slo", "ttft:60000", "--no-bisect", "--label", "P/D"),
        *("--result-dir", str(path.parent), "--result-filename", path.name),
    )
    return done, path, cached_tokens(boxed) - before


def cached_tokens(boxed: Deployment) -> float:
    return boxed.metric(
        "prefill",
        'vllm:prompt_tokens_by_source_total{engine="0",model_name="boxed",source="local_cache_hit"}',
    )


def test_a_sweep_measures_each_rate_and_says_what_holds(swept: Any) -> None:
    done, path, _ = swept
    assert done.returncode == 0, done.stdout + done.stderr
    found = sweep.load(path)
    assert [(point.rate, len(point.runs)) for point in found.points] == [(15.0, 1), (30.0, 1)]
    assert [run["completed"] for point in found.points for run in point.runs] == [NUM_PROMPTS] * 2
    assert (found.best_rate, found.is_bracketed) == (30.0, False)
    assert "The limit was not reached: 30 req/s still meets" in done.stdout


def test_a_sweep_finds_no_prompt_that_an_earlier_run_has_left(swept: Any) -> None:
    """Both rates ask the same, which only works because caches are reset between them."""
    done, path, num_cached = swept
    seeds = {run["pdserve"]["seed"] for point in sweep.load(path).points for run in point.runs}
    assert seeds == {2}
    assert num_cached == 0
    assert "did not reset" not in done.stdout


def test_runs_and_a_sweep_are_drawn(split: Seen, whole: Seen, swept: Any, directory: Path) -> None:
    for name, paths in (("runs", [split.path, whole.path]), ("sweep", [swept[1]])):
        out = directory / f"{name}.html"
        done = pdserve_here("bench", "plot", *map(str, paths), "--output", str(out))
        assert done.returncode == 0, done.stderr
        assert "P/D" in out.read_text()
        assert 'class="chart"' in out.read_text()


# --- an engine that dies amid a run


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    found = Running(tmp_path / "killed.json")
    yield found
    found.end()


class Running:
    """A run that goes on while the test does something."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._popen: subprocess.Popen[str] | None = None

    def begin(self, url: str) -> None:
        self._popen = subprocess.Popen(
            [
                *(sys.executable, "-m", "pdserve", "bench", "serve", "--base-url", url, *LOAD),
                *("--request-rate", "20", "--num-prompts", str(NUM_AMID), "--save-result"),
                *("--result-dir", str(self.path.parent), "--result-filename", self.path.name),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env=environment(),
        )

    def wait(self) -> tuple[int, str, dict[str, Any]]:
        """Its exit code, what it printed and what it saved."""
        assert self._popen is not None
        output, _ = self._popen.communicate(timeout=100)
        assert self.path.is_file(), output
        return self._popen.returncode, output, json.loads(self.path.read_text())

    def end(self) -> None:
        if self._popen is not None and self._popen.poll() is None:
            self._popen.kill()
            self._popen.communicate()


def wait_for_answers(boxed: Deployment, name: str, number: int) -> None:
    """Wait until an engine has ended so many more requests."""
    deadline = time.monotonic() + 60
    series = 'vllm:request_success_total{engine="0",finished_reason="length",model_name="boxed"}'
    before = boxed.metric(name, series)
    while boxed.metric(name, series) < before + number:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def assert_honest(code: int, output: str, saved: dict[str, Any]) -> None:
    """Every request is answered or failed; failures are counted, named, and the exit code's."""
    assert saved["completed"] + saved["failed"] == NUM_AMID, output
    assert sum(saved["pdserve"]["errors"].values()) == saved["failed"], output
    assert code == (1 if saved["failed"] else 0), output
    assert f"Failed requests:                         {saved['failed']} " in output


@pytest.mark.matrix
def test_a_server_that_dies_is_told_by_failed_requests_and_the_exit_code(
    boxed: Deployment, running: Running
) -> None:
    running.begin(boxed.url("serve"))
    wait_for_answers(boxed, "serve", 4)
    boxed.processes["serve"].kill()
    code, output, saved = running.wait()
    assert_honest(code, output, saved)
    assert 0 < saved["completed"] < NUM_AMID
    # Where the machine is slow, all had been sent by then.
    told = ("cannot connect to 127.0.0.1", "broke off", "before it answered")
    assert all(any(words in each for words in told) for each in saved["pdserve"]["errors"])
    assert saved["pdserve"]["stages"] is None


def test_a_decode_engine_that_dies_behind_a_proxy_leaves_no_request_uncounted(
    boxed: Deployment, running: Running
) -> None:
    url = boxed.url("proxy")
    before = told_by(url)
    running.begin(url)
    wait_for_answers(boxed, "decode", 4)
    boxed.processes["decode"].kill()
    code, output, saved = running.wait()
    assert_honest(code, output, saved)
    told = {name: each for name, each in told_by(url).items() if name not in before}
    num_ok = sum(each["outcome"] == "ok" for name, each in told.items() if "bench" in name)
    assert saved["completed"] == num_ok
