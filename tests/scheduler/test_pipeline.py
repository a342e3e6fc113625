"""Steps of an engine with several pipeline stages: which are in flight together, in what order."""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.config.schema import CacheConfig, SchedulerConfig
from pdserve.connectors.null import NullScheduler
from pdserve.observe.clock import ManualClock
from pdserve.scheduler.scheduler import Scheduler
from pdserve.wire.ids import RequestId
from pdserve.wire.request import GenerateRequest
from tests.stateful.toy import VOCAB, ToyWorker, expected_output, sampling

if TYPE_CHECKING:
    from pdserve.wire.step import SchedulerOutput


class Pipeline:
    """A scheduler and a toy worker, with a step in flight for each stage."""

    def __init__(self, num_stages: int, *, num_blocks: int = 64, **fields: Any) -> None:
        self.num_stages = num_stages
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=16, **fields),
            CacheConfig(block_size=8),
            num_blocks=num_blocks,
            max_model_len=64,
            vocab_size=VOCAB,
            connector=NullScheduler(),
            clock=ManualClock(),
            num_stages=num_stages,
        )
        self.worker = ToyWorker(num_blocks, 8, num_stages=num_stages)
        self.in_flight: deque[SchedulerOutput] = deque()
        self.outputs: dict[RequestId, list[int]] = {}

    def add(self, name: str, max_tokens: int, prompt: list[int]) -> None:
        """A request arrives."""
        self.scheduler.add(
            GenerateRequest(
                request_id=RequestId(name),
                prompt_token_ids=prompt,
                sampling=sampling(max_tokens, ignore_eos=True),
                arrival_s=0.0,
            )
        )
        self.outputs[RequestId(name)] = []

    def fill(self) -> None:
        """Submit until every stage has a step, or nothing can be scheduled."""
        while len(self.in_flight) < self.num_stages:
            step = self.scheduler.schedule()
            if step is None:
                return
            self.in_flight.append(step)

    def retire(self) -> SchedulerOutput:
        """Compute and take the oldest step."""
        step = self.in_flight.popleft()
        self.scheduler.update(self.worker.execute(step))
        for output in self.scheduler.drain_outputs():
            self.outputs[output.request_id] += output.new_token_ids
        return step

    def run(self) -> list[SchedulerOutput]:
        """All steps until no request is left."""
        steps: list[SchedulerOutput] = []
        self.fill()
        while self.in_flight:
            steps.append(self.retire())
            self.fill()
        self.scheduler.assert_nothing_held()
        return steps


def started(num_stages: int, num_requests: int) -> Pipeline:
    """A pipeline with so many requests, of which each has its first token."""
    pipeline = Pipeline(num_stages)
    for index in range(num_requests):
        pipeline.add(f"r{index}", 30, [index % 3, 1, 2])
    pipeline.fill()
    while pipeline.in_flight:
        pipeline.retire()
    return pipeline


