"""Steps that a device is given while the host is at those before: the same tokens."""

from __future__ import annotations

import random
from collections import deque
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import torch

from pdserve.config.schema import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from pdserve.config.speculative import SpeculativeConfig
from pdserve.connectors.base import KVConnectorScheduler
from pdserve.engine.core import EngineCore
from pdserve.errors import InternalError
from pdserve.observe.clock import ManualClock
from pdserve.wire.ids import RequestId
from pdserve.wire.request import GenerateRequest
from pdserve.wire.transfer import ConnectorMetadata
from pdserve.worker.device import HostDevice
from pdserve.worker.step import AwaitedRows
from tests.scheduler.invariants import assert_nothing_held, check
from tests.worker.driver import params
from tests.worker.recorded_device import RecordedDevice
from tests.worker.test_graphs import ASKED, CPU, MAX_NUM_TOKENS, NUM_ROWS, Engine, buffers_on

if TYPE_CHECKING:
    from pathlib import Path

    from pdserve.wire.request import EngineOutput
    from pdserve.wire.sampling import SamplingParams
    from pdserve.wire.step import ModelRunnerOutput, SchedulerOutput
    from pdserve.wire.transfer import ConnectorReport
    from pdserve.worker.step import LaunchedStep

PLAIN = [
    params(),
    params(temperature=0.7, seed=1),
    params(temperature=1.2, seed=2, top_p=0.8),
    params(temperature=0.9, seed=4, top_k=20),
]


class AheadExecutor:
    """See `Executor`: a runner that is given what may follow before the step before is collected.

    Attributes:
        num_ahead: Steps that were.
        num_accepted: Tokens of drafts that were right.
        num_sat_out: Tokens that came later, as a grammar's mask was late.
    """

    def __init__(self, engine: Engine, rng: random.Random, max_in_flight: int) -> None:
        self.max_in_flight = max_in_flight
        self.wake_fds: list[int] = []
        self.num_ahead = self.num_accepted = self.num_sat_out = 0
        self._runner, self._rng = engine.runner, rng
        self._waiting: deque[SchedulerOutput] = deque()
        self._launched: deque[LaunchedStep] = deque()

    def submit(self, step: SchedulerOutput) -> None:
        self._waiting.append(step)

    def poll_result(self) -> ModelRunnerOutput | None:
        if self._rng.random() < 0.3:
            return None
        if self._waiting and not self._launched:
            self._launched.append(self._runner.launch(self._waiting.popleft()))
        if not self._launched:
            return None
        if self._waiting and self._rng.random() < 0.8 and self._runner.may_follow(self._waiting[0]):
            self._launched.append(self._runner.launch(self._waiting.popleft()))
            self.num_ahead += 1
        output = self._runner.collect(self._launched.popleft())
        self.num_sat_out += len(output.unready_ids)
        if self._rng.random() < 0.5:
            self._runner.complete()
        return output

    def poll_report(self) -> ConnectorReport | None:
        return None

    def close(self, timeout_s: float) -> None:
        pass


