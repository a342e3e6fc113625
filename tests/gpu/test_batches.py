"""A request's tokens on CUDA are its own: neither its batch, nor chunks, nor blocks change them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.config.boxed import boxed_model_dir
from pdserve.config.schema import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from tests.worker.driver import Driver, params, workers

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]

NUM_OUTPUTS = 24
SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 11},
    {"temperature": 1.0, "top_p": 0.9, "seed": 11},
    {"temperature": 0.8, "top_k": 7, "seed": 3},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.8, "min_p": 0.02, "seed": 5},
]
LENGTHS = (1, 2, 15, 16, 17, 100, 257, 512, 700)


@pytest.fixture(scope="module")
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    """A worker with the boxed model in bf16."""
    request.getfixturevalue("cuda")
    with workers() as begin:
        yield begin(
            EngineConfig(
                model=ModelConfig(model=str(boxed_model_dir()), dtype="bfloat16"),
                device="cuda",
                cache=CacheConfig(num_gpu_blocks_override=2048),
                scheduler=SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=1024),
            )
        )


def prompt(length: int) -> list[int]:
    return [3 + (17 * i + 5 * length) % 311 for i in range(length)]


@pytest.fixture(scope="module")
def alone(driver: Driver) -> dict[str, list[int]]:
    """The tokens of each request that had the engine for itself, its prompt in one piece."""
    found = {}
    for length in LENGTHS:
        for number, fields in enumerate(SAMPLING):
            name = f"{length}-{number}"
            driver.add(name, prompt(length), params(**fields))
            found[name] = list(driver.run(name, NUM_OUTPUTS))
            driver.drop(name)
    assert len({tuple(tokens) for tokens in found.values()}) > len(LENGTHS) * 3
    return found


@pytest.mark.parametrize("seed", range(4))
def test_no_batch_changes_a_token(
    cuda: torch.device, driver: Driver, alone: dict[str, list[int]], seed: int
) -> None:
    rng = random.Random(seed)
    waiting = sorted(alone)
    rng.shuffle(waiting)
    running: list[str] = []
    found = {}
    while waiting or running:
        while waiting and len(running) < 24 and rng.random() < 0.6:
            length, number = waiting[-1].split("-")
            running.append(waiting.pop())
            driver.add(running[-1], prompt(int(length)), params(**SAMPLING[int(number)]))
        step: dict[str, int] = {}
        budget = 1024
        for name in rng.sample(running, len(running)):
            left = driver.remaining(name)
            num = 1 if left == 1 else rng.choice([1, 7, 15, 16, 64, 512, 1000])
            if num := min(left, num, budget):
                step[name] = num
                budget -= num
        if step:
            driver.step(step)
        for name in [name for name in running if len(driver.outputs[name]) >= NUM_OUTPUTS]:
            running.remove(name)
            found[name] = driver.outputs[name][:NUM_OUTPUTS]
            driver.drop(name)
    different = [name for name in sorted(alone) if found[name] != alone[name]]
    assert not different, {name: (found[name], alone[name]) for name in different[:2]}
