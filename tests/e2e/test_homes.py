"""Three engines for both behind a proxy that gives them home roles, as `pdserve up` starts them."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest

from tests.cli.test_up import Up
from tests.e2e.streams import PROMPTS, begin_streams, stream_tokens
from tests.e2e.test_equality import complete_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.matrix, pytest.mark.timeout(400)]

NUM_TOKENS = 100
FOR_BOTH = (
    *("--prefill-replicas", "0", "--decode-replicas", "0", "--both-replicas", "3"),
    *(
        "--proxy.split-policy",
        "predicted",
        "--no-proxy.early-rejection",
        "--proxy.itl-slo",
        "0.005",
    ),
    *("--dtype", "float32", "--both.max-num-seqs", "64", "--max-tokens", "2"),
)


@pytest.fixture(scope="module")
def up(model_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    up = Up(model_of("llama"), tmp_path_factory.mktemp("homes"), *FOR_BOTH)
    try:
        up.wait_for("/metrics")
        yield up
        up.process.terminate()
        up.end()
    finally:
        up.process.kill()
        up.process.wait()


def alone(up: Up, prompts: list[list[int]]) -> list[list[int]]:
    """What one of the engines, asked by itself, says to prompts that it has not seen."""
    url = f"http://127.0.0.1:{up.ports[3]}"
    return complete_all(url, prompts, max_tokens=NUM_TOKENS, cache_salt="alone")


def homes(up: Up) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{up.url}/debug/decisions?limit=1").json()["homes"]
    return found


def wait_for_homes(up: Up, wanted: list[str], timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while sorted(homes(up)["engines"].values()) != wanted:
        assert time.monotonic() < deadline_s, homes(up)
        time.sleep(0.2)


def test_killing_one_of_three_engines_for_both_loses_no_stream_and_changes_no_token(
    up: Up,
) -> None:
    expected = alone(up, PROMPTS)
    assert complete_all(up.url, PROMPTS, max_tokens=NUM_TOKENS) == expected  # it learns by them
    wait_for_homes(up, ["decode", "prefill", "prefill"], timeout_s=10.0)
    (victim,) = (
        process
        for process in psutil.Process(up.process.pid).children()
        if "both1" in process.cmdline()
    )
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        streams = begin_streams(pool, up.url, PROMPTS, NUM_TOKENS)
        victim.kill()
        ends = [stream.result(timeout=90) for stream in streams]
    assert ends == [(tokens, "finished") for tokens in expected]


def test_engines_for_both_change_their_homes_when_the_load_asks_for_tokens_alone(up: Up) -> None:
    wait_for_homes(up, ["decode", "prefill", "prefill"], timeout_s=60.0)  # all are there again
    ended = threading.Event()

    def ask_on(prompt: list[int]) -> None:
        while not ended.is_set():
            stream_tokens(up.url, prompt[:20], 0.0, 500)

    with ThreadPoolExecutor(24) as pool:
        asking = [pool.submit(ask_on, PROMPTS[index % len(PROMPTS)]) for index in range(24)]
        try:
            wait_for_homes(up, ["decode", "decode", "prefill"], timeout_s=120.0)
        finally:
            ended.set()
        for each in asking:
            each.result(timeout=60)
    assert any(look["is_made"] for look in homes(up)["looks"])
    assert complete_all(up.url, PROMPTS, max_tokens=NUM_TOKENS) == alone(up, PROMPTS)
