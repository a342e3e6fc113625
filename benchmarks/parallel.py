"""What it costs, and brings, to spread one engine over ranks: the same cores, cut differently.

Prints one JSON object. The engines of a family are held side by side and measured in turns, so
that all see the machine in the same mood; those whose turn it is not sleep. Figures are medians
of the turns; `over_one_rank` is the median of the turns' own ratios to one rank with two threads.

`dense`: one rank with one thread and with two; two ranks with one thread each, by tensor
parallelism, with sequence parallelism, and as pipeline stages.

`moe`: one rank with two threads; two ranks with one thread each, with experts sliced or placed,
and as two engine cores that share the experts, whose tokens travel in either of two ways.

`decode_ms` is the time per output token of a request, with so many requests at a time, at the
client, over steps in which all of them run; `forward_ms` is the output rank's forward of a step
(of two cores: the mean over both, and the empty steps of one count as nothing).
`prefill_tok_per_s` is of several prompts of 512 tokens at once, each a step of its own.

`pipeline`: how well the two stages are used, by requests at a time (each is a micro-batch of
its own up to the number of stages): `utilisation` is the processor time of the ranks over time
x stages; `last_stage` is the same of the last stage's forward alone, by its clock, so that
time for which the core was somebody else's counts as used.

    python -m benchmarks.parallel [--quick] [--rounds N] [--only NAME]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.engine import environment
from benchmarks.shapes import SMOLLM2_135M, write_model

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdserve.engine.client import LaunchedEngine

PROMPT_TOKENS = 512
DECODE_BATCHES = (1, 16)
MICRO_BATCHES = (1, 2, 4)

# The shape of benchmarks/engine.py with heads that two ranks can share (9 and 3 there).
DENSE = {**SMOLLM2_135M, "num_attention_heads": 8, "num_key_value_heads": 4}

# A token passes through as many weights per layer, of which there are fewer.
MOE = {
    **DENSE,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_hidden_layers": 15,
    "intermediate_size": 768,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}

TP = {"tensor_parallel_size": 2}
EP = {"enable_expert_parallel": True}
FAMILIES: dict[str, tuple[dict[str, object], dict[str, dict[str, Any]]]] = {
    "dense": (
        DENSE,
        {
            "1 rank x 2 threads": {"num_threads": 2},
            "1 rank x 1 thread": {},
            "TP 2": TP,
            "TP 2, sequence parallel": {**TP, "enable_sequence_parallel": True},
            "PP 2": {"pipeline_parallel_size": 2},
        },
    ),
    "moe": (
        MOE,
        {
            "1 rank x 2 threads": {"num_threads": 2},
            "TP 2, sliced experts": TP,
            "EP 2": {**TP, **EP},
            "DP 2, EP 2, all_gather": {"data_parallel_size": 2, **EP},
            "DP 2, EP 2, all_to_all": {
                "data_parallel_size": 2,
                **EP,
                "all2all_backend": "all_to_all",
            },
        },
    ),
}
BASE = "1 rank x 2 threads"
PIPELINE = "PP 2"
NUM_STAGES = 2


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
        num_rounds: Turns.
        num_tokens: Output tokens of a decoding request.
        num_prompts: Prompts at once.
    """

    num_rounds: int
    num_tokens: int
    num_prompts: int


FULL = Sizes(num_rounds=3, num_tokens=48, num_prompts=3)
QUICK = Sizes(num_rounds=1, num_tokens=16, num_prompts=1)


