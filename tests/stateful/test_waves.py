"""Engine cores that share a world, under random arrivals, turns and message delays.

The cores' steps, their schedulers and the coordinator's decisions are the real ones; the ranks
are toys that answer a step of a wave only when every core has submitted it.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.connectors.base import KVConnectorScheduler, NullConnector
from pdserve.engine.coordinator import Coordinator, StartWave, Wish
from pdserve.engine.core import EngineCore
from pdserve.observe.clock import ManualClock
from pdserve.wire.ids import EngineId, Incarnation, RequestId
from pdserve.wire.request import GenerateRequest
from tests.scheduler.invariants import assert_nothing_held
from tests.toy import sampling, toy_config
from tests.toy_executor import ToyExecutor, expected_output, toy_shape

if TYPE_CHECKING:
    from pdserve.config.schema import EngineConfig
    from pdserve.engine.coordinator import ToCores
    from pdserve.wire.request import EngineOutput
    from pdserve.wire.step import ModelRunnerOutput, SchedulerOutput, WaveStep

MAX_MODEL_LEN = 32
NUM_BLOCKS = 7


class World:
    """What the ranks of all cores share: which core has submitted which steps of waves."""

    def __init__(self, num_cores: int) -> None:
        self.submitted: list[list[WaveStep]] = [[] for _ in range(num_cores)]

    def is_over(self, index: int) -> bool | None:
        """Whether no core was unfinished in the `index`-th step of the waves.

        None: it has no answer yet, for not every core has submitted it.
        """
        if any(len(steps) <= index for steps in self.submitted):
            return None
        step = [steps[index] for steps in self.submitted]
        assert len({part.wave for part in step}) == 1, f"cores are in different waves: {step}"
        return not any(part.is_unfinished for part in step)


class WaveExecutor(ToyExecutor):
    """Answers a step of a wave once every core has submitted it."""

    def __init__(self, world: World, core: int, max_in_flight: int, config: EngineConfig) -> None:
        super().__init__(
            config,
            NullConnector(),
            shape=toy_shape(NUM_BLOCKS, 8),
            engine_id=EngineId(f"core {core}"),
            incarnation=Incarnation("life"),
            max_model_len=MAX_MODEL_LEN,
        )
        self.max_in_flight = max_in_flight
        self.num_submitted = 0
        self._world, self._core = world, core
        self._num_collected = 0

    def submit(self, step: SchedulerOutput) -> None:
        assert len(self.in_flight) < self.max_in_flight
        assert step.wave is not None or not step.num_scheduled_tokens, "tokens outside of a wave"
        self.num_submitted += 1
        super().submit(step)
        if step.wave is not None:
            self._world.submitted[self._core].append(step.wave)

    def poll_result(self) -> ModelRunnerOutput | None:
        if not self.in_flight or self.in_flight[0].wave is None:
            return super().poll_result()
        is_over = self._world.is_over(self._num_collected)
        if is_over is None:
            return None
        self._num_collected += 1
        output = super().poll_result()
        assert output is not None
        return msgspec.structs.replace(output, is_wave_over=is_over)


class Core:
    """A core as its process drives it, with its messages on their way."""

    def __init__(self, world: World, index: int, num_cores: int, max_in_flight: int) -> None:
        self.index = index
        config = toy_config(max_num_seqs=3, max_num_batched_tokens=12)
        self.executor = WaveExecutor(world, index, max_in_flight, config)
        self.engine = EngineCore(
            self.executor,
            KVConnectorScheduler(),
            ManualClock(),
            config=config,
            workers=self.executor.start(),
            in_waves=True,
        )
        assert self.engine.waves is not None
        self.waves = self.engine.waves
        self.wishes: deque[Wish] = deque()
        self.orders: deque[ToCores] = deque()
        self.num_delivered = 0
        self.is_active = True
        self.has_input = False
        self.out: dict[RequestId, list[int]] = {}
        self.over: set[RequestId] = set()

    def turn(self) -> None:
        """Once around the loop of its process."""
        while self.num_delivered:
            order = self.orders.popleft()
            self.num_delivered -= 1
            assert isinstance(order, StartWave)
            self.waves.start(order.wave)
        if self.has_input or not self.is_active:
            self.waves.news()
        self.has_input = False
        outputs: list[EngineOutput] = []
        self.is_active = self.engine.step(outputs.extend)
        wave = self.waves.wish()
        if wave is not None:
            self.wishes.append(Wish(self.index, wave))
        for output in outputs:
            self.out.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                self.over.add(output.request_id)


class Simulation:
    """Cores, their coordinator, and messages that take their time."""

    def __init__(self, rng: random.Random, num_cores: int, max_in_flight: int) -> None:
        self.rng = rng
        self.world = World(num_cores)
        self.coordinator = Coordinator(num_cores)
        self.cores = [
            Core(self.world, index, num_cores, max_in_flight) for index in range(num_cores)
        ]
        for _ in self.cores:
            self.coordinator.listening()
        self.expected: list[dict[RequestId, list[int]]] = [{} for _ in self.cores]
        self.aborted: set[RequestId] = set()

    def arrive(self, core: Core) -> None:
        """A request for `core`: mostly short, so that waves end often."""
        request_id = RequestId(f"r{sum(map(len, self.expected))}")
        prompt = [self.rng.randrange(3) for _ in range(self.rng.choice((1, 4, 17)))]
        params = sampling(self.rng.choice((1, 1, 2, 9)))
        self.expected[core.index][request_id] = expected_output(prompt, params)
        core.engine.scheduler.add(
            GenerateRequest(
                request_id=request_id, prompt_token_ids=prompt, sampling=params, arrival_s=0.0
            )
        )

    def abort(self, core: Core) -> None:
        """Some request of `core`, over or not."""
        if self.expected[core.index]:
            request_id = self.rng.choice(list(self.expected[core.index]))
            self.aborted.add(request_id)
            core.engine.scheduler.abort([request_id])

    def hear_wish(self, core: Core) -> None:
        """The coordinator reads one of the core's wishes, and orders."""
        if core.wishes:
            self.coordinator.take(core.wishes.popleft())
            for order in self.coordinator.drain_orders():
                for listener in self.cores:
                    listener.orders.append(order)

    def deliver_order(self, core: Core) -> None:
        """One more order has come to the core."""
        core.num_delivered = min(core.num_delivered + 1, len(core.orders))

    def run(self, num_spells: int) -> None:
        """Let things happen in any order; in each spell, some are slow and some do not happen."""
        actions = [self.arrive, self.abort, self.hear_wish, self.deliver_order, Core.turn]
        for _ in range(num_spells):
            usual = (1.0, 0.1, 3.0, 3.0, 6.0)
            chances = [self.rng.choice((0.0, 0.3, 1.0, 3.0)) * chance for chance in usual]
            speeds = [self.rng.choice((0.0, 0.1, 1.0)) for _ in self.cores]
            if not any(chances) or not any(speeds):
                continue
            for action in self.rng.choices(actions, chances, k=8):
                (core,) = self.rng.choices(self.cores, speeds)
                action(core)

    def settle(self) -> None:
        """Let messages and steps come to an end.

        Raises:
            AssertionError: They do not.
        """
        for _ in range(1000):
            if self._is_at_rest():
                return
            self.go_on()
        raise AssertionError("the cores wait for one another")

    def go_on(self) -> None:
        """Every message arrives, and every core has a turn."""
        for core in self.cores:
            self.hear_wish(core)
            core.num_delivered = len(core.orders)
            core.turn()

    def _is_at_rest(self) -> bool:
        return all(
            core.waves.is_at_rest
            and not core.is_active
            and not core.wishes
            and not core.orders
            and core.engine.scheduler.is_idle
            for core in self.cores
        )


@pytest.mark.parametrize(("num_cores", "max_in_flight"), [(2, 1), (2, 2), (3, 2)])
@given(seed=st.integers(0, 1 << 32))
def test_cores_step_together_and_serve_everything(
    num_cores: int, max_in_flight: int, seed: int
) -> None:
    simulation = Simulation(random.Random(seed), num_cores, max_in_flight)
    simulation.run(60)
    simulation.settle()
    for core, expected in zip(simulation.cores, simulation.expected, strict=True):
        for request_id, tokens in expected.items():
            if request_id not in simulation.aborted:
                assert core.out[request_id] == tokens
                assert request_id in core.over
        assert_nothing_held(core.engine.scheduler)
    per_wave = [Counter(step.wave for step in steps) for steps in simulation.world.submitted]
    assert all(steps == per_wave[0] for steps in per_wave), f"unequal steps: {per_wave}"


def test_cores_at_rest_run_no_steps() -> None:
    simulation = Simulation(random.Random(1), 2, 2)
    simulation.run(60)
    simulation.settle()
    submitted = [core.executor.num_submitted for core in simulation.cores]
    assert min(submitted) > 0
    for _ in range(10):
        simulation.go_on()
    assert [core.executor.num_submitted for core in simulation.cores] == submitted
