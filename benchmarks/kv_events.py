"""What telling of KV costs a step of the engine, beside the same without, in turns.

Prints one JSON object. `engine`: two engines, one that tells (over both wires) and one that does
not, get the same prompts one after the other, in changing order; `on_over_off` is the median ratio
of the times of a step. `loop_us`: what the core's loop itself spends on it in a step that computes
2048 tokens of prompts and evicts as many, the most that a step does; the rest is a thread's.

    python -m benchmarks.kv_events [--threads N] [--rounds N]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
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
from pdserve.engine.kv_events import KVEventPublisher
from pdserve.engine.zmq_client import launch_engine
from pdserve.kvcache.manager import KVCacheManager, PrefixHit
from pdserve.wire.ids import Incarnation, RequestId
from pdserve.wire.request import GenerateRequest
from pdserve.wire.sampling import SamplingParams

if TYPE_CHECKING:
    from pdserve.engine.zmq_client import ZmqEngineClient

PROMPTS, PROMPT_TOKENS, OUTPUT_TOKENS = 8, 512, 32
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
    result = {
        "benchmark": "kv_events",
        "environment": environment(args.threads),
        "loop_us": {"off": round(off_us, 1), "on": round(on_us, 1)},
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
            chain = kv.chain("")
            holding = kv.open(PrefixHit((), 0, 0), len(prompt))
            kv.publish(holding, chain, prompt, (), num_computed_tokens=len(prompt))
            holding.end()
        if publisher is not None and kv.events is not None:
            publisher.publish(kv.events.drain())
        spent_s += time.perf_counter() - start_s
        if publisher is not None:
            time.sleep(0.002)  # a step takes longer, and the thread has its turn meanwhile
    return spent_s


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
        for number in range(args.rounds + 1):
            for name in ("off", "on") if number % 2 else ("on", "off"):
                step_s = await _step_s(clients[name], number)
                if number:
                    runs[name].append(step_s)
        ratios = [on / off for off, on in zip(runs["off"], runs["on"], strict=True)]
        stats = clients["on"].stats
        return {
            "prompts": PROMPTS,
            "prompt_tokens": PROMPT_TOKENS,
            "output_tokens": OUTPUT_TOKENS,
            "step_ms": {name: round(statistics.median(s) * 1e3, 3) for name, s in runs.items()},
            "on_over_off": round(statistics.median(ratios), 4),
            "quartiles": [round(each, 4) for each in statistics.quantiles(ratios, n=4)],
            "events": stats.kv_events if stats is not None else {},
        }
    finally:
        for client in clients.values():
            await client.close(timeout_s=2.0)


async def _step_s(client: ZmqEngineClient, number: int) -> float:
    """Seconds for each step of a batch of prompts that nobody has seen before."""

    async def one(index: int) -> None:
        first = 300 + 977 * (number * PROMPTS + index)
        request = GenerateRequest(
            request_id=RequestId(f"{number}-{index}-{time.monotonic_ns()}"),
            prompt_token_ids=[(first + 37 * t) % 49_000 for t in range(PROMPT_TOKENS)],
            sampling=SamplingParams(
                max_tokens=OUTPUT_TOKENS, seed=index, temperature=0.0, ignore_eos=True
            ),
            arrival_s=time.time(),
        )
        async for _ in client.generate(request):
            pass

    assert client.stats is not None
    steps, start_s = client.stats.num_steps, time.perf_counter()
    await asyncio.gather(*(one(index) for index in range(PROMPTS)))
    return (time.perf_counter() - start_s) / (client.stats.num_steps - steps)


if __name__ == "__main__":
    main()