@dataclass
class Found:
    """Of one shape, a figure per turn, by what was measured."""

    decode_s: dict[int, list[float]] = field(default_factory=dict)
    forward_s: dict[int, list[float]] = field(default_factory=dict)
    prefill_s: list[float] = field(default_factory=list)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="less of everything: a smoke test")
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--only", choices=list(FAMILIES), default=None)
    args = parser.parse_args()
    sizes = QUICK if args.quick else FULL
    num_rounds = args.rounds or sizes.num_rounds
    sizes = Sizes(num_rounds, sizes.num_tokens, sizes.num_prompts)
    names = [args.only] if args.only else list(FAMILIES)
    result: dict[str, Any] = {
        "benchmark": "parallel",
        "shapes": {
            "dense": "SmolLM2-135M with 8 and 4 heads, random weights, bf16",
            "moe": "the same, 15 layers, 8 experts of 768, 2 per token",
        },
        "rounds": num_rounds,
        "threads": "1 per rank, unless it says otherwise",
        "environment": environment(1),
    }
    with tempfile.TemporaryDirectory(prefix="pdserve-bench-") as directory:
        for name in names:
            model, shapes = FAMILIES[name]
            path = write_model(Path(directory) / name, model)
            result[name] = asyncio.run(_measure(path, shapes, sizes))
    print(json.dumps(result, indent=1))


async def _measure(model: Path, shapes: dict[str, dict[str, Any]], sizes: Sizes) -> dict[str, Any]:
    async with AsyncExitStack() as stack:
        engines = {
            name: await stack.enter_async_context(_engine(model, parallel))
            for name, parallel in shapes.items()
        }
        for engine in engines.values():
            await engine.wait_ready()
            await _prefill(engine, num_prompts=2, num_tokens=130)
            await _decode(engine, batch=DECODE_BATCHES[-1], num_tokens=12)
        found = {name: Found() for name in engines}
        for _ in range(sizes.num_rounds):
            for batch in DECODE_BATCHES:
                for name, engine in engines.items():
                    step_s, forward_s = await _decode(
                        engine, batch=batch, num_tokens=sizes.num_tokens
                    )
                    found[name].decode_s.setdefault(batch, []).append(step_s)
                    found[name].forward_s.setdefault(batch, []).append(forward_s)
            for name, engine in engines.items():
                found[name].prefill_s.append(await _prefill(engine, num_prompts=sizes.num_prompts))
        table: dict[str, Any] = {name: _row(row, found[BASE], sizes) for name, row in found.items()}
        if PIPELINE in engines:
            table["pipeline"] = await _pipeline(engines[PIPELINE], sizes)
        return table


def _row(found: Found, base: Found, sizes: Sizes) -> dict[str, Any]:
    num_prompt_tokens = PROMPT_TOKENS * sizes.num_prompts
    row: dict[str, Any] = {}
    for batch, taken in found.decode_s.items():
        row[f"batch {batch}"] = {
            "decode_ms": round(statistics.median(taken) * 1e3, 2),
            "over_one_rank": _ratio(taken, base.decode_s[batch]),
            "forward_ms": round(statistics.median(found.forward_s[batch]) * 1e3, 2),
        }
    row["prefill_tok_per_s"] = round(num_prompt_tokens / statistics.median(found.prefill_s))
    # Of the times, as for decoding: below 1 is better.
    row["prefill_over_one_rank"] = _ratio(found.prefill_s, base.prefill_s)
    return row


def _ratio(taken: list[float], base: list[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(taken, base, strict=True)), 3)


async def _pipeline(engine: LaunchedEngine, sizes: Sizes) -> dict[str, Any]:
    pids = _ranks_of(engine)
    found: dict[int, list[tuple[float, float, float]]] = {num: [] for num in MICRO_BATCHES}
    for _ in range(sizes.num_rounds):
        for num_requests, rows in found.items():
            before = _cpu_s(pids)
            start = time.perf_counter()
            step_s, forward_s = await _decode(
                engine, batch=num_requests, num_tokens=2 * sizes.num_tokens
            )
            wall_s = time.perf_counter() - start
            num_steps = min(num_requests, NUM_STAGES)  # per token
            rows.append(
                (
                    (_cpu_s(pids) - before) / (wall_s * NUM_STAGES),
                    forward_s * num_steps / step_s,
                    num_requests / step_s,
                )
            )
    return {
        "stages": NUM_STAGES,
        "micro_batches": {
            str(num): {
                "utilisation": round(statistics.median(row[0] for row in rows), 3),
                "last_stage": round(statistics.median(row[1] for row in rows), 3),
                "tok_per_s": round(statistics.median(row[2] for row in rows), 1),
                "ideal": min(1.0, num / NUM_STAGES),
            }
            for num, rows in found.items()
        },
    }


