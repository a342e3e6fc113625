"""`pdserve trace` of a real deployment: valid, complete, and its stages sum to what clients saw."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.e2e.conftest import pd_deployment
from tests.observe.trace_checks import Checked, check

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.e2e.deployment import Deployment

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SUM_TOLERANCE_US = 100.0
TTFT_TOLERANCE_MS = 25.0
ROUNDED_MS = 0.001  # to what the times are told
"""Of the client's own time where it was least: on a busy machine it waits for its turn."""


def stream(url: str, request_id: str, num_prompt: int, max_tokens: int) -> float:
    """Ask; return the seconds to the first token."""
    body = {
        "prompt": [5 + (k * 7 + num_prompt) % 90 for k in range(num_prompt)],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
    }
    with httpx.Client(verify=False, timeout=60) as client:
        client.get(f"{url}/livez")  # the connection is no part of the time to first token
        start_s = time.monotonic()
        with client.stream(
            "POST", f"{url}/v1/completions", json=body, headers={"X-Request-Id": request_id}
        ) as response:
            first_s = None
            for line in response.iter_lines():
                if line.startswith("data: {") and first_s is None:
                    first_s = time.monotonic() - start_s
    assert first_s is not None
    return first_s


def traced(url: str, path: Path) -> tuple[str, dict[str, Any]]:
    """Run `pdserve trace`; return what it printed, and the file."""
    command = [sys.executable, "-m", "pdserve", "trace", "--url", url, "-o", str(path)]
    done = subprocess.run(
        [*command, "--seconds", "60"], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    data = path.read_bytes()
    return done.stdout, json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)


def assert_ttft_is_the_sum(
    checked: Checked, ttft_s: dict[str, float], told: list[dict[str, Any]]
) -> None:
    """Of the slices, of the proxy's own account, and nearly what the client saw."""
    rows = {row.args["request"]: row for row in checked.rows_of("proxy")}
    assert rows.keys() == ttft_s.keys()
    own_ms = []
    for request_id, row in rows.items():
        told_us = row.args["ttft_ms"] * 1e3
        assert abs(row.until_us(row.start_us + told_us) - told_us) <= SUM_TOLERANCE_US
        account = next(each for each in told if each["request_id"] == request_id)
        terms_us = {name: ms * 1e3 for name, ms in account["ttft_terms"].items()}
        assert abs(sum(terms_us.values()) - told_us) <= SUM_TOLERANCE_US
        for name in ("admission", "reserve", "prefill"):
            assert abs(row.stages_us.get(name, 0.0) - terms_us[name]) <= SUM_TOLERANCE_US
        own_ms.append(ttft_s[request_id] * 1e3 - row.args["ttft_ms"])
    assert -ROUNDED_MS <= min(own_ms) <= TTFT_TOLERANCE_MS


def assert_the_trace_of_a_deployment(deployment: Deployment, tmp_path: Path, mode: str) -> Checked:
    url = deployment.url("proxy")
    ttft_s = {
        f"{mode}-{n}": stream(url, f"{mode}-{n}", num_prompt=40 + 30 * n, max_tokens=6)
        for n in range(4)
    }
    traced(url, tmp_path / "early.json")  # on a busy machine ranks may answer after it
    printed, trace = traced(url, tmp_path / f"{mode}.json.gz")
    checked = check(trace)
    told = httpx.get(f"{url}/debug/requests?finished=99", verify=False).json()["finished"]
    assert_ttft_is_the_sum(checked, ttft_s, told)

    kinds = [name.rsplit(" ")[-1] for name in checked.processes.values()]
    assert kinds == ["proxy", "server", "engine", "server", "engine"]
    assert "4 requests" in printed
    assert "all processes share one" in printed

    # P's last step -> the transfer -> D's first step, of each request.
    assert len(checked.arrows) == len(ttft_s)
    for arrow in checked.arrows:
        first, transfer, last = arrow.slices
        assert "prefill" in first["name"]
        assert transfer["name"] == f"KV {mode}"
        assert transfer["args"]["kv_bytes"] > 0
        assert "decode" in last["name"]
        assert first["ts"] <= transfer["ts"] + transfer["dur"] <= last["ts"] + last["dur"]

    assert_the_threads_moved_what_arrived(checked, mode)

    # Every step is there, and what they computed is what was asked for.
    steps = [each for each in checked.slices if each["cat"] == "step"]
    prompts = sum(40 + 30 * n for n in range(4))
    computed = sum(each["args"]["prefill_tokens"] for each in steps)
    cached = sum(
        row.args["cached_tokens"]
        for row in checked.rows
        if checked.processes[row.pid].startswith("prefill") and "cached_tokens" in row.args
    )
    assert computed + cached == prompts
    assert sum(each["args"]["decode_tokens"] for each in steps) == 4 * (6 - 1)
    assert {name for _, name in checked.counters} == {
        "requests",
        "KV blocks",
        "KV in flight",
    }
    return checked


