"""Whether indexes of others, fed by our events in vLLM's shape, have what our cache has.

`make readers` makes a virtual environment for them, as `ai-dynamo-runtime` wants another pydantic
than our tests, and runs this. Prompts are computed, evicted, cleared; batches are lost on the way;
the engine restarts. Every so often, once all is quiet, each prompt must be found as deep in the
reader's index as in the cache.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.routing_dynamo import SIDE, SelectionProcess
from tests.readers.lossy_engine import BLOCK_SIZE, PROMPTS, LossyEngine, tokens_of
from tests.readers.vllm_router import MODEL, VllmRouter

if TYPE_CHECKING:
    from collections.abc import Sequence

WORKER = 7
PATIENCE_S = 20.0
LOSS = 0.2


class Dynamo:
    """`SelectionService` of `ai-dynamo-runtime`, in a process of its own."""

    replay_topic = False  # its replay reads no frame more

    def __init__(self, python: Path) -> None:
        self._service = SelectionProcess([python, SIDE])

    def start(self, engine: LossyEngine) -> None:
        self._service.ask(
            "upsert_worker",
            {
                "worker_id": WORKER,
                "model_name": MODEL,
                "endpoint": "http://127.0.0.1:9",
                "block_size": BLOCK_SIZE,
                "max_num_batched_tokens": 8192,
                "kv_events_endpoint": engine.network.endpoint,
                "replay_endpoint": engine.replay_endpoint,
            },
        )

    def restarted(self, engine: LossyEngine) -> None:
        """Do what an operator must: it does not notice that numbers begin again."""
        self._service.ask("delete_worker", WORKER)
        self.start(engine)

    def depths(self, prompts: Sequence[str], expected: Sequence[int]) -> list[int]:
        """Blocks of each prompt that it believes the engine to have."""
        answers = [
            self._service.ask(
                "overlap_scores", {"model_name": MODEL, "token_ids": tokens_of(prompt)}
            )
            for prompt in prompts
        ]
        return [answer["workers"][0]["device_blocks"] for answer in answers]

    def close(self) -> None:
        self._service.close()


READERS = {"dynamo": Dynamo, "vllm-router": VllmRouter}


def play(reader: Any, *, num_steps: int, seed: int) -> dict[str, int]:
    """Let an engine live, and compare; return how much of what happened."""
    rng = random.Random(seed)
    engine = LossyEngine(rng, replay_topic=reader.replay_topic)
    num_compared = 0
    try:
        reader.start(engine)
        for step in range(1, num_steps + 1):
            engine.network.loss = LOSS
            engine.step()
            time.sleep(0.001)  # the network keeps up
            if rng.random() < 0.002:
                engine.restart()
                reader.restarted(engine)
            if step % 250 == 0 or step == num_steps:
                engine.network.loss = 0.0
                compare(reader, engine)
                num_compared += len(PROMPTS)
        return {
            "steps": num_steps,
            "compared": num_compared,
            "lives": engine.num_lives,
            "lost": engine.network.num_lost,
        }
    finally:
        engine.close()


def compare(reader: Any, engine: LossyEngine) -> None:
    """Wait until the reader has what the engine has.

    Raises:
        AssertionError: It never does.
    """
    end_s = time.monotonic() + PATIENCE_S
    while True:
        engine.beat()
        time.sleep(0.05)
        expected = [engine.depth(prompt) for prompt in PROMPTS]
        found = reader.depths(PROMPTS, expected)
        if found == expected:
            return
        wrong = [each for each in zip(PROMPTS, expected, found, strict=True) if each[1] != each[2]]
        assert time.monotonic() < end_s, f"(prompt, depth here, depth there): {wrong}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", type=Path, default=Path(".venv-readers/bin/python"))
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--reader", choices=READERS, nargs="+", default=list(READERS))
    args = parser.parse_args()
    if not args.python.exists():
        sys.exit(f"{args.python} is not there: run make readers")
    for name in args.reader:
        print(f"{name}, --seed {args.seed}", file=sys.stderr)
        reader = READERS[name](args.python)
        try:
            told = play(reader, num_steps=args.steps, seed=args.seed)
        finally:
            reader.close()
        print(json.dumps({"reader": name, "seed": args.seed, **told}), flush=True)


if __name__ == "__main__":
    main()
