"""Mistakes that others have published of their devices, made in what ships, and seen.

Those with staging memory, padding, captures and addresses are in `test_graphs`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from pdserve.worker.device_sampler import DeviceSampler
from pdserve.worker.step_buffers import StepBuffers
from tests.worker.driver import TINY
from tests.worker.recorded_device import RecordedDevice, RecordedEvent
from tests.worker.test_ahead import PLAIN, generate, lasting
from tests.worker.test_graphs import Engine, Hooks

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from pdserve.wire.step import ModelRunnerOutput
    from pdserve.worker.device_sampler import ComingTokens
    from pdserve.worker.sampler import Sampled
    from pdserve.worker.step import LaunchedStep

pytestmark = pytest.mark.slow

PROMPT = list(range(1, 41))


def num_stored(kv: Tensor) -> int:
    """How many tokens have KV in a pool, going by the first keys of its last layer."""
    return int(kv[:, -1, 0, 0].any(-1).sum())


def test_kv_that_may_leave_is_computed(tmp_path: Path) -> None:
    device = RecordedDevice()
    engine = Engine(tmp_path, device)
    seen = device.watch(engine.kv)
    engine.add("r", PROMPT)
    found = []
    for num_tokens in (17, 17, 6, 1, 1):  # pieces of a prompt, its last one, steps that are graphs
        engine.step({"r": num_tokens})
        found.append(num_stored(seen))
    assert found == [17, 34, 40, 41, 42]


def test_kv_may_leave_while_the_device_computes_the_step_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = RecordedDevice()
    engine = Engine(tmp_path, device)
    seen, collect = device.watch(engine.kv), engine.runner.collect
    found, computed = [], [0]

    def look(launched: LaunchedStep) -> ModelRunnerOutput:
        output = collect(launched)
        found.append(num_stored(seen))
        computed.append(computed[-1] + launched.step.num_tokens)
        return output

    monkeypatch.setattr(engine.runner, "collect", look)
    _, executor, _ = generate(engine, [lasting(PLAIN[0], 6)])
    assert executor.num_ahead
    assert found == computed[1:]


@pytest.mark.parametrize(
    ("owner", "wait", "prompt"),
    [(RecordedDevice, "synchronize", PROMPT), (RecordedEvent, "wait", PROMPT[:1])],
    ids=["of a piece of a prompt", "of a graph"],
)
def test_kv_that_leaves_before_it_is_computed_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, wait: str, prompt: list[int]
) -> None:
    device = RecordedDevice()
    engine = Engine(tmp_path, device)
    seen = device.watch(engine.kv)
    engine.add("r", prompt)
    monkeypatch.setattr(owner, wait, lambda _: None)
    engine.step({"r": min(17, len(prompt))})
    assert num_stored(seen) == 0


@pytest.mark.parametrize("missing", ["wait", "record"])
def test_tokens_that_are_read_before_they_have_come_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    engine = Engine(tmp_path, RecordedDevice())
    monkeypatch.setattr(RecordedEvent, missing, lambda _: None)
    engine.add("r", PROMPT[:1])
    engine.step({"r": 1})
    assert engine.outputs["r"][0] not in range(TINY["vocab_size"])


class LateLoads(Hooks):
    """Brings each layer of a pool back when a step is about to read it."""

    def __init__(self, *busy: int) -> None:
        super().__init__(*busy)
        self.kv = self.kept = torch.empty(0)

    def take_away(self, kv: Tensor) -> None:
        self.kv, self.kept = kv, kv.clone()
        kv.zero_()

    def wait_for_layer_load(self, layer: int) -> None:
        self.kv[:, layer] = self.kept[:, layer]


def step_over_loaded(tmp_path: Path, hooks: LateLoads) -> tuple[Engine, Engine]:
    """Compute a step that loads what it reads, and the same one over KV that was there."""
    wanted = Engine(tmp_path, RecordedDevice())
    engine = Engine(tmp_path, RecordedDevice(), hooks=hooks)
    for each in (wanted, engine):
        each.add("r", PROMPT)
        each.step({"r": 40})
        if each is engine:
            hooks.take_away(each.kv)
        each.step({"r": 1})
    return wanted, engine


def test_a_step_that_could_be_replayed_waits_for_the_layers_that_it_loads(tmp_path: Path) -> None:
    wanted, engine = step_over_loaded(tmp_path, LateLoads(2))
    assert engine.outputs == wanted.outputs
    assert len(wanted.device.replays) == 2
    assert len(engine.device.replays) == 1


def test_layers_whose_loads_a_replay_passes_over_are_seen(tmp_path: Path) -> None:
    wanted, engine = step_over_loaded(tmp_path, LateLoads())  # as if there were no work in it
    assert len(engine.device.replays) == 2
    assert engine.outputs != wanted.outputs


def test_a_step_ahead_that_is_not_fed_with_the_token_before_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, *_ = generate(Engine(tmp_path, RecordedDevice()), [lasting(PLAIN[0], 5)])
    engine = Engine(tmp_path, RecordedDevice())
    monkeypatch.setattr(StepBuffers, "feed", lambda *_: None)
    found, executor, _ = generate(engine, [lasting(PLAIN[0], 5)])
    assert executor.num_ahead
    assert found != wanted


def test_tokens_that_are_fetched_once_the_next_step_runs_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, *_ = generate(Engine(tmp_path, RecordedDevice()), [lasting(PLAIN[0], 5)])
    take = DeviceSampler.take

    def take_late(self: DeviceSampler, coming: ComingTokens) -> Sampled:
        coming.came.wait()
        coming.host.copy_(coming.tokens)
        return take(self, coming)

    monkeypatch.setattr(DeviceSampler, "take", take_late)
    found, executor, _ = generate(Engine(tmp_path, RecordedDevice()), [lasting(PLAIN[0], 5)])
    assert executor.num_ahead
    assert found != wanted
