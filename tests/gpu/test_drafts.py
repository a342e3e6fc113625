"""Drafts on CUDA: tokens and log-probabilities to the bit as without, in graphs and launched."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from pdserve.config.schema import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from pdserve.config.speculative import SpeculativeConfig
from tests.worker.draft_models import write_eagle, write_pair
from tests.worker.driver import TINY, Driver, params, workers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import torch

    from pdserve.wire.sampling import TokenLogprobs

pytestmark = pytest.mark.gpu

NUM_ROWS = 4
NUM_OUTPUTS = 40
ASKED = [
    params(),
    params(logprobs=3),
    params(temperature=1.0, seed=1, logprobs=1),
    params(temperature=1.2, seed=2, top_p=0.9, top_k=50),
    params(temperature=0.7, seed=3, frequency_penalty=0.5, repetition_penalty=1.2),
    params(logit_bias={5: 4.0}, bad_words=((9,), (5, 7)), min_tokens=5, stop_token_ids=(3,)),
]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str, bool], Driver]]:
    """Start a worker on the device that drafts by a method, or by none."""
    target, draft = write_pair(tmp_path, num_layers=8, max_position_embeddings=256)
    eagle = tmp_path / "eagle3"
    write_eagle(eagle, "eagle3")
    paths = {"draft_model": draft, "eagle3": eagle}
    with workers() as begin:

        def make(method: str, enforce_eager: bool) -> Driver:
            speculative = SpeculativeConfig()
            if method:
                model = str(paths.get(method, ""))
                speculative = SpeculativeConfig(
                    method=method,
                    model=model,
                    num_speculative_tokens=NUM_ROWS,
                    prompt_lookup_min=1,
                    prompt_lookup_max=5,
                )
            return begin(
                EngineConfig(
                    model=ModelConfig(
                        model=str(target), dtype="float32", enforce_eager=enforce_eager
                    ),
                    device="cuda",
                    cache=CacheConfig(num_gpu_blocks_override=128),
                    scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=512),
                    speculative=speculative,
                )
            )

        yield make


def serve(driver: Driver, num_rows: int) -> tuple[list[list[int]], list[list[TokenLogprobs]], int]:
    """All requests together: their tokens, what is told of them, and the steps of all of them."""
    rng = random.Random(1)
    told: dict[str, list[TokenLogprobs]] = {}
    for number, sampling in enumerate(ASKED):
        part = rng.choices(range(8, TINY["vocab_size"]), k=5)
        driver.add(f"r{number}", part * rng.randint(1, 6), sampling)
        told[f"r{number}"] = []
    num_steps = 0
    while left := [name for name, each in driver.outputs.items() if len(each) < NUM_OUTPUTS]:
        rows = {
            name: min(num_rows, NUM_OUTPUTS - len(driver.outputs[name]) - 1)
            for name in left
            if driver.outputs[name]
        }
        answer = driver.step(
            {name: driver.remaining(name) for name in left},
            {name: num for name, num in rows.items() if num > 0},
        )
        driver.worker.finish_step()
        num_steps += len(answer.request_ids)
        for name, entries in answer.logprobs.items():
            told[str(name)] += entries
    return list(driver.outputs.values()), list(told.values()), num_steps


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "launched"])
@pytest.mark.parametrize("method", ["ngram", "suffix", "draft_model", "eagle3"])
def test_tokens_and_logprobs_are_those_without_drafts(
    cuda: torch.device, start: Callable[[str, bool], Driver], method: str, enforce_eager: bool
) -> None:
    *wanted, num_steps = serve(start("", False), 0)
    *found, fewer = serve(start(method, enforce_eager), NUM_ROWS)
    assert found == wanted
    assert fewer < num_steps
