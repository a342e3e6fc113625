"""`kill -9` of one rank of an engine, under load."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import psutil
import pytest

from tests.cli.test_up import Up
from tests.e2e.streams import PROMPTS, stream_tokens
from tests.e2e.test_equality import complete, complete_all
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.e2e.deployment import Deployment

pytestmark = [pytest.mark.e2e, pytest.mark.chaos, pytest.mark.timeout(400)]

END_WITHIN_S = 30.0
NUM_TOKENS = 300


def ranks_of(root: psutil.Process) -> list[psutil.Process]:
    """The rank processes below `root`."""
    found = []
    for process in root.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended, or nobody asked how yet
            if "pdserve.executor.rank" in process.cmdline():
                found.append(process)
    return sorted(found, key=lambda process: process.pid)


def shared_names(family: list[psutil.Process]) -> set[str]:
    """Names of the sockets and of the shared memory that these processes have."""
    names: set[str] = set()
    for process in family:
        names |= {str(c.laddr) for c in process.net_connections("unix") if c.laddr}
        maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
        names |= {line.split()[-1] for line in maps if "/dev/shm/" in line}
    return {name for name in names if "pdserve" in name or "/dev/shm/" in name}


def stream_again(url: str, prompt: list[int], is_last: threading.Event) -> tuple[list[int], str]:
    """Tokens and end of the last of streams one after the other: it runs when `is_last` is set."""
    while True:
        found = stream_tokens(url, prompt, 0.0, NUM_TOKENS)
        if is_last.is_set():
            return found


def test_killing_a_rank_ends_its_requests_and_leaves_nothing(of_two_ranks: Deployment) -> None:
    deployment, prompts = of_two_ranks, PROMPTS[:12]
    url = deployment.url("proxy")
    expected = complete_all(url, prompts, max_tokens=NUM_TOKENS)
    engine = deployment.processes["decode"]
    family = engine.family()
    assert not shared_names(family), "only what has no name is never left behind"
    is_last = threading.Event()
    with ThreadPoolExecutor(len(prompts)) as pool:
        futures = [pool.submit(stream_again, url, prompt, is_last) for prompt in prompts]
        try:
            wait_until(
                lambda: deployment.info("decode")["stats"]["num_running"] >= len(prompts) // 2,
                timeout_s=90.0,
            )
        finally:
            is_last.set()
        ranks_of(family[0])[1].kill()
        killed_s = time.monotonic()
        results = [future.result(timeout=60) for future in futures]
        took_s = time.monotonic() - killed_s
    ends: dict[str, int] = {}
    for (tokens, end), right in zip(results, expected, strict=True):
        ends[end] = ends.get(end, 0) + 1
        assert tokens == right[: len(tokens)], "a wrong token behind a 200"
        assert not end.startswith("cut off")
    print(f"\nrank 1 of D killed: all ended within {took_s:.2f} s: {ends}")
    assert took_s < END_WITHIN_S
    assert "leg failed leg=decode" in deployment.processes["proxy"].log
    _, alive = psutil.wait_procs(family, timeout=END_WITHIN_S)
    assert not alive, [process.cmdline() for process in alive]
    assert "rank 1" in engine.log
    assert "SIGKILL" in engine.log
    deployment.wait_nothing_held("prefill", timeout_s=60.0)


@pytest.fixture
def up(model_of: Callable[[str], Path], tmp_path: Path) -> Iterator[Up]:
    up = Up(model_of("llama"), tmp_path, "--decode.tensor-parallel-size", "1", "-tp", "2")
    yield up
    for process in up.family.values():
        if process.is_running():
            process.kill()
    up.process.kill()
    up.process.wait()


@pytest.mark.matrix
def test_up_brings_an_engine_back_that_lost_a_rank(up: Up) -> None:
    up.wait_for("/metrics")
    right = complete(up.url, PROMPTS[3], max_tokens=20)
    victim = ranks_of(psutil.Process(up.process.pid))[1]
    victim.kill()
    killed_s = time.monotonic()
    while not any(
        rank.create_time() > victim.create_time() + 1
        for rank in ranks_of(psutil.Process(up.process.pid))
    ):
        assert time.monotonic() < killed_s + 120, up.out + up.err
        time.sleep(0.05)
    while True:
        found = httpx.get(f"{up.url}/readyz", timeout=5, verify=False)
        if found.status_code == 200 and found.json()["engines"].get("prefill"):
            break
        assert time.monotonic() < killed_s + 200, up.out + up.err
        time.sleep(0.1)
    print(f"\nP serves again {time.monotonic() - killed_s:.1f} s after one of its ranks was killed")
    assert complete(up.url, PROMPTS[3], max_tokens=20) == right
    up.look()
    up.process.send_signal(signal.SIGINT)
    assert up.end() == 130
