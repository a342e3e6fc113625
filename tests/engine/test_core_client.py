"""An engine core in its own process: outputs, aborts, deaths, endings."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import pytest_asyncio

from pdserve.config.schema import (
    CacheConfig,
    EngineConfig,
    LivenessConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from pdserve.engine.core_client import CoreClient, launch_engine
from pdserve.errors import ConfigError, EngineDeadError, OverloadedError
from pdserve.wire.ids import RequestId
from pdserve.wire.request import FinishReason, GenerateRequest, Sibling
from pdserve.wire.sampling import SamplingParams
from tests.tiny_models import greedy_by_transformers

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdserve.engine.client import EngineClient

pytestmark = pytest.mark.slow

PROMPTS = [[5, 9, 100, 40][:n] + [7 + (3 * i) % 250 for i in range(n)] for n in (1, 13, 60, 300)]


def engine_config(model: Path, *, backend: str = "inline", blocks: int = 200) -> EngineConfig:
    """A small engine on one thread."""
    return EngineConfig(
        model=ModelConfig(model=str(model), dtype="float32"),
        cache=CacheConfig(num_gpu_blocks_override=blocks),
        scheduler=SchedulerConfig(max_num_batched_tokens=128),
        parallel=ParallelConfig(distributed_executor_backend=backend, num_threads=1),
    )


def impatient(config: EngineConfig) -> EngineConfig:
    """The same, with what is stopped given up after a second."""
    return msgspec.structs.replace(config, liveness=LivenessConfig(heartbeat_timeout_s=1.0))


async def until_gone(client: CoreClient) -> str:
    """Why a core ended whose process is no more."""
    async with asyncio.timeout(40):
        while Path(f"/proc/{client.pid}").exists():
            await asyncio.sleep(0.01)
    assert client.dead_reason is not None
    return client.dead_reason


@asynccontextmanager
async def running(config: EngineConfig) -> AsyncIterator[CoreClient]:
    """A ready engine, ended afterwards."""
    client = await launch_engine(config, progress=lambda text: None)
    try:
        await client.wait_ready()
        yield client
    finally:
        await client.close(timeout_s=0.5)


@pytest_asyncio.fixture(params=["inline", "multiprocess"], scope="module", loop_scope="module")
async def engine(request: pytest.FixtureRequest, tiny_model: Path) -> AsyncIterator[CoreClient]:
    """One that tests leave alive and idle, as its start takes longer than most of them."""
    async with running(engine_config(tiny_model, backend=request.param)) as client:
        yield client


in_its_loop = pytest.mark.asyncio(loop_scope="module")


def request(request_id: str, prompt: list[int], max_tokens: int) -> GenerateRequest:
    """A greedy request."""
    return GenerateRequest(
        request_id=RequestId(request_id),
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=max_tokens, seed=1, temperature=0.0, ignore_eos=True),
        arrival_s=time.time(),
    )


async def tokens_of(client: EngineClient, request: GenerateRequest) -> list[int]:
    """Run a request to its end."""
    tokens: list[int] = []
    async for output in client.generate(request):
        tokens += output.new_token_ids
        assert output.error is None
    return tokens


async def until_idle(client: CoreClient) -> None:
    """Wait until the engine's own snapshot says that nothing is held."""
    for _ in range(1500):
        stats = client.stats
        if stats and stats.blocks["held"] == 0 and stats.num_running + stats.num_waiting == 0:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"blocks are still held: {client.stats}")


@in_its_loop
async def test_a_batch_equals_transformers(tiny_model: Path, engine: CoreClient) -> None:
    expected = greedy_by_transformers(tiny_model, PROMPTS, 24)
    got = await asyncio.gather(
        *(tokens_of(engine, request(f"r{i}", p, 24)) for i, p in enumerate(PROMPTS))
    )
    assert got == expected


async def test_threads_of_torch_in_a_core_spin_for_a_short_time_only(
    engine: CoreClient,
) -> None:
    environment = await asyncio.to_thread(Path(f"/proc/{engine.pid}/environ").read_bytes)
    assert b"GOMP_SPINCOUNT=4000" in environment.split(b"\0")


