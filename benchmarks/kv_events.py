"""What telling of KV costs a step of the engine, beside the same without, in turns.

Prints one JSON object. `engine`: two engines, one that tells (over both wires) and one that does
not, get the same prompts one after the other, in changing order; `on_over_off` compares the best
rounds of each. `loop_us`: what a step that computes 2048 tokens of prompts and evicts as many, the
most that a step does, costs the cache and the core's loop, and `loop_share` how much of such a step
of that engine telling takes there; the rest is a thread's. `learning_us`: what an engine that tells
learns its own steps' times by, of each step of 10 ms on average, by how many streams it has.

    python -m benchmarks.kv_events [--threads N] [--rounds N]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.engine import environment
from benchmarks.shapes import SMOLLM2_135M, write_model
from pdserve.config.kv_events import KVEventsConfig
from pdserve.config.schema import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    TransferConfig,
)
from pdserve.engine.core_client import launch_engine
from pdserve.engine.kv_events import KVEventPublisher
from pdserve.kvcache.manager import KVCacheManager, PrefixHit
from pdserve.scheduler.steps import Step
from pdserve.scheduler.telemetry import StepLearner
from pdserve.wire.ids import Incarnation, RequestId
from pdserve.wire.request import GenerateRequest
from pdserve.wire.sampling import SamplingParams

if TYPE_CHECKING:
    from pdserve.engine.core_client import CoreClient

STEP_TOKENS = 2048
MIXED = (8, 512, 32)
LONE = (1, STEP_TOKENS - 1, 1)
"""Prompts, tokens of each, tokens generated."""
EVENTS = KVEventsConfig(enable_kv_cache_events=True, endpoint="ipc:///tmp/pdserve-bench-kv-events")


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    off_us, on_us = _loop_us(args.rounds)
    with tempfile.TemporaryDirectory(prefix="pdserve-bench-") as directory:
        model = write_model(Path(directory) / "m", SMOLLM2_135M)
        engine = asyncio.run(_engines(model, args))
    share = (on_us - off_us) / 1e3 / engine["prefill_step_ms"]
    result = {
        "benchmark": "kv_events",
        "environment": environment(args.threads),
        "loop_us": {"off": round(off_us, 1), "on": round(on_us, 1)},
        "loop_share": round(share, 5),
        "learning_us": {str(n): round(_learning_us(n), 2) for n in (1, 32, 256)},
        "engine": engine,
        "goals": {"on_over_off": 1.01},
    }
    print(json.dumps(result, indent=1))


def _loop_us(rounds: int, num_steps: int = 100) -> tuple[float, float]:
    """What a step's blocks cost without events and with them, each the best of its turns."""
    publisher = KVEventPublisher(EVENTS, TransferConfig(), incarnation=Incarnation("1"), rank=0)
    try:
        found: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(2 * rounds):
            is_on = turn % 2 == 1
            found[is_on].append(_steps_s(num_steps, publisher if is_on else None) / num_steps)
        return min(found[False]) * 1e6, min(found[True]) * 1e6
    finally:
        publisher.close(5.0)


def _steps_s(num_steps: int, publisher: KVEventPublisher | None) -> float:
    kv = KVCacheManager(
        num_blocks=256,
        block_size=16,
        enable_prefix_caching=True,
        log_events=publisher is not None,
    )
    spent_s = 0.0
    for step in range(num_steps):
        prompts = [[(step * 8 + i) * 256 + t for t in range(256)] for i in range(8)]
        start_s = time.perf_counter()
        for prompt in prompts:
            chain = kv.chain(prompt, "")
            holding = kv.open(PrefixHit((), 0, 0), len(prompt))
            kv.publish(holding, chain, num_computed_tokens=len(prompt))
            holding.end()
        if publisher is not None and kv.events is not None:
            publisher.publish(kv.events.drain())
        spent_s += time.perf_counter() - start_s
        if publisher is not None:
            time.sleep(0.002)  # a step takes longer, and the thread has its turn meanwhile
    return spent_s


def _learning_us(num_streams: int, num_steps: int = 5000) -> float:
    """What a step of so many streams costs the core's loop, on average over a minute of them."""
    learner, spent_s = StepLearner(), 0.0
    after = {RequestId(f"r-{number}"): 1000 + number for number in range(num_streams)}
    step = Step(1, after, 0.0, num_tokens=dict.fromkeys(after, 1), num_draft_rows={})
    for number in range(num_steps):
        start_s = time.perf_counter()
        learner.step(step, {}, 0.01 + 1e-4 * (number % 7), 0.01 * number)
        learner.report(0.01 * number)
        spent_s += time.perf_counter() - start_s
    return spent_s / num_steps * 1e6


async def _engines(model: Path, args: argparse.Namespace) -> dict[str, Any]:
    clients = {}
    try:
        for name, events in (("off", KVEventsConfig()), ("on", EVENTS)):
            config = EngineConfig(
                model=ModelConfig(model=str(model), load_format="dummy", max_model_len=2048),
                # So few blocks that each prompt evicts another.
                cache=CacheConfig(num_gpu_blocks_override=512, events=events),
                parallel=ParallelConfig(num_threads=args.threads),
            )
            clients[name] = await launch_engine(config, progress=lambda text: None)
            await clients[name].wait_ready()
            while clients[name].stats is None:
                await asyncio.sleep(0.01)
        runs: dict[str, list[float]] = {"off": [], "on": []}
        prefills = []
        for number in range(args.rounds + 1):
            prefills.append(await _step_s(clients["off"], number, LONE))
            for name in ("off", "on") if number % 2 else ("on", "off"):
                step_s = await _step_s(clients[name], number, MIXED)
                if number:
                    runs[name].append(step_s)
        stats = clients["on"].stats
        return {
            "prompts, tokens, generated": MIXED,
            "step_ms": {name: round(min(found) * 1e3, 3) for name, found in runs.items()},
            "on_over_off": round(min(runs["on"]) / min(runs["off"]), 4),
            "prefill_step_ms": round(min(prefills) * 1e3, 1),
            "events": stats.kv_events if stats is not None else {},
        }
    finally:
        for client in clients.values():
            await client.close(timeout_s=2.0)


async def _step_s(client: CoreClient, number: int, work: tuple[int, int, int]) -> float:
    """Seconds for each step of a batch of prompts that nobody has seen before."""
    num_prompts, num_tokens, num_generated = work

    async def one(index: int) -> None:
        first = 977 * (number * num_prompts + index) + num_tokens
        request = GenerateRequest(
            request_id=RequestId(f"{number}-{index}-{time.monotonic_ns()}"),
            prompt_token_ids=[(first + 37 * t) % 49_000 for t in range(num_tokens)],
            sampling=SamplingParams(
                max_tokens=num_generated, seed=index, temperature=0.0, ignore_eos=True
            ),
            arrival_s=time.time(),
        )
        async for _ in client.generate(request):
            pass

    assert client.stats is not None
    steps, start_s = client.stats.num_steps, time.perf_counter()
    await asyncio.gather(*(one(index) for index in range(num_prompts)))
    return (time.perf_counter() - start_s) / (client.stats.num_steps - steps)


if __name__ == "__main__":
    main()
