"""Replayed decode steps on CUDA, and tokens chosen there."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import pytest
import torch

from pdserve.config.schema import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from pdserve.kernels.reference import sampling as reference
from pdserve.kernels.reference.sampling import Draws
from pdserve.kernels.registry import kernels_on
from pdserve.worker.device_sampler import DeviceSampler
from tests.worker.driver import TINY, Driver, params, workers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import Tensor

    from pdserve.worker.device_sampler import ComingTokens, StagedDraws

pytestmark = pytest.mark.gpu

ARCH = {
    **TINY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
}
ASKED = [
    params(),
    params(temperature=0.8, seed=5),
    params(temperature=1.5, seed=6, top_p=0.9),
    params(temperature=1.5, seed=7, top_k=30, frequency_penalty=0.4),
    params(),
    params(logprobs=2),
]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Driver]]:
    """Start a worker on the device, with random weights of a dtype."""
    (tmp_path / "config.json").write_text(json.dumps(ARCH))
    with workers() as begin:

        def make(dtype: str) -> Driver:
            return begin(
                EngineConfig(
                    model=ModelConfig(model=str(tmp_path), load_format="dummy", dtype=dtype),
                    device="cuda",
                    cache=CacheConfig(num_gpu_blocks_override=256, block_size=64),
                    scheduler=SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=512),
                )
            )

        yield make


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Logits of every step, as they were chosen from."""
    logits: list[Tensor] = []
    give = DeviceSampler.give

    def spy(
        self: DeviceSampler, rows: Tensor, tokens: Tensor, peaks: Tensor, staged: StagedDraws
    ) -> ComingTokens:
        logits.append(rows.clone())
        return give(self, rows, tokens, peaks, staged)

    monkeypatch.setattr(DeviceSampler, "give", spy)
    return logits


def play(driver: Driver) -> dict[str, list[int]]:
    """Six requests, of which some compute in each step."""
    rng = random.Random(1)
    for number, sampling in enumerate(ASKED):
        prompt = rng.choices(range(TINY["vocab_size"]), k=(1, 70, 500, 9, 64, 128)[number])
        driver.add(f"r{number}", prompt, sampling)
    driver.step({name: driver.remaining(name) for name in ("r0", "r1", "r3")})
    driver.step({name: min(200, driver.remaining(name)) for name in ("r0", "r2", "r4")})
    while min(map(len, driver.outputs.values())) < 20:
        chosen = rng.sample(sorted(driver.outputs), rng.randint(1, 6))
        driver.step({name: min(300 // len(chosen), driver.remaining(name)) for name in chosen})
    return driver.outputs


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_replayed_steps_have_the_bits_of_launched_ones(
    cuda: torch.device, start: Callable[[str], Driver], seen: list[Tensor], dtype: str
) -> None:
    replayed = start(dtype)
    runner = replayed.worker._runner
    assert runner is not None
    assert runner.runs_ahead, "the log says what cannot be captured"
    assert runner._forward.prompt_graphs is not None, "likewise"
    tokens, logits = play(replayed), list(seen)
    seen.clear()
    launched = start(dtype)
    runner = launched.worker._runner
    assert runner is not None
    runner._replays = runner._forward.prompt_graphs = None
    assert play(launched) == tokens
    assert all(torch.equal(a, b) for a, b in zip(logits, seen, strict=True))
    assert len({*map(tuple, tokens.values())}) == len(ASKED)


def test_steps_are_replayed_where_memory_was_measured_before(
    cuda: torch.device, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(ARCH))
    with workers() as begin:
        driver = begin(
            EngineConfig(
                model=ModelConfig(model=str(tmp_path), load_format="dummy", dtype="bfloat16"),
                device="cuda",
                cache=CacheConfig(gpu_memory_utilization=0.1),
                scheduler=SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=512),
            )
        )
        assert driver.worker.runs_ahead, "the log says what cannot be captured"
        assert len(play(driver)) == len(ASKED)


def test_a_request_has_its_tokens_in_any_company(
    cuda: torch.device, start: Callable[[str], Driver]
) -> None:
    together = play(start("bfloat16"))
    alone = start("bfloat16")
    rng = random.Random(1)
    for number, sampling in enumerate(ASKED):
        prompt = rng.choices(range(TINY["vocab_size"]), k=(1, 70, 500, 9, 64, 128)[number])
        alone.add(f"r{number}", prompt, sampling)
        wanted = together[f"r{number}"]
        assert alone.run(f"r{number}", len(wanted)) == wanted


@pytest.mark.parametrize("vocab_size", [211, 32000, 128256, 151936])
def test_tokens_are_chosen_as_the_reference_chooses_them(
    cuda: torch.device, vocab_size: int
) -> None:
    ops = kernels_on(cuda).sampling
    num_rows, whole = 37, 1 << 53
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(num_rows, vocab_size, generator=generator) * 3).to(cuda)
    logits[3, 100] = torch.nan
    logits[4, 7] = logits[4, 209] = 60.0
    draws = Draws(
        rows=torch.randperm(num_rows, generator=generator)[:30].int().to(cuda),
        scale=(torch.rand(30, generator=generator) * 3 + 0.3).to(cuda),
        min_p=torch.where(torch.rand(30, generator=generator) < 0.3, 0.01, 0.0).to(cuda),
        top_k=torch.randint(0, 60, (30,), generator=generator).int().to(cuda),
        top_p=(torch.rand(30, generator=generator, dtype=torch.float64) * whole).long().to(cuda),
        uniform=(torch.rand(30, generator=generator, dtype=torch.float64) * whole).long().to(cuda),
    )
    tokens, peaks = ops.largest(logits)
    wanted, wanted_peaks = reference.largest(logits)
    assert torch.equal(tokens, wanted)
    torch.testing.assert_close(peaks, wanted_peaks, rtol=0, atol=0, equal_nan=True)
    ops.draw(logits, peaks, draws, tokens, by_k=True, by_p=True)
    reference.draw(logits, peaks, draws, wanted, by_k=True, by_p=True)
    # Powers of two are not rounded alike: a token at a border may be its neighbour.
    assert int((tokens != wanted).sum()) <= 1