@pytest.mark.matrix
async def test_preemption_by_a_small_pool_changes_no_token(tiny_model: Path) -> None:
    prompts = [[10 + i, *range(20, 120)] for i in range(6)]
    expected = greedy_by_transformers(tiny_model, prompts, 40)
    # 64 blocks of 16 hold one request of the model's 1024 tokens; six such need 54 + growth.
    config = engine_config(tiny_model, blocks=64)
    small = EngineConfig(
        model=ModelConfig(model=str(tiny_model), dtype="float32", max_model_len=160),
        cache=CacheConfig(num_gpu_blocks_override=24, enable_prefix_caching=False),
        scheduler=config.scheduler,
        parallel=config.parallel,
    )
    async with running(small) as client:
        got = await asyncio.gather(
            *(tokens_of(client, request(f"r{i}", p, 40)) for i, p in enumerate(prompts))
        )
        assert client.stats is not None
        assert client.stats.num_preemptions > 0
    assert got == expected


@in_its_loop
async def test_leaving_early_frees_the_blocks(engine: CoreClient) -> None:
    async with aclosing(engine.generate(request("r", PROMPTS[2], 900))) as outputs:
        async for _ in outputs:
            break
    await until_idle(engine)


@in_its_loop
async def test_what_comes_after_a_reset_finds_nothing_cached_before_it(
    engine: CoreClient,
) -> None:
    prompt = [11, *PROMPTS[3][1:]]  # that no other test has left in the cache

    async def run(name: str) -> tuple[list[int], int]:
        """The tokens, and how many of the prompt's were cached."""
        before = engine.stats.prefix_cache_hits if engine.stats else 0
        tokens = await tokens_of(engine, request(name, prompt, 4))
        await until_idle(engine)
        assert engine.stats is not None
        return tokens, engine.stats.prefix_cache_hits - before

    first, num_cold = await run("cold")
    second, num_warm = await run("warm")
    async with aclosing(engine.generate(request("other", PROMPTS[2], 900))) as outputs:
        await anext(outputs)
        await engine.reset_prefix_cache()  # under way: what it computed is forgotten, too
        await anext(outputs)
    third, num_reset = await run("reset")
    assert (num_cold, num_warm, num_reset) == (0, 288, 0)
    assert first == second == third


async def test_a_killed_core_ends_its_requests_with_an_error(tiny_model: Path) -> None:
    async with running(engine_config(tiny_model)) as client:
        with pytest.raises(EngineDeadError):
            async for _ in client.generate(request("r", PROMPTS[2], 900)):
                os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            await tokens_of(client, request("again", [5], 1))


@pytest.mark.parametrize(
    "backend", ["inline", pytest.param("multiprocess", marks=pytest.mark.matrix)]
)
async def test_a_core_stopped_for_a_moment_goes_on_and_for_longer_ends_its_requests_soon(
    tiny_model: Path, backend: str
) -> None:
    (expected,) = greedy_by_transformers(tiny_model, PROMPTS[2:3], 200)
    async with running(impatient(engine_config(tiny_model, backend=backend))) as client:
        tokens: list[int] = []
        async for output in client.generate(request("r", PROMPTS[2], 200)):
            if not tokens:
                os.kill(client.pid, signal.SIGSTOP)
                asyncio.get_running_loop().call_later(0.5, os.kill, client.pid, signal.SIGCONT)
            tokens += output.new_token_ids
        assert tokens == expected
        assert client.dead_reason is None

        outputs = client.generate(request("r", PROMPTS[2], 900))
        await anext(outputs)
        os.kill(client.pid, signal.SIGSTOP)
        while client.stall_reason is None:
            assert client.dead_reason is None
            await asyncio.sleep(0.01)
        with pytest.raises(EngineDeadError, match=r"stopped for 1 s \(--heartbeat-timeout\)"):
            async for _ in outputs:
                pass
        await until_gone(client)


@pytest.mark.matrix
async def test_a_stopped_rank_ends_the_engine_with_its_reason(tiny_model: Path) -> None:
    async with running(impatient(engine_config(tiny_model, backend="multiprocess"))) as client:
        (rank,) = await asyncio.to_thread(_children_of, client.pid)
        outputs = client.generate(request("r", PROMPTS[2], 900))
        await anext(outputs)
        os.kill(rank, signal.SIGSTOP)
        with pytest.raises(EngineDeadError, match=r"rank 0 .*stopped .*--heartbeat-timeout"):
            async for _ in outputs:
                pass


@pytest.mark.matrix
async def test_a_step_that_does_not_come_back_ends_its_requests(tiny_model: Path) -> None:
    config = msgspec.structs.replace(
        engine_config(tiny_model, backend="multiprocess"),
        liveness=LivenessConfig(heartbeat_timeout_s=600.0, step_timeout_s=1.0),
    )
    async with running(config) as client:
        (rank,) = await asyncio.to_thread(_children_of, client.pid)
        outputs = client.generate(request("r", PROMPTS[2], 900))
        await anext(outputs)
        os.kill(rank, signal.SIGSTOP)  # as good as a kernel that never ends, with these limits
        with pytest.raises(
            EngineDeadError, match="has not finished within 1 s: raise --step-timeout"
        ):
            async for _ in outputs:
                pass


