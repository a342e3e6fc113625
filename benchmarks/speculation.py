"""What drafts bring, and what they cost those who have none.

Prints one JSON object. `alone`: the time per token of one request, without drafts and with those
of up to 3, 7 and 15 tokens, for a text that is an edit of the request's prediction (a change of
some tokens every sixty or so, as in files that are rewritten) and for one that nobody can guess.
`neighbours`: the gaps of fifteen requests without a prediction beside one that has one.

Whatever is drafted, the tokens must be those without: that is checked on the way.

    python benchmarks/speculation.py [--threads N] [--rounds N] [--tokens N]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.engine import environment
from benchmarks.shapes import SMOLLM2_135M, write_model

if TYPE_CHECKING:
    from pdserve.engine.zmq_client import ZmqEngineClient

DRAFTED = (0, 3, 7, 15)
BATCH = 16
GAP = 60
"""Tokens from one change of a prediction to the next, on average."""
VARIED = 0.25
"""Standard deviation of weights with which the likeliest tokens are not always the same."""


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=256, help="of an answer")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pdserve-bench-") as directory:
        model = write_model(Path(directory) / "m", {**SMOLLM2_135M, "initializer_range": VARIED})
        result = asyncio.run(_measure(model, args))
    print(json.dumps(result, indent=1))


async def _measure(model: Path, args: argparse.Namespace) -> dict[str, Any]:
    from pdserve.engine.zmq_client import launch_engine

    clients = {
        drafted: await launch_engine(
            _config(model, drafted, args.threads), progress=lambda text: None
        )
        for drafted in DRAFTED
    }
    try:
        for client in clients.values():
            await client.wait_ready()
        return await _compare(clients, args)
    finally:
        for client in clients.values():
            await client.close(timeout_s=2.0)


def _config(model: Path, drafted: int, num_threads: int) -> Any:
    from pdserve.config.schema import CacheConfig, EngineConfig, ModelConfig, ParallelConfig
    from pdserve.config.speculative import SpeculativeConfig

    return EngineConfig(
        model=ModelConfig(model=str(model), load_format="dummy", max_model_len=2048),
        cache=CacheConfig(kv_cache_memory_bytes=1 << 29, enable_prefix_caching=False),
        parallel=ParallelConfig(num_threads=num_threads),
        speculative=SpeculativeConfig(
            method="ngram" if drafted else "", num_speculative_tokens=drafted or 1
        ),
    )


async def _compare(clients: dict[int, ZmqEngineClient], args: argparse.Namespace) -> dict[str, Any]:
    plain = clients[0]
    wanted = [(await _decode(plain, index, args.tokens, [])).tokens for index in range(BATCH)]
    edited = [_edited(tokens, seed) for seed, tokens in enumerate(wanted)]
    found: dict[str, dict[int, list[_Run]]] = {"edits": {}, "unguessable": {}}
    gaps: dict[int, list[float]] = {drafted: [] for drafted in DRAFTED}
    # Engines take turns, so that all see the machine in the same mood.
    for round_id in range(args.rounds):
        index = round_id % BATCH
        for drafted, client in clients.items():
            for kind, prediction in (("edits", edited[index]), ("unguessable", [])):
                is_random = kind == "unguessable"
                run = await _decode(client, index, args.tokens, prediction, is_random=is_random)
                found[kind].setdefault(drafted, []).append(run)
                assert run.tokens == found[kind][0][-1].tokens
            runs = await asyncio.gather(
                *(
                    _decode(
                        client, each, args.tokens, [] if each else edited[0], is_random=each > 0
                    )
                    for each in range(BATCH)
                )
            )
            assert runs[0].tokens == wanted[0]
            gaps[drafted] += [gap for run in runs[1:] for gap in run.gaps_ms]
    return {
        "benchmark": "speculation",
        "shape": "SmolLM2-135M, random weights, bf16",
        "environment": environment(args.threads),
        "tokens": args.tokens,
        "goals": {
            "alone.edits.7.speed_up": 3.5,
            "alone.unguessable.speed_up": 0.98,
            "neighbours.itl_p99_over_plain": 1.10,
        },
        "alone": {kind: _alone(runs) for kind, runs in found.items()},
        "neighbours": {
            str(drafted): {
                "itl_p50_ms": round(statistics.median(each), 3),
                "itl_p99_ms": round(_p99(each), 3),
                "itl_p50_over_plain": round(
                    statistics.median(each) / statistics.median(gaps[0]), 3
                ),
                "itl_p99_over_plain": round(_p99(each) / _p99(gaps[0]), 3),
            }
            for drafted, each in gaps.items()
        },
    }


def _alone(runs: dict[int, list[_Run]]) -> dict[str, dict[str, float]]:
    tpot = {drafted: min(run.tpot_ms for run in each) for drafted, each in runs.items()}
    return {
        str(drafted): {
            "tpot_ms": round(tpot[drafted], 3),
            "tokens_per_step": round(statistics.mean(run.tokens_per_step for run in each), 2),
            "speed_up": round(
                statistics.median(
                    plain.tpot_ms / run.tpot_ms for plain, run in zip(runs[0], each, strict=True)
                ),
                3,
            ),
        }
        for drafted, each in runs.items()
    }


class _Run:
    """One answer: its tokens, and when they came."""

    def __init__(self, tokens: list[int], arrivals_s: list[float]) -> None:
        self.tokens = tokens
        self.gaps_ms = [(after - before) * 1e3 for before, after in itertools.pairwise(arrivals_s)]
        self.tpot_ms = (arrivals_s[-1] - arrivals_s[0]) * 1e3 / (len(tokens) - 1)
        self.tokens_per_step = (len(tokens) - 1) / (len(arrivals_s) - 1)


async def _decode(
    client: ZmqEngineClient,
    index: int,
    num_tokens: int,
    prediction: list[int],
    *,
    is_random: bool = False,
) -> _Run:
    from pdserve.wire.ids import RequestId
    from pdserve.wire.request import GenerateRequest
    from pdserve.wire.sampling import SamplingParams

    request = GenerateRequest(
        request_id=RequestId(f"{index}-{time.monotonic_ns()}"),
        prompt_token_ids=[300 + index + 37 * position for position in range(64)],
        sampling=SamplingParams(
            max_tokens=num_tokens,
            seed=index,
            temperature=1.0 if is_random else 0.0,
            ignore_eos=True,
        ),
        arrival_s=time.monotonic(),
        prediction_token_ids=prediction,
    )
    tokens: list[int] = []
    arrivals_s: list[float] = []
    async for output in client.generate(request):
        if output.new_token_ids:
            tokens += output.new_token_ids
            arrivals_s.append(time.perf_counter())
    return _Run(tokens, arrivals_s)


def _edited(tokens: list[int], seed: int) -> list[int]:
    """What a text was before it was edited: some tokens are others, lacking, or too many."""
    rng = random.Random(seed)
    before: list[int] = []
    at = 0
    while at < len(tokens):
        end = at + rng.randint(GAP // 2, GAP * 3 // 2)
        before += tokens[at:end]
        before += [rng.randrange(1000, 40_000) for _ in range(rng.randint(0, 6))]
        at = end + rng.randint(0, 6)
    return before


def _p99(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


if __name__ == "__main__":
    main()