def assert_the_threads_moved_what_arrived(checked: Checked, mode: str) -> None:
    """Whoever moves the bytes has slices of it, and both sides of the digests."""

    def of(role: str, name: str) -> list[dict[str, Any]]:
        return [
            each
            for each in checked.slices
            if each["name"] == name and checked.processes[each["pid"]].startswith(role)
        ]

    moved = of("prefill", "write") if mode == "push" else of("decode", "read")
    arrived = [each for each in checked.slices if each["name"] == f"KV {mode}"]
    bytes_of = [
        sum(e["args"][n] for e in es) for es, n in ((moved, "bytes"), (arrived, "kv_bytes"))
    ]
    assert bytes_of[0] == bytes_of[1] > 0
    assert of("prefill", "digest")
    assert of("decode", "digest")


def test_a_trace_of_pd_requests_is_valid_and_its_stages_sum_to_ttft(
    of_two_ranks: Deployment, tmp_path: Path
) -> None:
    checked = assert_the_trace_of_a_deployment(of_two_ranks, tmp_path, "push")
    assert_the_trace_of_an_engine(of_two_ranks, tmp_path, "push")
    assert_each_rank_has_a_track_with_every_step(checked, 2)


@pytest.mark.matrix
def test_so_is_that_of_engines_without_ranks_that_pull(
    model_of: Callable[[str], Path], tmp_path: Path
) -> None:
    pull = ("--kv-mode", "pull")
    with pd_deployment(tmp_path, model_of("llama"), proxy_flags=pull) as deployment:
        assert_the_trace_of_a_deployment(deployment, tmp_path, "pull")
        assert_the_trace_of_an_engine(deployment, tmp_path, "pull")


def assert_each_rank_has_a_track_with_every_step(checked: Checked, num_ranks: int) -> None:
    steps = sorted((e["pid"], e["args"]["step"]) for e in checked.slices if e["cat"] == "step")
    assert steps
    for rank in range(num_ranks):
        forwards = [e for e in checked.slices if e["name"] == "forward"]
        of_rank = [(e["pid"], e["args"]["step"]) for e in forwards if e["cat"] == f"rank {rank}"]
        assert sorted(of_rank) == steps


def assert_the_trace_of_an_engine(deployment: Deployment, tmp_path: Path, mode: str) -> None:
    # It tells of the requests that the proxy told of.
    printed, trace = traced(deployment.url("decode"), tmp_path / "decode.json")
    assert len(check(trace).processes) == 2
    assert "2 processes" in printed
    told = httpx.get(f"{deployment.url('decode')}/debug/requests?finished=2", verify=False).json()
    assert [each["request_id"] for each in told["finished"]] == [f"{mode}-3", f"{mode}-2"]
    for each in told["finished"]:
        assert sum(each["ttft_terms"].values()) == pytest.approx(each["ttft_ms"], abs=0.01)
