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

from tests.e2e.conftest import pd_deployment

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

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


@pytest.mark.alone
async def test_a_third_of_200_streams_cut_off_leaves_every_block_free(
    model_of: Callable[[str], Path], tmp_path: Path
) -> None:
    with pd_deployment(tmp_path, model_of("llama")) as deployment:
        url = deployment.url("proxy")
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector) as session:
            warm = [stream(session, url, 10_000 + index) for index in range(20)]
            assert set(await asyncio.gather(*warm)) == {"finished"}
            family = [c for p in deployment.processes.values() for c in p.family()]
            threads_before, fds_before = footprint(family)

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
        started = time.monotonic()
        await asyncio.to_thread(deployment.wait_nothing_held, "prefill", "decode", timeout_s=20.0)
        freed_after_s = time.monotonic() - started
        counts = Counter(ends)
        assert counts["left"] >= NUM_STREAMS // 6, counts
        assert counts["finished"] + counts["left"] == NUM_STREAMS

        for name in ("prefill", "decode"):
            stats = deployment.info(name)["stats"]
            assert stats["num_running"] + stats["num_waiting"] + stats["num_receiving"] == 0
        assert deployment.metric("proxy", "pdserve_requests_running") == 0
        threads, _ = footprint(family)
        # A pool may have grown by a few; a stream that leaves one behind would show as dozens.
        assert all(num - threads_before[pid] < 8 for pid, num in threads.items())
        await _wait_few_descriptors(family, fds_before)
        stages = {
            key.split('"')[1]: int(value)
            for key, value in deployment.metrics("proxy").items()
            if key.startswith("pdserve_client_disconnects_total")
        }
        # Some hung up before the proxy had seen their request at all.
        assert sum(stages.values()) <= counts["left"]
        assert stages["prefill"] > 0
        assert stages["decode"] > 0
        print(
            f"\n{dict(counts)}, left in {stages}; "
            f"every block was free {freed_after_s * 1e3:.0f} ms after the end"
        )


async def _wait_few_descriptors(family: list[psutil.Process], before: Counter[int]) -> None:
    """Wait until the connections that 200 streams needed are closed again.

    The proxy keeps idle connections to its engines for some seconds, for the next request.
    """
    deadline = time.monotonic() + 60.0
    while True:
        _, now = footprint(family)
        grown = {pid: num - before[pid] for pid, num in now.items() if num > before[pid]}
        if not grown:
            return
        assert time.monotonic() < deadline, f"descriptors grew: {grown}"
        await asyncio.sleep(0.25)


async def test_an_idle_deployment_uses_under_5_percent_of_one_core(
    model_of: Callable[[str], Path], tmp_path: Path
) -> None:
    with pd_deployment(tmp_path, model_of("llama")) as deployment:
        async with aiohttp.ClientSession() as session:
            assert await stream(session, deployment.url("proxy"), 1) == "finished"
        family = [c for p in deployment.processes.values() for c in p.family()]

        def cpu_s() -> float:
            return sum(sum(p.cpu_times()[:2]) for p in family)

        await asyncio.sleep(1.0)
        before = cpu_s()
        await asyncio.sleep(8.0)
        share = (cpu_s() - before) / 8.0
        print(f"\nidle: {share:.1%} of one core, {len(family)} processes")
        assert share < 0.05