def generate(
    engine: Engine,
    asked: list[SamplingParams],
    *,
    max_in_flight: int = 2,
    abort: str = "",
    num_blocks: int = 40,
    speculative: SpeculativeConfig | None = None,
) -> tuple[dict[str, list[int]], AheadExecutor, int]:
    """Run requests that arrive at random; return their tokens, and how many were preempted."""
    rng = random.Random(5)
    executor = AheadExecutor(engine, rng, max_in_flight)
    layout = msgspec.structs.replace(engine.info.layout, num_blocks=num_blocks)
    info: Any = SimpleNamespace(
        layout=layout, max_model_len=256, vocab_size=211, row_costs=(), draft_cost=0.0
    )
    config = EngineConfig(
        model=ModelConfig(model="m"),
        cache=CacheConfig(enable_prefix_caching=False),
        scheduler=SchedulerConfig(max_num_seqs=NUM_ROWS, max_num_batched_tokens=MAX_NUM_TOKENS),
        speculative=speculative or SpeculativeConfig(),
    )
    core = EngineCore(
        executor, KVConnectorScheduler(), ManualClock(), config=config, workers=[info]
    )
    prompts = random.Random(6)
    arriving = {
        f"r{i}": (prompts.choices(range(211), k=prompts.choice((1, 9, 40))), sampling)
        for i, sampling in enumerate(asked)
    }
    tokens: dict[str, list[int]] = {name: [] for name in arriving}

    def take(outputs: list[EngineOutput]) -> None:
        for output in outputs:
            assert output.error is None, output.error
            tokens[str(output.request_id)] += output.new_token_ids

    while arriving or core.scheduler.num_requests or core.scheduler.num_in_flight:
        if arriving and rng.random() < 0.4:
            name, (prompt, sampling) = arriving.popitem()
            core.scheduler.add(
                GenerateRequest(
                    request_id=RequestId(name),
                    prompt_token_ids=prompt,
                    sampling=sampling,
                    arrival_s=0.0,
                )
            )
        if abort and len(tokens[abort]) >= 3:
            core.scheduler.abort([RequestId(abort)])
        core.step(take)
        check(core.scheduler)
    assert_nothing_held(core.scheduler)
    stats = core.scheduler.stats()
    executor.num_accepted = sum(stats.accepted_by_position)
    return tokens, executor, stats.num_preemptions


def lasting(sampling: SamplingParams, num: int) -> SamplingParams:
    return msgspec.structs.replace(sampling, max_tokens=num)


@pytest.mark.slow
def test_tokens_are_those_of_a_host_that_waits_for_each_step(tmp_path: Path) -> None:
    asked = [lasting(PLAIN[i % 4], 8 + i) for i in range(7)]
    wanted, waiting, _ = generate(Engine(tmp_path, HostDevice(CPU)), asked, max_in_flight=1)
    found, executor, _ = generate(Engine(tmp_path, RecordedDevice()), asked)
    assert found == wanted
    assert waiting.num_ahead == 0
    assert executor.num_ahead > 5
    assert len({*map(tuple, wanted.values())}) == 7


def test_the_next_token_is_computed_behind_one_that_has_not_come(tmp_path: Path) -> None:
    asked = [lasting(PLAIN[1], 4), lasting(PLAIN[0], 3)]
    wanted, *_ = generate(Engine(tmp_path, HostDevice(CPU)), asked, max_in_flight=1)
    found, executor, _ = generate(Engine(tmp_path, RecordedDevice()), asked)
    assert found == wanted
    assert executor.num_ahead


@pytest.mark.slow
def test_a_request_that_ends_within_a_step_gets_nothing_of_the_next(tmp_path: Path) -> None:
    asked = [lasting(PLAIN[i % 4], 14) for i in range(7)]
    wanted, *_ = generate(Engine(tmp_path, HostDevice(CPU)), asked, max_in_flight=1)
    stops = [
        msgspec.structs.replace(each, stop_token_ids=(wanted[f"r{i}"][3 + i],))
        for i, each in enumerate(asked)
    ]
    ended, *_ = generate(Engine(tmp_path, HostDevice(CPU)), stops, max_in_flight=1)
    assert sum(map(len, ended.values())) < sum(map(len, wanted.values())) - 20
    found, executor, _ = generate(Engine(tmp_path, RecordedDevice()), stops)
    assert found == ended
    assert executor.num_ahead


@pytest.mark.slow
def test_a_request_that_is_given_up_leaves_its_row_to_another(tmp_path: Path) -> None:
    asked = [lasting(PLAIN[i % 4], 8 + i) for i in range(7)]
    wanted, *_ = generate(Engine(tmp_path, HostDevice(CPU)), asked, max_in_flight=1)
    found, executor, _ = generate(Engine(tmp_path, RecordedDevice()), asked, abort="r6")
    cut = found.pop("r6")
    assert 3 <= len(cut) < len(wanted["r6"])
    assert cut == wanted.pop("r6")[: len(cut)]
    assert found == wanted
    assert executor.num_ahead


