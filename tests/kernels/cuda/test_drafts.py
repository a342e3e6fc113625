"""A model of CUDA kernels with drafts: the bits of one without."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from pdserve.kernels.cuda.backend import load
from tests.worker.driver import params
from tests.worker.recorded_device import RecordedDevice
from tests.worker.test_drafting import DRAFTING, Recall, drafts_by
from tests.worker.test_graphs import Engine

if TYPE_CHECKING:
    from pathlib import Path

    from pdserve.config.speculative import SpeculativeConfig
    from pdserve.wire.sampling import TokenLogprobs

NUM_OUTPUTS = 7
ASKED = {
    "greedy": params(logprobs=2),
    "drawn": params(temperature=1.0, top_p=0.9, seed=3, frequency_penalty=0.4, logprobs=2),
}


def tell(
    directory: Path, speculative: SpeculativeConfig | None, known: dict[str, list[int]]
) -> tuple[dict[str, list[int]], dict[str, list[TokenLogprobs]], int]:
    """Tokens of all requests, what is told of them, and how many steps they took."""
    engine = Engine(
        directory,
        RecordedDevice(has_graphs=False),
        kernels=load(torch.device("cpu"), print),
        speculative=speculative,
        warms_up=False,
    )
    if speculative is not None:
        drafts_by(engine, Recall(known, lambda draft: [*draft[:2], 0]))
    told: dict[str, list[TokenLogprobs]] = {name: [] for name in ASKED}
    for name, sampling in ASKED.items():
        engine.add(name, [3, 5, 8, 13], sampling)
    num_steps = 0
    while num_left := {
        name: NUM_OUTPUTS - len(engine.outputs[name])
        for name in ASKED
        if len(engine.outputs[name]) < NUM_OUTPUTS
    }:
        rows = {name: min(3, num - 1) for name, num in num_left.items() if engine.outputs[name]}
        num_tokens = {name: engine.remaining(name) for name in num_left}
        answer = engine.step(num_tokens, {n: r for n, r in rows.items() if speculative and r > 0})
        num_steps += 1
        for name, entries in answer.logprobs.items():
            told[str(name)] += entries
    return engine.outputs, told, num_steps


@pytest.mark.matrix
@pytest.mark.usefixtures("hopper_products")
def test_tokens_and_logprobs_are_those_without_drafts_to_the_bit(tmp_path: Path) -> None:
    *wanted, num_steps = tell(tmp_path, None, {})
    *found, fewer = tell(tmp_path, DRAFTING, wanted[0])
    assert found == wanted
    assert len({*map(tuple, wanted[0].values())}) == 2
    assert fewer < num_steps
