"""Several engine cores as one engine: who gets a request, sums, deaths, endings."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import aclosing, asynccontextmanager, suppress
from typing import TYPE_CHECKING

import msgspec
import psutil
import pytest

from pdserve.config.schema import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from pdserve.engine.coordinator import Counts
from pdserve.engine.dp_client import CoreLoad, DataParallelClient, launch, least_busy, merged_stats
from pdserve.errors import ConfigError, EngineDeadError, InternalError
from pdserve.wire.request import KVStoreStats
from pdserve.wire.step import ExpertBalance
from tests.engine.test_coordinator import stats
from tests.engine.test_core_client import PROMPTS, impatient, request, tokens_of
from tests.tiny_models import greedy_by_transformers

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator
    from pathlib import Path

    from pdserve.wire.request import EngineOutput

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("counts", "answering", "chosen"),
    [
        pytest.param([(0, 0, 0), (0, 0, 0)], [0, 0], 0, id="idle"),
        pytest.param([(0, 3, 3), (1, 0, 1)], [3, 1], 0, id="one that waits weighs four that run"),
        pytest.param([(0, 5, 5), (1, 0, 1)], [5, 1], 1, id="five that run weigh more"),
        pytest.param([(0, 2, 2), (0, 2, 2)], [2, 1], 1, id="what has ended counts no more"),
        pytest.param([(9, 0, 9), (0, 2, 2)], [1, 5], 0, id="no more wait than there are"),
    ],
)
def test_a_request_goes_to_the_core_with_the_least_to_do(
    counts: list[tuple[int, int, int]], answering: list[int], chosen: int
) -> None:
    known = [Counts(core, *numbers) for core, numbers in enumerate(counts)]
    loads = [
        CoreLoad(num_answering=num, num_sent=core.num_taken)
        for core, num in zip(known, answering, strict=True)
    ]
    assert least_busy(known, loads) == chosen


def test_what_is_on_its_way_to_a_core_waits_there() -> None:
    counts = [Counts(0, num_running=1, num_taken=8), Counts(1, num_running=4, num_taken=4)]
    loads = [CoreLoad(num_answering=2, num_sent=9), CoreLoad(num_answering=4, num_sent=4)]
    assert least_busy(counts, loads) == 1


def test_stats_of_cores_add_up_name_by_name() -> None:
    first = stats(num_running=2, num_steps=5, blocks={"free": 1, "held": 2}, forward_s=0.25)
    second = stats(num_running=1, num_steps=7, blocks={"free": 3, "leased": 1}, forward_s=0.5)
    total = merged_stats([first, second])
    assert (total.num_running, total.num_steps, total.forward_s) == (3, 12, 0.75)
    assert total.blocks == {"free": 4, "held": 2, "leased": 1}


def test_what_cores_say_of_the_experts_they_share_is_said_once() -> None:
    balance = ExpertBalance(ratio_before=1.5, num_rebalancings=2, num_moved=7)
    cores = [stats(experts=balance, num_steps=3), stats(experts=balance, num_steps=3)]
    assert merged_stats(cores) == stats(experts=balance, num_steps=6)
    assert merged_stats([stats(), stats()]).experts is None


def test_stores_of_cores_are_summed_and_are_up_if_all_are() -> None:
    up, down = KVStoreStats(is_up=True, num_hit_tokens=3), KVStoreStats(num_hit_tokens=4)
    assert merged_stats([stats(kv_store=up), stats(kv_store=down)]).kv_store == KVStoreStats(
        num_hit_tokens=7
    )
    assert merged_stats([stats(kv_store=up)] * 2).kv_store.is_up
    assert merged_stats([stats(), stats()]).kv_store is None


def dp_config(model: Path, num_cores: int = 2, **parallel: object) -> EngineConfig:
    """Small engine cores on one thread each."""
    return EngineConfig(
        model=ModelConfig(model=str(model), dtype="float32"),
        engine_id="engine",
        cache=CacheConfig(num_gpu_blocks_override=200),
        scheduler=SchedulerConfig(max_num_batched_tokens=128),
        parallel=ParallelConfig(
            data_parallel_size=num_cores,
            num_threads=1,
            **parallel,  # type: ignore[arg-type]
        ),
    )


@asynccontextmanager
async def launched(config: EngineConfig) -> AsyncIterator[DataParallelClient]:
    """An engine that starts; when it has ended, none of its processes may be left."""
    client = await launch(config, progress=lambda text: None)
    assert isinstance(client, DataParallelClient)
    family: set[psutil.Process] = set()
    try:
        yield client
    finally:
        own = psutil.Process()
        for pid in [*client.pids, client.coordinator_pid]:
            if psutil.pid_exists(pid) and psutil.Process(pid).ppid() == own.pid:
                process = psutil.Process(pid)
                family |= {process, *process.children(recursive=True)}
        await client.close(timeout_s=0.5)
        _, alive = await asyncio.to_thread(psutil.wait_procs, family, 30)
        for process in alive:
            process.kill()
        assert not alive, f"left: {alive}"


async def test_two_cores_share_the_requests_and_write_the_same_tokens(tiny_model: Path) -> None:
    prompts = [*PROMPTS, *PROMPTS]
    expected = greedy_by_transformers(tiny_model, PROMPTS, 24) * 2
    async with launched(dp_config(tiny_model)) as client:
        info = await client.wait_ready()
        assert (info.engine_id, info.num_blocks, info.max_num_seqs) == ("engine", 400, 256)
        got = await asyncio.gather(
            *(tokens_of(client, request(f"r{i}", p, 24)) for i, p in enumerate(prompts))
        )
        assert got == expected
        while client.stats is None or client.stats.generation_tokens < 8 * 24:
            await asyncio.sleep(0.01)
        per_core = [core.generation_tokens for core in client.core_stats if core is not None]
        assert per_core == [4 * 24] * 2, "requests that come at once are spread evenly"

        long = asyncio.create_task(tokens_of(client, request("long", PROMPTS[2], 600)))
        await asyncio.sleep(0)
        with pytest.raises(InternalError, match="running already"):
            await tokens_of(client, request("long", PROMPTS[1], 1))
        for i in range(3):
            await tokens_of(client, request(f"short{i}", PROMPTS[1], 8))
        after = [core.generation_tokens for core in client.core_stats if core is not None]
        assert after[1] - per_core[1] == 3 * 8, "the idle core serves what comes one by one"

        async with aclosing(client.generate(request("left", PROMPTS[2], 900))) as outputs:
            async for _ in outputs:
                break
        assert len(await long) == 600
        for _ in range(3000):
            if client.stats.blocks["held"] == 0 and client.stats.num_running == 0:
                break
            await asyncio.sleep(0.01)
        assert client.stats.blocks["held"] == 0, "what was left is still held"
        last = asyncio.create_task(tokens_of(client, request("last", PROMPTS[1], 60)))
        await asyncio.sleep(0)
        await client.close(timeout_s=20)
        assert len(await last) == 60, "a shutdown lets what runs finish"


@pytest.mark.matrix
async def test_a_killed_core_ends_every_request_at_once(tiny_model: Path) -> None:
    begun: set[str] = set()

    async def run(name: str) -> None:
        while True:  # one core may be done with its requests before the other one begins
            async for _ in client.generate(request(name, PROMPTS[2], 900)):
                begun.add(name)

    async with launched(dp_config(tiny_model)) as client:
        await client.wait_ready()
        running = [asyncio.create_task(run(f"r{i}")) for i in range(4)]
        while len(begun) < len(running):
            await asyncio.sleep(0.001)
        os.kill(client.pids[1], signal.SIGKILL)
        began_s = time.monotonic()
        ends = await asyncio.gather(*running, return_exceptions=True)
        assert time.monotonic() - began_s < 30
        assert [type(end) for end in ends] == [EngineDeadError] * 4
        assert all(
            "engine core 1: the engine core was killed by SIGKILL" in str(end) for end in ends
        )
        with pytest.raises(EngineDeadError):
            await tokens_of(client, request("late", [5], 1))


@pytest.mark.matrix
async def test_a_killed_coordinator_ends_the_engine(tiny_model: Path) -> None:
    async with launched(dp_config(tiny_model)) as client:
        await client.wait_ready()
        with pytest.raises(EngineDeadError, match="the coordinator was killed by SIGKILL"):
            async for _ in client.generate(request("r", PROMPTS[2], 900)):
                with suppress(ProcessLookupError):  # it is dead, and tokens are still on the way
                    os.kill(client.coordinator_pid, signal.SIGKILL)


@pytest.mark.matrix
async def test_a_core_that_is_stopped_ends_the_engine_and_all_requests(tiny_model: Path) -> None:
    async with launched(impatient(dp_config(tiny_model))) as client:
        await client.wait_ready()
        os.kill(client.pids[1], signal.SIGSTOP)
        outputs = [client.generate(request(f"r{i}", PROMPTS[2], 900)) for i in range(2)]
        with pytest.raises(EngineDeadError, match="core 1: the engine core was stopped"):
            async with aclosing(outputs[0]), aclosing(outputs[1]):
                await asyncio.gather(*(_read(each) for each in outputs))


async def test_a_stopped_coordinator_ends_the_engine(tiny_model: Path) -> None:
    async with launched(impatient(dp_config(tiny_model))) as client:
        await client.wait_ready()
        os.kill(client.coordinator_pid, signal.SIGSTOP)
        async with asyncio.timeout(40):
            while client.dead_reason is None:
                await asyncio.sleep(0.02)
        assert "the coordinator was stopped" in client.dead_reason


async def _read(outputs: AsyncGenerator[EngineOutput, None]) -> None:
    async for _ in outputs:
        pass


async def test_a_setting_no_core_can_use_is_reported_once(tiny_model: Path) -> None:
    config = dp_config(tiny_model)
    small = msgspec.structs.replace(config, cache=CacheConfig(num_gpu_blocks_override=1))
    async with launched(small) as client:
        with pytest.raises(ConfigError) as raised:
            await client.wait_ready()
        assert raised.value.message.count("--max-model-len to at most 16") == 1
    with pytest.raises(ConfigError, match="to at most 16"):
        await client.wait_ready()  # the command asks last, for its exit code


async def test_expert_parallelism_of_a_dense_model_is_refused_by_name(tiny_model: Path) -> None:
    for num_cores in (1, 2):
        config = dp_config(tiny_model, num_cores, enable_expert_parallel=True)
        with pytest.raises(ConfigError, match=r"LlamaForCausalLM.* has no experts"):
            await launch(config, progress=lambda text: None)
