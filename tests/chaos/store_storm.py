"""`python -m tests.chaos.store_storm`: 200 streams at once, and P, a D and the store are killed.

The store has their prompts, a third of the clients leave, and whatever was killed is started again
while the others go on. Ends with 1 if a token was wrong, or anything is left.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from tests.chaos.store import STARTED_AGAIN_S, started_with_store
from tests.chaos.streams import NUM_TOKENS
from tests.lmcache_server import memory_status
from tests.tiny_models import write_tiny_model
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.chaos.store import StoreStage
    from tests.chaos.streams import Stream

ROW = "the store's server, P and D die"
PROMPT_TOKENS = 320
STREAMED_TOKENS = 160
STREAMS_PER_PROMPT = 4
STREAMS_PER_LEAVER = 3
BOUND_S = 120.0
LEFT_S = 5.0
"""What is left after this is left for good."""


def storm(stage: StoreStage, num_streams: int, seed: int = 0) -> None:
    """Play it on a deployment that is whole; afterwards it is whole again."""
    rng = random.Random(seed)
    prompts = [stage.prompt(PROMPT_TOKENS) for _ in range(num_streams // STREAMS_PER_PROMPT)]
    right = [stage.right_answer(prompt, STREAMED_TOKENS) for prompt in prompts]
    first = [tokens[:NUM_TOKENS] for tokens in right]
    assert stage.keep(prompts) == first
    chosen = [rng.randrange(len(prompts)) for _ in range(num_streams)]
    since_s = time.monotonic()
    streams = [stage.stream(prompts[index], STREAMED_TOKENS) for index in chosen]
    leavers = {
        number: rng.randrange(STREAMED_TOKENS)
        for number in rng.sample(range(num_streams), num_streams // STREAMS_PER_LEAVER)
    }
    _play(stage, streams, leavers)
    ends = Counter(stream.end for stream in streams)
    print(f"{num_streams} streams after {time.monotonic() - since_s:.1f} s: {dict(ends)}")
    stage.deployment.wait()
    stage.settle(
        ROW,
        f"amid {num_streams} requests",
        streams,
        [right[index] for index in chosen],
        since_s=since_s,
        bound_s=BOUND_S,
        expect={"finished", "left", "engines_ended"},  # the last: it had both P and the D
    )
    stage.wait_store(is_up=True, timeout_s=STARTED_AGAIN_S)
    assert not any(each.exists() for each in stage.store.segments), "of lives that are over"
    wait_until(lambda: not _num_locks(stage), LEFT_S)
    stage.forget()
    hits = stage.hits()  # an engine that was started again counts from 0
    assert stage.ask(prompts) == first
    assert stage.hits() > hits, "what it has on its disk is found again"


def _play(stage: StoreStage, streams: list[Stream], leavers: dict[int, int]) -> None:
    """Kill one after the other while streams begin; return when all have ended.

    Args:
        leavers: After how many tokens which client leaves.
    """
    faults: list[Callable[[], None]] = [
        lambda: _restart(stage, "prefill"),
        lambda: _restart(stage, "decode1"),
        lambda: _restart_store(stage),
    ]
    each = len(streams) // (2 * len(faults))
    until_s = time.monotonic() + BOUND_S
    num_played = 0
    while any(stream.end is None for stream in streams) and time.monotonic() < until_s:
        num_begun = sum(bool(stream.tokens or stream.end) for stream in streams)
        if num_played < len(faults) and num_begun > each * (num_played + 1):
            faults[num_played]()
            num_played += 1
        for number, num_tokens in list(leavers.items()):
            if len(streams[number].tokens) >= num_tokens:
                streams[number].leave()
                del leavers[number]
        time.sleep(0.01)
    assert num_played == len(faults), "the streams were over before the last fault"


def _restart_store(stage: StoreStage) -> None:
    stage.store.kill()
    stage.store.start(waits=False)


def _restart(stage: StoreStage, name: str) -> None:
    stage.kill(name)
    stage.start_again(name)


def _num_locks(stage: StoreStage) -> int:
    status = memory_status(stage.store.http_url)
    return int(status["read_locked_count"]) + int(status["write_locked_count"])


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pdserve-storm-") as folder:
        directory = Path(folder)
        model = write_tiny_model(directory / "model", "llama", tie_word_embeddings=True)
        with started_with_store(directory, model) as stage:
            storm(stage, arguments.streams, arguments.seed)
    print(
        "storm: PASSED: no wrong token, no request without an end, no block, lock or segment left"
    )


if __name__ == "__main__":
    main()
