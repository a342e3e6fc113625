"""`pdserve bench serve` as a user runs it: a process, a server, an exit code."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from pdserve.bench.files import load
from tests.bench.scripted import ScriptedServer, scripted_server
from tests.cli.process import ROOT, environment, pdserve, pdserve_here

pytestmark = pytest.mark.slow

Run = Callable[..., subprocess.CompletedProcess[str]]
# Of random prompts; main of November 2026: `vllm/benchmarks/serve.py`.
AS_VLLMS_CLIENT = "temperature left to the server, ends of text ignored"


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with scripted_server("--first-ms", "200", "--gap-ms", "4") as started:
        yield started


def bench(
    server: ScriptedServer, *arguments: str, run: Run = pdserve_here
) -> subprocess.CompletedProcess[str]:
    return run(
        *("bench", "serve", "--base-url", server.url, "--tokenizer", "boxed"),
        *("--random-input-len", "32", "--random-output-len", "4", "--allow-invalid"),
        *arguments,
    )


def test_a_run_prints_vllms_block_and_saves_what_it_saw(
    server: ScriptedServer, tmp_path: Path
) -> None:
    done = bench(
        server,
        *("--num-prompts", "12", "--request-rate", "30", "--goodput", "ttft:5000"),
        *("--save-result", "--save-detailed", "--result-dir", str(tmp_path)),
        *("--result-filename", "r.json"),
        run=pdserve,
    )
    assert done.returncode == 0, done.stderr
    assert "Successful requests:                     12" in done.stdout
    assert "Client: 1 process" in done.stdout
    assert f"poisson rate=30; {AS_VLLMS_CLIENT}\n" in done.stdout
    run, figures = load(tmp_path / "r.json")
    assert figures["completed"] == len(run.outcomes) == 12
    assert figures["total_input_tokens"] == 12 * 32
    assert figures["total_output_tokens"] == 12 * 4
    assert figures["request_rate"] == 30
    assert figures["median_ttft_ms"] >= 200
    assert figures["pdserve"]["goodput"]["good"] == 12
    assert figures["pdserve"]["environment"]["cores"] > 0
    assert figures["pdserve"]["sampling"] == AS_VLLMS_CLIENT
    [body] = {
        body.get("ignore_eos") for body in server.bodies().values() if body.get("max_tokens", 0) > 1
    }
    assert body is True


def test_a_file_is_named_after_what_was_run_and_metadata_change_no_figure(
    server: ScriptedServer, tmp_path: Path
) -> None:
    done = bench(
        server,
        *("--num-prompts", "2", "--max-concurrency", "1", "--label", "our run"),
        *("--metadata", "commit=abc", "completed=99"),
        *("--save-result", "--result-dir", str(tmp_path)),
    )
    assert done.returncode == 0, done.stderr
    assert "Note: --metadata completed" in done.stdout
    [file] = tmp_path.iterdir()
    assert file.name.startswith("our_run-infqps-concurrency1-scripted-20")
    saved = json.loads(file.read_text())
    assert "run" not in saved
    assert (saved["commit"], saved["completed"]) == ("abc", 2)


def test_failed_requests_end_in_exit_code_1_with_what_went_wrong(server: ScriptedServer) -> None:
    done = bench(server, "--num-prompts", "2", "--request-timeout-secs", "0.05")
    assert done.returncode == 1
    assert "Failed requests:                         2" in done.stdout
    assert "2 x the answer did not end within 0.05 s" in done.stdout


@pytest.mark.matrix
def test_chat_is_asked_with_messages(server: ScriptedServer) -> None:
    done = bench(server, "--num-prompts", "1", "--endpoint", "/v1/chat/completions")
    assert done.returncode == 0, done.stderr
    assert "messages" in list(server.bodies().values())[-1]


def test_a_backend_is_vllms_word_for_the_endpoint_and_further_headers_are_sent() -> None:
    with scripted_server("--api-key", "right", "--first-ms", "5") as guarded:
        done = bench(
            guarded,
            *("--num-prompts", "1", "--backend", "openai-chat"),
            *("--header", "Authorization=Bearer right"),
        )
        assert done.returncode == 0, done.stderr
        assert "messages" in list(guarded.bodies().values())[-1]


def test_a_model_that_is_not_served_is_named_with_those_that_are(server: ScriptedServer) -> None:
    done = pdserve_here("bench", "serve", "--base-url", server.url, "--model", "other")
    assert done.returncode == 4
    assert "no model 'other': use one of its models (scripted)" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--base-url", "http://x/v1"), "leave /v1 out"),
        (("--endpoint", "/v1/embeddings"), "--endpoint is '/v1/embeddings'"),
        (("--backend", "openai-chat", "--endpoint", "completions"), "--endpoint is 'completions'"),
        (("--header", "X"), "--header is 'X'"),
        (("--header", "X=a\nY: b"), "in printable letters"),
        (("--metadata", "X=\udcff"), "in printable letters"),
        (("--metadata", "=1"), "--metadata is '=1'"),
        (("--goodput", "speed:1"), "--goodput is 'speed:1'"),
        (("--cancel-share", "2"), "--cancel-share is 2.0"),
        (("--save-detailed",), "it needs --save-result"),
        (("--result-filename", "r.json"), "--result-filename needs --save-result"),
        (("--extra-body", "[1]"), "--extra-body: [1] is not an object"),
        (("--temperature", "inf"), "--temperature is inf"),
        (("--seed", "-1"), "--seed is -1"),
        (("--metric-percentiles", "0,x"), "--metric-percentiles"),
        (("--ramp-up-strategy", "linear"), "--ramp-up-start-rps"),
        (("--request-rate", "0"), "--request-rate is 0"),
        (("--save-result", "--result-dir", "/proc/x"), "--result-dir is '/proc/x', where nothing"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_before_anything_is_asked(
    arguments: tuple[str, ...], message: str
) -> None:
    done = pdserve_here("bench", "serve", *arguments)
    assert done.returncode == 3
    assert message in done.stderr


def test_bench_alone_prints_its_commands() -> None:
    done = pdserve_here("bench")
    assert done.returncode == 2
    assert "serve" in done.stdout


@contextlib.contextmanager
def benching(server: ScriptedServer, folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """`pdserve bench WORDS` of a server, whose result is r.json in a folder."""
    command = [sys.executable, "-m", "pdserve", "bench", *words, "--base-url", server.url]
    process = subprocess.Popen(
        [
            *(*command, "--tokenizer", "boxed"),
            *("--result-dir", str(folder), "--result-filename", "r.json"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment(),
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_is_reported_and_leaves_no_process(
    server: ScriptedServer, tmp_path: Path, number: signal.Signals
) -> None:
    words = ("serve", "--num-prompts", "500", "--request-rate", "1", "--save-result")
    with benching(server, tmp_path, *words) as process:
        assert process.stderr is not None
        assert "done" in process.stderr.readline()  # the first word of progress
        children = psutil.Process(process.pid).children()
        assert len(children) == 1
        process.send_signal(number)
        assert process.wait(60) == 130
        deadline_s = time.monotonic() + 30
        while any(child.is_running() for child in children) and time.monotonic() < deadline_s:
            time.sleep(0.02)
        assert not any(child.is_running() for child in children)
        assert process.stdout is not None
        assert "The run was cut short: " in process.stdout.read()
    found = json.loads((tmp_path / "r.json").read_bytes())
    assert found["pdserve"]["unfinished"] == 500 - found["num_prompts"]
    assert not found["pdserve"]["valid"]


def test_a_sweep_that_is_terminated_keeps_what_it_has_measured(
    server: ScriptedServer, tmp_path: Path
) -> None:
    words = ["sweep", "--max-concurrencies", "1,2", "--num-prompts", "12", "--no-progress"]
    words += ["--random-input-len", "32", "--random-output-len", "4"]
    with benching(server, tmp_path, *words) as process:
        assert process.stdout is not None
        while not (line := process.stdout.readline()).strip().startswith("1 "):
            assert line
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 130
    saved = json.loads((tmp_path / "r.json").read_bytes())
    assert len(saved["points"]) == 1
    assert "The sweep was interrupted." in saved["statements"]
