"""What grammars cost: the gaps between tokens with one on every row, and beside a hostile one.

Prints one JSON object. `batch`: requests decode together, without a grammar, and each with a JSON
schema, in turns; their gaps. `beside_hostile`: the gaps of requests without one while others ask
for outputs whose masks take tens of milliseconds each.

    python -m benchmarks.grammars [--threads N] [--rounds N] [--tokens N] [--shape 135m|boxed]
                                  [--model DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.engine import environment
from benchmarks.shapes import SMOLLM2_135M, write_model
from pdserve.config.boxed import boxed_model_dir

if TYPE_CHECKING:
    from pdserve.engine.core_client import CoreClient
    from pdserve.wire.sampling import Grammar

BATCH = 16
SCHEMA = {
    "type": "object",
    "properties": {
        "items": {
            "type": "array",
            "minItems": 500,
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "maxLength": 12},
                    "count": {"type": "integer", "minimum": 0, "maximum": 999},
                    "kind": {"enum": ["small", "large", None]},
                },
                "required": ["name", "count", "kind"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["items"],
}
"""Long outputs: no request ends before it has all its tokens."""
HOSTILE = "start: " + " ".join(f'"a{index}"' for index in range(12_000))


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96, help="of an answer")
    parser.add_argument("--shape", default="135m", choices=["135m", "boxed"])
    parser.add_argument("--model", type=Path, help="a checkpoint, in place of a shape")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pdserve-bench-") as directory:
        model, load_format = args.model or boxed_model_dir(), "auto"
        if args.shape == "135m" and args.model is None:
            load_format = "dummy"
            model = write_model(Path(directory) / "m", SMOLLM2_135M)
        print(json.dumps(asyncio.run(_measure(model, load_format, args)), indent=1))


async def _measure(model: Path, load_format: str, args: argparse.Namespace) -> dict[str, Any]:
    from pdserve.config.schema import CacheConfig, EngineConfig, ModelConfig, ParallelConfig
    from pdserve.engine.core_client import launch_engine
    from pdserve.wire.sampling import Grammar

    config = EngineConfig(
        model=ModelConfig(
            model=str(model),
            load_format=load_format,
            max_model_len=512,
        ),
        cache=CacheConfig(kv_cache_memory_bytes=1 << 30, enable_prefix_caching=False),
        parallel=ParallelConfig(num_threads=args.threads),
    )
    schema = Grammar(text=json.dumps({"grammars": [{"json_schema": SCHEMA}]}))
    hostile = Grammar(text=HOSTILE)
    client = await launch_engine(config, progress=lambda text: None)
    gaps: dict[str, list[list[float]]] = {"free": [], "schema": [], "beside_hostile": []}
    try:
        await client.wait_ready()
        await _decode(client, [schema, hostile], 8)
        # In turns, so that all see the machine in the same mood.
        for _ in range(args.rounds):
            gaps["free"].append(await _decode(client, [None] * BATCH, args.tokens))
            gaps["schema"].append(await _decode(client, [schema] * BATCH, args.tokens))
            rows: list[Grammar | None] = [None] * (BATCH - 2) + [hostile] * 2
            gaps["beside_hostile"].append(
                await _decode(client, rows, args.tokens, num_counted=BATCH - 2)
            )
    finally:
        await client.close(timeout_s=2.0)
    free, bound = gaps["free"], gaps["schema"]
    return {
        "benchmark": "grammars",
        "shape": str(args.model or args.shape),
        "environment": environment(args.threads),
        "batch": BATCH,
        "goals": {"schema.itl_p50_over_free": 1.05, "beside_hostile.itl_p99_above_free_ms": 5.0},
        "free": _described(free),
        "schema": _described(bound)
        | {
            "itl_p50_over_free": round(
                statistics.median(
                    statistics.median(with_it) / statistics.median(without)
                    for with_it, without in zip(bound, free, strict=True)
                ),
                3,
            )
        },
        "beside_hostile": _described(gaps["beside_hostile"])
        | {
            "itl_p99_above_free_ms": round(
                statistics.median(
                    _at(with_it, 0.99) - _at(without, 0.99)
                    for with_it, without in zip(gaps["beside_hostile"], free, strict=True)
                ),
                3,
            )
        },
    }


def _described(rounds: list[list[float]]) -> dict[str, float]:
    gaps = [gap for each in rounds for gap in each]
    return {
        "itl_p50_ms": round(statistics.median(gaps), 3),
        "itl_p99_ms": round(_at(gaps, 0.99), 3),
        "itl_max_ms": round(max(gaps), 3),
    }


def _at(values: list[float], share: float) -> float:
    return sorted(values)[int(len(values) * share)]


async def _decode(
    client: CoreClient,
    rows: list[Grammar | None],
    num_tokens: int,
    *,
    num_counted: int | None = None,
) -> list[float]:
    """Decode requests together; the gaps of the first of them, in ms, from the third token on."""
    from pdserve.wire.ids import RequestId
    from pdserve.wire.request import GenerateRequest
    from pdserve.wire.sampling import SamplingParams

    async def one(index: int, grammar: Grammar | None) -> list[float]:
        request = GenerateRequest(
            request_id=RequestId(f"{index}-{time.monotonic_ns()}"),
            prompt_token_ids=[300 + index + 7 * position for position in range(32)],
            sampling=SamplingParams(
                max_tokens=num_tokens,
                seed=index,
                temperature=1.0,
                ignore_eos=grammar is None,
                eos_token_ids=(1, 2),
                grammar=grammar,
            ),
            arrival_s=time.monotonic(),
        )
        came: list[float] = []
        async for output in client.generate(request):
            if output.error:
                raise RuntimeError(output.error)
            came += [time.perf_counter()] * len(output.new_token_ids)
        return [(after - before) * 1e3 for before, after in itertools.pairwise(came[2:])]

    found = await asyncio.gather(*(one(index, each) for index, each in enumerate(rows)))
    return [gap for each in found[:num_counted] for gap in each]


if __name__ == "__main__":
    main()
