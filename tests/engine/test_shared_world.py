"""Two engine cores whose ranks share a tiny Mixtral's experts: waves over real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import TYPE_CHECKING

import psutil
import pytest

from pdserve.config.schema import EplbConfig
from pdserve.errors import EngineDeadError
from tests.engine.test_core_client import PROMPTS, request, tokens_of
from tests.engine.test_dp_client import dp_config, launched
from tests.tiny_models import greedy_by_transformers, write_tiny_model

if TYPE_CHECKING:
    from pathlib import Path

    from pdserve.engine.dp_client import DataParallelClient

pytestmark = pytest.mark.slow

# The load is summed over the cores after every step, and experts are moved.
BALANCED = {"enable_eplb": True, "eplb": EplbConfig(window_size=1, step_interval=1)}


@pytest.fixture(scope="module")
def tiny_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Mixtral with a byte tokenizer."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "mixtral", "mixtral")


async def test_cores_with_unequal_work_write_the_tokens_of_one(tiny_moe: Path) -> None:
    expected = greedy_by_transformers(tiny_moe, PROMPTS, 24)
    config = dp_config(tiny_moe, enable_expert_parallel=True, **BALANCED)
    async with launched(config) as client:
        await client.wait_ready()
        got = await asyncio.gather(
            *(tokens_of(client, request(f"r{i}", p, 24)) for i, p in enumerate(PROMPTS))
        )
        assert got == expected
        assert min(_generated(client)) > 0, "both cores served"

        before = _generated(client)
        for i, prompt in enumerate(PROMPTS):  # one core works, the other keeps it company
            assert await tokens_of(client, request(f"alone{i}", prompt, 24)) == expected[i]
        await _until_at_rest(client)
        assert _generated(client) == [before[0] + 24 * len(PROMPTS), before[1]]
        assert len(set(_steps(client))) == 1, "all cores run equally many steps"

        family = [psutil.Process(pid) for pid in [*client.pids, client.coordinator_pid]]
        busy_s = sum(sum(process.cpu_times()[:2]) for process in family)
        steps = _steps(client)
        await asyncio.sleep(1.0)
        assert _steps(client) == steps, "a wave goes on without work"
        assert sum(sum(process.cpu_times()[:2]) for process in family) - busy_s <= 0.2

        last = asyncio.create_task(tokens_of(client, request("last", PROMPTS[1], 60)))
        await asyncio.sleep(0)
        await client.close(timeout_s=20)
        assert len(await last) == 60, "the idle core stays until the other is done"
        assert client.dead_reason is None, "they left as they should"


@pytest.mark.parametrize(
    "backend", ["inline", pytest.param("multiprocess", marks=pytest.mark.matrix)]
)
async def test_a_killed_core_or_rank_ends_the_requests_of_both(
    tiny_moe: Path, backend: str
) -> None:
    config = dp_config(
        tiny_moe, enable_expert_parallel=True, distributed_executor_backend=backend, **BALANCED
    )
    async with launched(config) as client:
        await client.wait_ready()
        running = [
            asyncio.create_task(tokens_of(client, request(f"r{i}", PROMPTS[2], 900)))
            for i in range(4)
        ]
        while not all(core and core.num_running for core in client.core_stats):
            await asyncio.sleep(0.005)
        core = psutil.Process(client.pids[1])
        victim = core.pid if backend == "inline" else core.children()[0].pid
        os.kill(victim, signal.SIGKILL)
        began_s = time.monotonic()
        ends = await asyncio.gather(*running, return_exceptions=True)
        assert time.monotonic() - began_s < 30
        assert [type(end) for end in ends] == [EngineDeadError] * 4
        assert all("engine core 1" in str(end) for end in ends), str(ends[0])
        assert "Traceback" not in str(ends[0]), "the other core's end is but its echo"


def _generated(client: DataParallelClient) -> list[int]:
    return [core.generation_tokens for core in client.core_stats if core is not None]


def _steps(client: DataParallelClient) -> list[int]:
    return [core.num_steps for core in client.core_stats if core is not None]


async def _until_at_rest(client: DataParallelClient) -> None:
    """Wait until no core steps any more."""
    for _ in range(100):
        steps = _steps(client)
        await asyncio.sleep(0.5)
        if _steps(client) == steps:
            return
    raise AssertionError(f"the waves do not end: {_steps(client)}")