@pytest.mark.parametrize(("num_stages", "num_requests"), [(2, 6), (3, 6), (3, 7), (4, 3), (2, 1)])
def test_decoding_requests_are_shared_out_over_the_stages(
    num_stages: int, num_requests: int
) -> None:
    pipeline = started(num_stages, num_requests)
    for _ in range(10):
        pipeline.fill()
        sizes = [len(step.num_scheduled_tokens) for step in pipeline.in_flight]
        assert len(sizes) == min(num_stages, num_requests)
        assert max(sizes) == -(-num_requests // num_stages)
        assert sum(sizes) == num_requests
        pipeline.retire()


def test_no_request_decodes_in_two_steps_in_flight() -> None:
    pipeline = started(3, 7)
    for _ in range(10):
        pipeline.fill()
        together = Counter(
            name for step in pipeline.in_flight for name in step.num_scheduled_tokens
        )
        assert max(together.values()) == 1
        pipeline.retire()


def test_every_decoding_request_advances_as_often_as_the_others() -> None:
    pipeline = started(3, 7)
    for arriving in range(4):
        pipeline.add(f"late{arriving}", 30, [1, 2])
        for _ in range(6):
            pipeline.fill()
            pipeline.retire()
    early = [len(pipeline.outputs[RequestId(f"r{i}")]) for i in range(7)]
    assert max(early) - min(early) <= 1
    assert min(early) > 5


def test_with_fewer_steps_in_flight_than_stages_nobody_is_left_behind() -> None:
    pipeline = started(3, 7)
    for _ in range(12):
        step = pipeline.scheduler.schedule()
        assert step is not None
        pipeline.in_flight.append(step)
        pipeline.retire()
    lengths = [len(tokens) for tokens in pipeline.outputs.values()]
    assert max(lengths) - min(lengths) <= 1


def test_a_long_prompt_is_computed_in_steps_that_are_in_flight_together() -> None:
    pipeline = Pipeline(3, max_num_batched_tokens=16)
    pipeline.add("long", 4, [1] * 40)
    pipeline.fill()
    assert [step.num_tokens for step in pipeline.in_flight] == [16, 16, 8]
    pipeline.run()
    assert pipeline.outputs[RequestId("long")] == expected_output([1] * 40, sampling(4))


def test_a_step_tells_what_was_sampled_since_the_last_one() -> None:
    pipeline = Pipeline(2)
    pipeline.add("r", 3, [1, 2])
    steps = pipeline.run()
    output = pipeline.outputs[RequestId("r")]
    told = [step.known_requests.sampled_token_ids for step in steps]
    assert told == [[], [[output[0]]], [[output[1]]], []]


def test_one_stage_is_told_nothing() -> None:
    pipeline = Pipeline(1)
    pipeline.add("r", 3, [1, 2])
    assert not any(step.known_requests.sampled_token_ids for step in pipeline.run())


@pytest.mark.parametrize("budget", [64, 8], ids=["recomputed at once", "in pieces"])
def test_a_full_pool_drains_the_pipeline_and_preempts(budget: int) -> None:
    pipeline = Pipeline(3, num_blocks=10, max_num_batched_tokens=budget)
    prompts = {f"r{index}": [index % 3] * 20 for index in range(4)}
    for name, prompt in prompts.items():
        pipeline.add(name, 30, prompt)
    pipeline.scheduler.kv.enable_prefix_caching = False
    pipeline.run()
    assert pipeline.scheduler.stats().num_preemptions > 0
    assert pipeline.outputs == {
        name: expected_output(prompt, sampling(30, ignore_eos=True))
        for name, prompt in prompts.items()
    }


def test_empty_steps_in_flight_do_not_keep_a_full_pool_from_preempting() -> None:
    pipeline = Pipeline(1, num_blocks=8)
    prompts = {f"r{index}": [index] * 20 for index in range(2)}
    for name, prompt in prompts.items():
        pipeline.add(name, 30, prompt)
    for _ in range(100):
        # As in a wave that other engines keep alive: there is always a step in flight.
        pipeline.in_flight.append(pipeline.scheduler.schedule() or pipeline.scheduler.empty_step())
        if len(pipeline.in_flight) == 2:
            pipeline.retire()
    pipeline.retire()
    assert pipeline.scheduler.stats().num_preemptions > 0
    pipeline.scheduler.assert_nothing_held()


def test_an_empty_step_is_in_flight_until_it_is_retired() -> None:
    pipeline = Pipeline(2)
    step = pipeline.scheduler.empty_step()
    assert not step.num_scheduled_tokens
    assert pipeline.scheduler.num_in_flight == 1
    pipeline.in_flight.append(step)
    pipeline.retire()
    assert pipeline.scheduler.num_in_flight == 0


def test_an_empty_step_takes_along_who_is_gone() -> None:
    pipeline = started(2, 2)
    pipeline.scheduler.abort([RequestId("r0"), RequestId("r1")])
    assert sorted(pipeline.scheduler.empty_step().gone_request_ids) == ["r0", "r1"]
    assert pipeline.scheduler.schedule() is None


def test_runnable_requests_are_those_that_wait_and_those_that_run() -> None:
    pipeline = Pipeline(2, max_num_batched_tokens=16)
    for index in range(3):
        pipeline.add(f"r{index}", 4, [index] * 16)
    pipeline.fill()
    assert pipeline.scheduler.stats().num_running == 2
    assert pipeline.scheduler.num_runnable == 3
    pipeline.run()
    assert pipeline.scheduler.num_runnable == 0
