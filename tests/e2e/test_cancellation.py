"""Clients that leave at any moment, and what is left of them: nothing."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
import psutil
import pytest

from tests.e2e.conftest import OPENAI_KEY

if TYPE_CHECKING:
    from tests.e2e.deployment import Deployment

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

NUM_STREAMS = 200


@dataclass(frozen=True)
class Leave:
    """When a client hangs up: after some seconds, or some chunks, whichever comes first."""

    after_s: float | None = None
    after_chunks: int | None = None


STAY = Leave()


async def stream(session: aiohttp.ClientSession, url: str, index: int, leave: Leave = STAY) -> str:
    """One streamed completion; returns how it ended."""
    rng = random.Random(index)
    body: dict[str, Any] = {
        "prompt": [3 + rng.randrange(300) for _ in range(rng.randrange(1, 400))],
        "max_tokens": rng.randrange(30, 90),
        "temperature": 1.0,
        "seed": index,
        "ignore_eos": True,
        "stream": True,
    }

    async def read() -> str:
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            last = b""
            num_chunks = 0
            async for line in answer.content:
                last = line.strip() or last
                num_chunks += bool(line.strip())
                if num_chunks == leave.after_chunks:
                    return "left"
            assert last == b"data: [DONE]", last
            return "finished"

    try:
        return await asyncio.wait_for(read(), leave.after_s)
    except TimeoutError:
        return "left"


def footprint(processes: list[psutil.Process]) -> tuple[Counter[int], Counter[int]]:
    """Threads and open descriptors, by process."""
    threads = Counter({p.pid: p.num_threads() for p in processes})
    descriptors = Counter({p.pid: p.num_fds() for p in processes})
    return threads, descriptors


def disconnects(deployment: Deployment) -> Counter[str]:
    """How many clients have left, by stage."""
    return Counter(
        {
            key.split('"')[1]: int(value)
            for key, value in deployment.metrics("proxy").items()
            if key.startswith("pdserve_client_disconnects_total")
        }
    )


@dataclass(frozen=True)
class Left:
    """A deployment behind 200 streams, of which a third was cut off.

    Attributes:
        ends: How many streams ended how.
        freed_after_s: When every block was free.
        threads, descriptors: Of each process before the streams.
        disconnects: Of clients, by stage, before the streams.
    """

    deployment: Deployment
    family: list[psutil.Process]
    ends: Counter[str]
    freed_after_s: float
    threads: Counter[int]
    descriptors: Counter[int]
    disconnects: Counter[str]


@pytest.fixture(scope="module")
def left(asked_by_openai: Deployment) -> Left:
    return asyncio.run(_cut_off(asked_by_openai))


async def _cut_off(deployment: Deployment) -> Left:
    url = deployment.url("proxy")
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    headers = {"Authorization": f"Bearer {OPENAI_KEY}"}
    async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
        warm = [stream(session, url, 10_000 + index) for index in range(20)]
        assert set(await asyncio.gather(*warm)) == {"finished"}
        family = [c for p in deployment.processes.values() for c in p.family()]
        before = (*footprint(family), disconnects(deployment))

        # By the clock: in a queue, in the prefill or in the transfer. By the chunk: in the
        # decode, however quick the machine is.
        rng = random.Random(5)
        leaves = {
            index: Leave(after_s=rng.uniform(0.0, 1.0))
            if index % 2
            else Leave(after_chunks=rng.randrange(1, 25))
            for index in range(0, NUM_STREAMS, 3)
        }
        ends = await asyncio.gather(
            *(stream(session, url, i, leaves.get(i, STAY)) for i in range(NUM_STREAMS))
        )
    began_s = time.monotonic()
    deployment.wait_nothing_held("prefill", "decode", timeout_s=20.0)
    return Left(deployment, family, Counter(ends), time.monotonic() - began_s, *before)


def test_a_third_of_200_streams_cut_off_leaves_every_block_free(left: Left) -> None:
    deployment, counts = left.deployment, left.ends
    assert counts["left"] >= NUM_STREAMS // 6, counts
    assert counts["finished"] + counts["left"] == NUM_STREAMS
    for name in ("prefill", "decode"):
        stats = deployment.info(name)["stats"]
        assert stats["num_running"] + stats["num_waiting"] + stats["num_receiving"] == 0
    assert deployment.metric("proxy", "pdserve_requests_running") == 0
    threads, _ = footprint(left.family)
    # A pool may have grown by a few; a stream that leaves one behind would show as dozens.
    assert all(num - left.threads[pid] < 8 for pid, num in threads.items())
    stages = disconnects(deployment) - left.disconnects
    # Some hung up before the proxy had seen their request at all.
    assert sum(stages.values()) <= counts["left"]
    assert stages["prefill"] > 0
    assert stages["decode"] > 0
    print(
        f"\n{dict(counts)}, left in {dict(stages)}; "
        f"every block was free {left.freed_after_s * 1e3:.0f} ms after the end"
    )


def test_an_idle_deployment_uses_under_5_percent_of_one_core(left: Left) -> None:
    def cpu_s() -> float:
        return sum(sum(p.cpu_times()[:2]) for p in left.family)

    before = cpu_s()
    time.sleep(4.0)
    share = (cpu_s() - before) / 4.0
    print(f"\nidle: {share:.1%} of one core, {len(left.family)} processes")
    assert share < 0.05


def test_the_connections_that_200_streams_needed_are_closed_again(left: Left) -> None:
    """The proxy keeps idle ones to its engines for some seconds, for the next request."""
    deadline = time.monotonic() + 60.0
    while True:
        _, now = footprint(left.family)
        grown = {
            pid: num - left.descriptors[pid]
            for pid, num in now.items()
            if num > left.descriptors[pid]
        }
        if not grown:
            return
        assert time.monotonic() < deadline, f"descriptors grew: {grown}"
        time.sleep(0.25)
