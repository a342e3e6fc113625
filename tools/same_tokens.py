"""Whether two trees write the same tokens: `python -m tools.same_tokens OLD NEW`.

Starts the same deployments of each tree by its own commands, sends each the same 200 seeded
requests, and compares text, token ids and log-probabilities bit by bit; exit code 1 if any differ,
or if the KV did not move as it should have.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from tests.e2e.deployment import Deployment
from tests.tiny_models import write_tiny_model

NUM_REQUESTS: Final = 40
"""To each deployment."""
_AT_ONCE: Final = 4
_TIMEOUT_S: Final = 120.0


@dataclass(frozen=True)
class Setup:
    """One deployment: a proxy, a prefill and a decode engine.

    Attributes:
        family: Of the model; boxed, or tiny random weights.
        vocab: Prompts are of token ids below it.
        kv_mode: Who moves the KV: push or pull.
        ranks: TP size of both engines.
    """

    family: str
    vocab: int
    kv_mode: str
    ranks: int = 1

    def __str__(self) -> str:
        return f"{self.family} {self.kv_mode} tp={self.ranks}"


SETUPS: Final = (
    Setup("boxed", 512, "pull"),
    Setup("boxed", 512, "push"),
    Setup("llama", 250, "push", ranks=2),
    Setup("mixtral", 250, "pull"),
    Setup("mixtral", 250, "push", ranks=2),
)


def requests_of(setup: Setup) -> list[dict[str, Any]]:
    """Draw the requests of a deployment: half of them greedy, half sampled with a seed."""
    chance = random.Random(str(setup))
    return [
        {
            "prompt": [chance.randrange(3, setup.vocab) for _ in range(chance.randint(1, 300))],
            "max_tokens": chance.randint(2, 24),
            "seed": index,
            "temperature": 0.0 if index % 2 else 0.9,
            "top_p": 1.0 if index % 2 else 0.95,
            "logprobs": 3,
            "return_token_ids": True,
            "ignore_eos": True,
        }
        for index in range(NUM_REQUESTS)
    ]


async def answers_of(url: str, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Send all requests, a few at once; return the choice of each."""
    places = asyncio.Semaphore(_AT_ONCE)
    async with httpx.AsyncClient(timeout=_TIMEOUT_S, verify=False) as client:

        async def ask(body: dict[str, Any]) -> dict[str, Any]:
            async with places:
                answer = await client.post(f"{url}/v1/completions", json=body)
            answer.raise_for_status()
            choice: dict[str, Any] = answer.json()["choices"][0]
            return choice

        return await asyncio.gather(*map(ask, requests))


def play(tree: Path, setup: Setup, model: str, directory: Path) -> tuple[list[dict[str, Any]], int]:
    """Start the deployment from a tree; return its answers, and how many loads were as wanted."""
    deployment = Deployment(directory)
    common = [model, "--port", "0", "--num-threads", "1", "--kv-cache-memory-bytes", "256MiB"]
    common += ["--tensor-parallel-size", str(setup.ranks), "--dtype", "float32"]
    try:
        deployment.start("proxy", "proxy", "--port", "0", "--kv-mode", setup.kv_mode, tree=tree)
        deployment.wait()
        for role in ("prefill", "decode"):
            deployment.start(role, role, *common, "--proxy", deployment.url("proxy"), tree=tree)
        deployment.wait()
        deployment.wait_routable()
        found = asyncio.run(answers_of(deployment.url("proxy"), requests_of(setup)))
        loads = deployment.metrics("decode")
        as_wanted = [
            count
            for series, count in loads.items()
            if series.startswith("pdserve_kv_loads_total{") and f'"{setup.kv_mode}"' in series
        ]
        return found, int(sum(as_wanted))
    finally:
        deployment.end()


def main() -> int:
    """Play everything to both trees and tell what differs."""
    parser = argparse.ArgumentParser(description="whether two trees write the same tokens")
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    arguments = parser.parse_args()
    num_same, num_tokens, is_moved = 0, 0, True
    with tempfile.TemporaryDirectory() as name:
        for number, setup in enumerate(SETUPS):
            model = setup.family
            if model != "boxed":
                model = str(write_tiny_model(Path(name) / f"model{number}", model))
            answers: list[list[dict[str, Any]]] = []
            for tree in (arguments.old, arguments.new):
                directory = Path(name) / f"{number}{len(answers)}"
                directory.mkdir()
                found, num_loads = play(tree.resolve(), setup, model, directory)
                is_moved &= num_loads >= NUM_REQUESTS
                answers.append(found)
                print(f"{setup}: {tree}: {num_loads} loads for {len(found)} requests", flush=True)
            for index, (old, new) in enumerate(zip(*answers, strict=True)):
                num_same += old == new
                num_tokens += len(new["token_ids"])
                if old != new:
                    print(f"{setup}, request {index} differs:\n  {old}\n  {new}")
    num = NUM_REQUESTS * len(SETUPS)
    print(f"{num_same} of {num} requests have the same {num_tokens} tokens and log-probabilities")
    return 0 if num_same == num and is_moved else 1


if __name__ == "__main__":
    sys.exit(main())
