"""An engine on CUDA: its KV memory, its tokens, what it says of itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from pdserve.config.schema import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from tests.tiny_models import greedy_by_transformers, write_tiny_model
from tests.worker.driver import Driver, params, workers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.gpu

PROMPTS = [[3 + (17 * i + 5 * n) % 311 for i in range(n)] for n in (1, 17, 150)]
NUM_TOKENS = 24


@pytest.fixture
def start() -> Iterator[Callable[..., Driver]]:
    """Start a worker on a device, and a driver for it."""
    with workers() as begin:

        def make(model: Path, device: str) -> Driver:
            return begin(
                EngineConfig(
                    model=ModelConfig(model=str(model), dtype="float32"),
                    device=device,
                    cache=CacheConfig(num_gpu_blocks_override=64, block_size=16),
                    scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=512),
                )
            )

        yield make


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral", "deepseek_v3"])
def test_greedy_tokens_on_cuda_are_those_of_transformers(
    cuda: torch.device, start: Callable[..., Driver], tmp_path: Path, family: str
) -> None:
    model = write_tiny_model(tmp_path, family)
    driver = start(model, "cuda")
    wanted = greedy_by_transformers(model, PROMPTS, NUM_TOKENS)
    for number, prompt in enumerate(PROMPTS):
        driver.add(str(number), prompt)
    driver.step({str(number): len(prompt) for number, prompt in enumerate(PROMPTS)})
    for _ in range(NUM_TOKENS - 1):
        driver.step({str(number): 1 for number in range(len(PROMPTS))})
    assert [driver.outputs[str(number)] for number in range(len(PROMPTS))] == wanted
    assert driver.info.device == f"cuda:{cuda.index}"


def test_random_tokens_on_cuda_are_those_of_the_cpu(
    cuda: torch.device, start: Callable[..., Driver], tmp_path: Path
) -> None:
    model = write_tiny_model(tmp_path)
    found = []
    for device in ("cpu", cuda.type):
        driver = start(model, device)
        driver.add("r", PROMPTS[2], params(temperature=1.0, top_p=0.9, seed=7))
        found.append(driver.run("r", NUM_TOKENS))
    assert found[0] == found[1]


def test_kv_memory_lies_on_the_device_in_the_layout_of_the_cpu(
    cuda: torch.device, start: Callable[..., Driver], tmp_path: Path
) -> None:
    model = write_tiny_model(tmp_path)
    here, there = start(model, "cpu"), start(model, cuda.type)
    assert here.info.layout == there.info.layout
    assert here.info.layout_digest == there.info.layout_digest
    memories = []
    for driver in (here, there):
        driver.add("r", PROMPTS[2])
        driver.step({"r": len(PROMPTS[2])})
        runner = driver.worker._runner
        assert runner is not None
        blocks = driver._blocks["r"][: len(PROMPTS[2]) // here.info.layout.block_size]
        memories.append([layer[blocks] for layer in runner._kv_layers])
    for on_cpu, on_device in zip(*memories, strict=True):
        assert on_device.device == cuda
        torch.testing.assert_close(on_device.cpu(), on_cpu, rtol=1e-4, atol=1e-4)
        assert on_device.stride() == on_cpu.stride()


def test_a_row_that_becomes_nan_on_cuda_fails_alone(
    cuda: torch.device, start: Callable[..., Driver], tmp_path: Path
) -> None:
    model = write_tiny_model(tmp_path)
    alone = start(model, cuda.type)
    alone.add("sound", PROMPTS[1])
    wanted = alone.run("sound", 4)
    driver = start(model, cuda.type)
    driver.add("sound", PROMPTS[1])
    driver.add("bad", PROMPTS[2])
    driver.step({"sound": 17, "bad": 150})
    runner = driver.worker._runner
    assert runner is not None
    runner._kv_layers[1][driver._blocks["bad"][0]].fill_(float("nan"))
    assert driver.step({"sound": 1, "bad": 1}).non_finite_ids == ["bad"]
    assert driver.run("sound", 4) == wanted