async def test_a_rank_stopped_while_nothing_runs_ends_the_engine(tiny_model: Path) -> None:
    async with running(impatient(engine_config(tiny_model, backend="multiprocess"))) as client:
        (rank,) = await asyncio.to_thread(_children_of, client.pid)
        os.kill(rank, signal.SIGSTOP)
        assert "stopped" in await until_gone(client)


async def test_a_killed_rank_ends_the_engine_with_its_reason(tiny_model: Path) -> None:
    async with running(engine_config(tiny_model, backend="multiprocess")) as client:
        children = await asyncio.to_thread(_children_of, client.pid)
        with pytest.raises(EngineDeadError, match=r"rank 0 .*SIGKILL"):
            async for _ in client.generate(request("r", PROMPTS[2], 900)):
                for pid in children:
                    os.kill(pid, signal.SIGKILL)


async def test_a_wrong_model_is_a_config_error_that_names_it(tmp_path: Path) -> None:
    client = await launch_engine(engine_config(tmp_path / "nowhere"), progress=lambda text: None)
    with pytest.raises(ConfigError, match="nowhere"):
        await client.wait_ready()
    await client.close(timeout_s=0)


@in_its_loop
async def test_a_core_that_reads_nothing_for_a_while_gets_all_that_was_said(
    engine: CoreClient,
) -> None:
    asked = [request(f"r{i}", PROMPTS[3], 2) for i in range(500)]  # more than a socket holds
    expected = await tokens_of(engine, asked[0])
    os.kill(engine.pid, signal.SIGSTOP)
    answers = [asyncio.create_task(tokens_of(engine, each)) for each in asked]
    await asyncio.sleep(0.2)
    os.kill(engine.pid, signal.SIGCONT)
    assert await asyncio.gather(*answers) == [expected] * len(asked)


@in_its_loop
async def test_a_prompt_beyond_the_context_ends_in_an_error_output(engine: CoreClient) -> None:
    outputs = [o async for o in engine.generate(request("r", [5] * 1024, 1))]
    assert outputs[-1].finish_reason is FinishReason.ERROR
    assert "maximum context length" in str(outputs[-1].error)


@in_its_loop
async def test_bad_requests_end_alone(engine: CoreClient) -> None:
    """Whatever the server lets through, and even what is no request at all."""
    replace = msgspec.structs.replace
    good = request("good", PROMPTS[1], 8)
    bad = [
        request("no prompt", [], 8),
        request("unknown token", [5, 1 << 20], 8),
        request("negative token", [5, -1], 8),
        replace(good, request_id="nothing allowed", sampling=_params(allowed_token_ids=())),
        replace(good, request_id="NaN", sampling=_params(temperature=float("nan"))),
        replace(good, request_id="words", sampling=_params(max_tokens="many")),
        replace(good, request_id="no ids", prompt_token_ids=["seven"]),
    ]
    expected = await tokens_of(engine, good)
    goes_on = asyncio.create_task(tokens_of(engine, request("other", PROMPTS[2], 100)))
    for wrong in bad:
        (output,) = [output async for output in engine.generate(wrong)]
        assert output.finish_reason is FinishReason.ERROR, wrong.request_id
        assert output.error
    engine._pipe.send(b"\xc1 is never msgpack")
    assert await tokens_of(engine, good) == expected
    assert len(await goes_on) == 100
    await until_idle(engine)


@in_its_loop
async def test_strange_rules_that_can_be_served_are(engine: CoreClient) -> None:
    huge = 1 << 40
    strange = _params(
        logit_bias={huge: 5.0, -3: 1.0},
        stop_token_ids=(huge,),
        min_tokens=3,
        allowed_token_ids=(5, huge),
        bad_words=((huge,), (5,)),
        repetition_penalty=1.5,
        logprobs=3,
    )
    wanted = msgspec.structs.replace(request("r", PROMPTS[1], 8), sampling=strange)
    assert await tokens_of(engine, wanted) == [5] * 8