@asynccontextmanager
async def _engine(model: Path, parallel: dict[str, Any]) -> AsyncIterator[LaunchedEngine]:
    from pdserve.config.schema import (
        CacheConfig,
        EngineConfig,
        ModelConfig,
        ParallelConfig,
        SchedulerConfig,
    )
    from pdserve.engine.dp_client import launch

    config = EngineConfig(
        model=ModelConfig(model=str(model), load_format="dummy", max_model_len=1024),
        cache=CacheConfig(kv_cache_memory_bytes=128 << 20, enable_prefix_caching=False),
        scheduler=SchedulerConfig(max_num_batched_tokens=PROMPT_TOKENS),
        parallel=ParallelConfig(**{"num_threads": 1, **parallel}),
        device="cpu",
    )
    engine = await launch(config, progress=lambda text: None)
    try:
        yield engine
    finally:
        await engine.close(timeout_s=2.0)


async def _decode(engine: LaunchedEngine, *, batch: int, num_tokens: int) -> tuple[float, float]:
    """Decode `batch` requests together.

    Returns:
        Seconds per token of each request, over the tokens at which all of them ran; seconds of
        one step's forward, among them.
    """
    times: list[list[float]] = [[] for _ in range(batch)]
    marks: list[tuple[float, float, int]] = []

    async def one(index: int) -> None:
        request = _request(f"{batch}-{index}", 16, num_tokens, index)
        async with aclosing(engine.generate(request)) as outputs:
            async for output in outputs:
                now = time.perf_counter()
                times[index] += [now] * len(output.new_token_ids)
                stats = engine.stats
                if stats is not None and all(times) and all(len(t) < num_tokens for t in times):
                    marks.append((now, stats.forward_s, stats.num_steps))

    await asyncio.gather(*(one(index) for index in range(batch)))
    # From the first token of the last request on, until the first request has ended.
    start, end = max(taken[0] for taken in times), min(taken[-1] for taken in times)
    paces = []
    for taken in times:
        inside = [at for at in taken if start <= at <= end]
        paces.append((inside[-1] - inside[0]) / (len(inside) - 1))
    (_, forward_s, num_steps), (_, forward_end_s, num_steps_end) = marks[0], marks[-1]
    forward_each_s = (forward_end_s - forward_s) / max(1, num_steps_end - num_steps)
    return statistics.median(paces), forward_each_s


async def _prefill(
    engine: LaunchedEngine, *, num_prompts: int, num_tokens: int = PROMPT_TOKENS
) -> float:
    """Seconds for so many prompts of so many tokens, together."""

    async def one(index: int) -> None:
        request = _request(f"prefill-{index}", num_tokens, 1, index)
        async with aclosing(engine.generate(request)) as outputs:
            async for _ in outputs:
                pass

    start = time.perf_counter()
    await asyncio.gather(*(one(index) for index in range(num_prompts)))
    return time.perf_counter() - start


def _request(name: str, num_prompt: int, num_tokens: int, seed: int) -> Any:
    from pdserve.wire.ids import RequestId
    from pdserve.wire.request import GenerateRequest
    from pdserve.wire.sampling import SamplingParams

    return GenerateRequest(
        request_id=RequestId(f"{name}-{time.monotonic_ns()}"),
        prompt_token_ids=[300 + seed + 37 * position for position in range(num_prompt)],
        sampling=SamplingParams(max_tokens=num_tokens, seed=seed, temperature=0.0, ignore_eos=True),
        arrival_s=time.time(),
    )


def _ranks_of(engine: Any) -> list[int]:
    """Process ids of an engine core's ranks: its children."""
    tasks = Path(f"/proc/{engine.pid}/task").iterdir()
    return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]


def _cpu_s(pids: list[int]) -> float:
    """Processor seconds that all threads of these processes have taken (proc(5), schedstat)."""
    return sum(
        int((task / "schedstat").read_text().split()[0]) / 1e9
        for pid in pids
        for task in Path(f"/proc/{pid}/task").iterdir()
    )


if __name__ == "__main__":
    main()
