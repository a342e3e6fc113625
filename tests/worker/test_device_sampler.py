"""Tokens that a device chooses are those of the host's sampler, and they alone come over."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from pdserve.kernels.ops import SamplingOps
from pdserve.kernels.reference import sampling as reference
from pdserve.wire.sampling import SamplingParams
from pdserve.worker.device_sampler import DeviceSampler
from pdserve.worker.philox import uniforms
from pdserve.worker.sampler import Sampler
from pdserve.worker.step_buffers import StepBuffers
from tests.worker.driver import params
from tests.worker.recorded_device import RecordedDevice

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pdserve.worker.sampler import Sampled
    from pdserve.worker.verifying import Verified

CPU = torch.device("cpu")
VOCAB = 300
ROWS = 8
PROMPT, OUTPUTS = [3, 4, 4, 299], [5, 9, 9]


class Bench:
    """A device's sampler and the host's, with the same rows."""

    def __init__(self, *asked: SamplingParams, num_drafted: int = 0) -> None:
        self.device = RecordedDevice()
        self.buffers = StepBuffers(
            self.device,
            num_rows=ROWS,
            max_blocks=1,
            max_num_tokens=ROWS,
            max_logits=ROWS * (1 + num_drafted),
        )
        self.there = DeviceSampler(
            ROWS, VOCAB, device=self.device, buffers=self.buffers, ops=SamplingOps()
        )
        self.host = Sampler(ROWS, VOCAB, CPU)
        for row, each in enumerate(asked):
            self.there.add(row, each, PROMPT, OUTPUTS)
            self.host.add(row, each, PROMPT, OUTPUTS)

    def sample(
        self, logits: torch.Tensor, rows: list[int], num_outputs: list[int]
    ) -> tuple[Sampled, Sampled]:
        at, index = np.array(rows, dtype=np.int64), np.array(num_outputs, dtype=np.int64)
        self.buffers.begin()
        staged = self.there.stage(at, index)
        self.buffers.upload(ROWS)
        mine = logits.clone()
        found = self.there.take(self.there.give(mine, *self.there.choose(mine), staged))
        return found, self.host.sample(logits.clone(), at, index)

    def verify(
        self, logits: torch.Tensor, num_outputs: NDArray[np.int64], drafts: list[list[int]]
    ) -> Verified:
        """What a step with drafts gives all rows."""
        self.buffers.begin()
        staged = self.there.stage(np.arange(ROWS), num_outputs, drafts)
        self.buffers.upload(ROWS)
        mine = logits.clone()
        return self.there.verified(self.there.give(mine, *self.there.choose(mine), staged))


def options(rng: random.Random) -> dict[str, Any]:
    return {
        "top_k": rng.choice((1, 5, 299)),
        "top_p": rng.choice((0.05, 0.5, 0.95)),
        "min_p": 0.03,
        "logprobs": 3,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.3,
        "logit_bias": {7: 4.0},
        "allowed_token_ids": (1, 2, 3, 77),
        "bad_words": rng.choice((((9, 9), (11,)), ((7,), (11,)))),
        "presence_penalty": -0.7,
    }


def random_params(rng: random.Random) -> SamplingParams:
    fields: dict[str, Any] = {"seed": rng.getrandbits(63), "temperature": rng.choice((0.0, 0.7, 2))}
    return params(**fields, **{k: v for k, v in options(rng).items() if rng.random() < 0.25})


def test_no_parameter_that_chooses_tokens_is_left_out_here() -> None:
    ends = {"min_tokens", "eos_token_ids", "stop_token_ids", "ignore_eos"}  # test_device_drafts
    hosts = {"max_tokens", "grammar", "logprob_token_ids", "prompt_logprobs", "pooling"}
    compared = {"seed", "temperature", *options(random.Random(0))}
    assert compared | ends | hosts == set(SamplingParams.__struct_fields__)


@pytest.mark.parametrize("seed", range(8))
def test_a_device_chooses_the_tokens_of_the_host(seed: int) -> None:
    rng = random.Random(seed)
    bench = Bench(*(random_params(rng) for _ in range(ROWS)))
    generator = torch.Generator().manual_seed(seed)
    for index in range(12):
        rows = rng.sample(range(ROWS), rng.randint(1, ROWS))
        logits = torch.randn(len(rows), VOCAB, generator=generator) * 2
        if index % 4 == 3:
            logits[0, 7] = rng.choice((math.nan, math.inf, -math.inf))
        found, wanted = bench.sample(logits, rows, [3 + index] * len(rows))
        assert found.non_finite == wanted.non_finite
        sound = [i for i in range(len(rows)) if i not in wanted.non_finite]
        assert found.token_ids[sound].tolist() == wanted.token_ids[sound].tolist()
        assert {i: found.logprobs[i] for i in sound if i in found.logprobs} == {
            i: wanted.logprobs[i] for i in sound if i in wanted.logprobs
        }


def test_only_tokens_come_to_the_host() -> None:
    bench = Bench(params(temperature=1.0, top_p=0.9, seed=3), params())
    bench.device.copies.clear()
    bench.sample(torch.randn(2, VOCAB), [0, 1], [0, 0])
    assert bench.device.copies[1:] == [2 * 8]


def test_uniform_numbers_made_ahead_are_those_of_the_tokens() -> None:
    bench = Bench(*(params(temperature=1.0, seed=2**64 - 1 - row) for row in range(3)))
    rows = np.arange(3)
    for index in (0, 1, 31, 32, 40, 5, 4000):
        at = np.array([index, index + 7, 2 * index])
        made = bench.there._uniforms(rows, at)
        seeds = np.array([2**64 - 1 - row for row in range(3)], dtype=np.uint64)
        assert (made * 2.0**-53).tolist() == uniforms(seeds, at).tolist()


def test_a_row_that_is_given_to_another_request_has_its_numbers() -> None:
    bench = Bench(params(temperature=3.0, seed=1))
    logits = torch.zeros(1, VOCAB)
    first, _ = bench.sample(logits, [0], [0])
    for sampler in (bench.there, bench.host):
        sampler.remove(0)
        sampler.add(0, params(temperature=3.0, seed=2), PROMPT, [])
    second, wanted = bench.sample(logits, [0], [0])
    assert second.token_ids.tolist() == wanted.token_ids.tolist() != first.token_ids.tolist()


def test_all_that_a_step_may_launch_is_warmed_up() -> None:
    called: list[str] = []

    def spy(name: str, call: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            called.append(name + "".join(f" {key}" for key, value in kwargs.items() if value))
            return call(*args, **kwargs)

        return run

    bench = Bench()
    ops = SamplingOps()
    DeviceSampler(
        ROWS,
        VOCAB,
        device=bench.device,
        buffers=bench.buffers,
        ops=SamplingOps(
            **{name: spy(name, getattr(ops, name)) for name in ("largest", "draw", "rule", "note")}
        ),
    ).warm_up()
    assert called[:5] == ["largest", "draw", "draw by_p", "draw by_k", "draw by_k by_p"]
    assert called[5:] == ["rule", "rule avoids", "rule by_bias", "rule by_bias avoids", "note"]


def test_rules_without_a_bias_launch_the_kernel_that_was_warmed_up() -> None:
    launched: list[tuple[object, ...]] = []

    def rule(logits: Any, tables: Any, ruled: Any, **asked: bool) -> None:
        launched.append((*asked.items(), *(tensor.dtype for tensor in (*tables, *ruled))))

    bench = Bench()
    ops = SamplingOps(rule=rule)
    sampler = bench.there = DeviceSampler(
        ROWS, VOCAB, device=bench.device, buffers=bench.buffers, ops=ops
    )
    sampler.warm_up()
    warmed, launched[:] = set(launched), []
    for row, fields in enumerate(({"frequency_penalty": 1.0}, {"logit_bias": {7: 1.0}})):
        sampler.add(row, params(**fields), PROMPT, OUTPUTS)
        bench.sample(torch.zeros(1, VOCAB), [row], [3])
    assert len(launched) == 2
    assert warmed >= set(launched)


def test_warming_up_takes_the_memory_of_logits_of_all_drafts() -> None:
    num_rows: list[int] = []

    def largest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        num_rows.append(len(logits))
        return reference.largest(logits)

    bench = Bench(num_drafted=3)
    DeviceSampler(
        ROWS,
        VOCAB,
        device=bench.device,
        buffers=bench.buffers,
        ops=SamplingOps(largest=largest),
    ).warm_up()
    assert num_rows == [ROWS * 4]