async def test_more_prompt_tokens_than_may_wait_are_refused_and_what_runs_at_the_end_may_finish(
    tiny_model: Path,
) -> None:
    config = msgspec.structs.replace(
        engine_config(tiny_model), scheduler=SchedulerConfig(max_waiting_tokens=100)
    )
    async with running(config) as client:
        siblings = [Sibling(RequestId(f"a{i}"), i) for i in range(3)]
        async with aclosing(client.generate(request("a", PROMPTS[2], 9), siblings)) as first:
            begun = asyncio.create_task(anext(first))
            await asyncio.sleep(0)
            with pytest.raises(
                OverloadedError, match=r"prompt tokens are waiting \(256, .* adds 17 "
            ):
                await tokens_of(client, request("b", PROMPTS[1], 4))
            await begun
            num_tokens = 1
            async for output in first:
                num_tokens += len(output.new_token_ids)
        assert num_tokens == 4 * 9
        assert len(await tokens_of(client, request("b", PROMPTS[1], 4))) == 4

        last = asyncio.create_task(tokens_of(client, request("last", PROMPTS[1], 60)))
        while client.stats is None or client.stats.num_running == 0:
            await asyncio.sleep(0.005)
        await client.close(timeout_s=20)
        assert len(await last) == 60


@in_its_loop
async def test_of_several_choices_one_may_be_aborted(engine: CoreClient) -> None:
    sampled = msgspec.structs.replace(
        request("r0", PROMPTS[1], 30), sampling=_params(max_tokens=30, temperature=1.0)
    )
    siblings = [Sibling(RequestId(f"r{i}"), 1 + i) for i in (1, 2)]
    tokens: dict[str, list[int]] = {"r0": [], "r1": [], "r2": []}
    async for output in engine.generate(sampled, siblings):
        tokens[output.request_id] += output.new_token_ids
        if output.request_id == "r1" and len(tokens["r1"]) == 3:
            await engine.abort([RequestId("r1")])
    assert len(tokens["r0"]) == len(tokens["r2"]) == 30
    assert 3 <= len(tokens["r1"]) < 30
    alone = msgspec.structs.replace(
        sampled,
        request_id=RequestId("x"),
        sampling=_params(max_tokens=30, temperature=1.0, seed=3),
    )
    assert await tokens_of(engine, alone) == tokens["r2"]
    await until_idle(engine)


async def test_a_core_that_cannot_be_understood_is_dead_to_its_clients(tiny_model: Path) -> None:
    async with running(engine_config(tiny_model)) as client:
        with pytest.raises(EngineDeadError, match="cannot be read"):
            async for _ in client.generate(request("r", PROMPTS[1], 900)):
                client._decoder = msgspec.msgpack.Decoder(int)
        await until_gone(client)


async def test_a_core_of_another_major_version_is_refused(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.engine.core_client.MAJOR", 999)
    client = await launch_engine(engine_config(tiny_model), progress=lambda text: None)
    with pytest.raises(EngineDeadError, match="999"):
        await client.wait_ready()
    await client.close(timeout_s=0)


async def test_closing_while_a_rank_loads_leaves_no_process(tiny_model: Path) -> None:
    config = engine_config(tiny_model, backend="multiprocess")
    client = await launch_engine(config, progress=lambda text: None)
    pids = [client.pid, await _rank_that_loads(client)]
    await client.close(timeout_s=30)
    assert client.info is None, "it was ready before"
    for _ in range(1500):
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return
        await asyncio.sleep(0.02)
    raise AssertionError("a process is left")


async def test_a_rank_killed_while_it_loads_ends_the_start(tiny_model: Path) -> None:
    config = engine_config(tiny_model, backend="multiprocess")
    client = await launch_engine(config, progress=lambda text: None)
    os.kill(await _rank_that_loads(client), signal.SIGKILL)
    with pytest.raises(EngineDeadError, match=r"rank 0 .*SIGKILL"):
        await client.wait_ready()
    await client.close(timeout_s=0)


async def _rank_that_loads(client: CoreClient) -> int:
    """The rank's process id, as soon as there is one: it imports for longer than this takes."""
    while True:
        children = await asyncio.to_thread(_children_of, client.pid)
        if children:
            return children[0]
        await asyncio.sleep(0.01)


def _params(**fields: Any) -> SamplingParams:
    """Greedy parameters with other fields, right or wrong."""
    greedy = SamplingParams(max_tokens=8, seed=1, temperature=0.0, ignore_eos=True)
    return msgspec.structs.replace(greedy, **fields)


def _children_of(pid: int) -> list[int]:
    import psutil

    return [child.pid for child in psutil.Process(pid).children()]