@pytest.mark.slow
def test_a_preempted_request_begins_again_with_all_its_tokens(tmp_path: Path) -> None:
    asked = [lasting(PLAIN[i % 4], 36) for i in range(5)]
    wanted, *_ = generate(Engine(tmp_path, HostDevice(CPU)), asked, max_in_flight=1)
    found, executor, num_preempted = generate(
        Engine(tmp_path, RecordedDevice()), asked, num_blocks=10
    )
    assert found == wanted
    assert num_preempted
    assert executor.num_ahead


@pytest.mark.slow
def test_what_needs_the_host_is_waited_for_and_goes_ahead_without_it(tmp_path: Path) -> None:
    asked = [lasting(each, 7) for each in ASKED.values()]
    wanted, *_ = generate(Engine(tmp_path, HostDevice(CPU)), asked, max_in_flight=1)
    found, executor, _ = generate(Engine(tmp_path, RecordedDevice()), asked)
    assert found == wanted
    assert executor.num_ahead


def test_rules_that_are_kept_on_the_device_do_not_hold_the_next_step_up(tmp_path: Path) -> None:
    asked = [
        params(max_tokens=9, temperature=0.8, seed=1, frequency_penalty=1.5),
        params(max_tokens=9, repetition_penalty=1.4, logit_bias={7: 3.0}, bad_words=((5,),)),
        params(max_tokens=9, min_tokens=6, stop_token_ids=tuple(range(0, 211, 2))),
    ]
    wanted, *_ = generate(Engine(tmp_path, HostDevice(CPU)), asked, max_in_flight=1)
    found, executor, _ = generate(Engine(tmp_path, RecordedDevice()), asked)
    assert found == wanted
    assert executor.num_ahead > 5


def test_a_step_that_may_not_follow_is_refused(tmp_path: Path) -> None:
    engine = Engine(tmp_path, RecordedDevice())
    engine.add("r", [1])
    launched = engine.runner.launch(engine.plan({"r": 1}))
    assert not launched.is_over
    engine.add("long", [1, 2])
    with pytest.raises(InternalError, match="launched before"):
        engine.runner.launch(engine.plan({"long": 2}))


def test_a_step_that_loads_into_blocks_begins_once_the_device_is_through_with_others(
    tmp_path: Path,
) -> None:
    engine = Engine(tmp_path, RecordedDevice())
    engine.add("r", [1])
    engine.runner.launch(engine.plan({"r": 1}))
    engine.add("loads", [2])
    step = engine.plan({"loads": 1})
    assert engine.runner.may_follow(step)
    loading = msgspec.structs.replace(step, connector_metadata=ConnectorMetadata(b"a load"))
    assert not engine.runner.may_follow(loading)


# ---- parts ---------------------------------------------------------------------------


def test_tokens_that_are_none_are_fed_as_some_that_can_be_looked_up() -> None:
    device = RecordedDevice()
    buffers = buffers_on(device)
    arrays = buffers.begin()
    arrays.token_ids[:4] = 9
    arrays.fed_from[:2] = 2, 0
    arrays.fed_tokens[:2] = 1, 3
    buffers.upload(4)
    buffers.feed(2, torch.tensor([5, 6, -1]))
    assert buffers.inputs(4, 4, 16).token_ids.tolist() == [9, 0, 9, 5]


def test_a_token_that_is_awaited_belongs_to_the_request_that_it_was_sampled_for() -> None:
    awaited = AwaitedRows(4)
    first = awaited.begin(np.array([0, 1, 3]), np.array([2, 0, 3]), np.array([7, 8, 9]))
    assert awaited.index_of(np.arange(4)).tolist() == [1, -1, 0, 3]
    awaited.change_hands(0)  # its request has gone, another one came
    second = awaited.begin(np.array([0, 1]), np.array([0, 3]), np.array([1, 10]))
    assert awaited.end(first).tolist() == [True, False, True]
    assert awaited.index_of(np.arange(4)).tolist() == [0, -1, -1, 1]
    assert awaited.end(second).tolist() == [True, True]
    assert awaited.index_of(np.arange(4)).tolist() == [-1] * 4
