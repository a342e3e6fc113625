"""Steps of an engine with several pipeline stages: which are in flight together, in what order."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.wire.ids import RequestId
from tests.scheduler.invariants import assert_nothing_held
from tests.scheduler.scripted import Engine, make_request
from tests.toy import sampling
from tests.toy_executor import expected_output

if TYPE_CHECKING:
    from pdserve.wire.step import SchedulerOutput


class Pipeline(Engine):
    """An engine with a step in flight for each stage."""

    def __init__(self, num_stages: int, **fields: Any) -> None:
        settings = {"num_blocks": 64, "max_num_seqs": 16, "max_num_batched_tokens": 2048, **fields}
        super().__init__(num_stages=num_stages, max_model_len=64, **settings)
        self.tokens: dict[RequestId, list[int]] = {}

    def add(self, name: str, max_tokens: int, prompt: list[int]) -> None:
        """A request arrives."""
        self.scheduler.add(make_request(name, prompt, max_tokens))
        self.tokens[RequestId(name)] = []

    def retire(self) -> None:
        """Compute and take the oldest step."""
        for output in self.collect():
            self.tokens[output.request_id] += output.new_token_ids

    def finish(self) -> list[SchedulerOutput]:
        """All steps until no request is left."""
        steps: list[SchedulerOutput] = []
        self.submit_all()
        while self.in_flight:
            steps.append(self.in_flight[0])
            self.retire()
            self.submit_all()
        assert_nothing_held(self.scheduler)
        return steps


def started(num_stages: int, num_requests: int) -> Pipeline:
    """A pipeline with so many requests, of which each has its first token."""
    pipeline = Pipeline(num_stages)
    for index in range(num_requests):
        pipeline.add(f"r{index}", 30, [index % 3, 1, 2])
    pipeline.submit_all()
    while pipeline.in_flight:
        pipeline.retire()
    return pipeline


@pytest.mark.parametrize(("num_stages", "num_requests"), [(2, 6), (3, 6), (3, 7), (4, 3), (2, 1)])
def test_decoding_requests_are_shared_out_over_the_stages(
    num_stages: int, num_requests: int
) -> None:
    pipeline = started(num_stages, num_requests)
    for _ in range(10):
        pipeline.submit_all()
        sizes = [len(step.num_scheduled_tokens) for step in pipeline.in_flight]
        assert len(sizes) == min(num_stages, num_requests)
        assert max(sizes) == -(-num_requests // num_stages)
        assert sum(sizes) == num_requests
        pipeline.retire()


def test_no_request_decodes_in_two_steps_in_flight() -> None:
    pipeline = started(3, 7)
    for _ in range(10):
        pipeline.submit_all()
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
            pipeline.submit_all()
            pipeline.retire()
    early = [len(pipeline.tokens[RequestId(f"r{i}")]) for i in range(7)]
    assert max(early) - min(early) <= 1
    assert min(early) > 5


def test_with_fewer_steps_in_flight_than_stages_nobody_is_left_behind() -> None:
    pipeline = started(3, 7)
    for _ in range(12):
        assert pipeline.submit() is not None
        pipeline.retire()
    lengths = [len(tokens) for tokens in pipeline.tokens.values()]
    assert max(lengths) - min(lengths) <= 1


def test_a_long_prompt_is_computed_in_steps_that_are_in_flight_together() -> None:
    pipeline = Pipeline(3, max_num_batched_tokens=16)
    pipeline.add("long", 4, [1] * 40)
    pipeline.submit_all()
    assert [step.num_tokens for step in pipeline.in_flight] == [16, 16, 8]
    pipeline.finish()
    assert pipeline.tokens[RequestId("long")] == expected_output([1] * 40, sampling(4))


def test_a_step_tells_what_was_sampled_since_the_last_one() -> None:
    pipeline = Pipeline(2)
    pipeline.add("r", 3, [1, 2])
    steps = pipeline.finish()
    output = pipeline.tokens[RequestId("r")]
    told = [step.sampled_token_ids for step in steps]
    assert told == [[], [[output[0]]], [[output[1]]], []]


def test_one_stage_is_told_nothing() -> None:
    pipeline = Pipeline(1)
    pipeline.add("r", 3, [1, 2])
    assert not any(step.sampled_token_ids for step in pipeline.finish())


@pytest.mark.parametrize("budget", [64, 8], ids=["recomputed at once", "in pieces"])
def test_a_full_pool_drains_the_pipeline_and_preempts(budget: int) -> None:
    pipeline = Pipeline(3, num_blocks=10, max_num_batched_tokens=budget)
    prompts = {f"r{index}": [index % 3] * 20 for index in range(4)}
    for name, prompt in prompts.items():
        pipeline.add(name, 30, prompt)
    pipeline.scheduler.kv.enable_prefix_caching = False
    pipeline.finish()
    assert pipeline.scheduler.stats().num_preemptions > 0
    assert pipeline.tokens == {
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
        if pipeline.submit() is None:
            pipeline.submit_empty()
        if len(pipeline.in_flight) == 2:
            pipeline.retire()
    pipeline.retire()
    assert pipeline.scheduler.stats().num_preemptions > 0
    assert_nothing_held(pipeline.scheduler)


def test_an_empty_step_is_in_flight_until_it_is_retired() -> None:
    pipeline = Pipeline(2)
    assert not pipeline.submit_empty().num_scheduled_tokens
    assert pipeline.scheduler.num_in_flight == 1
    pipeline.retire()
    assert pipeline.scheduler.num_in_flight == 0


def test_an_empty_step_takes_along_who_is_gone() -> None:
    pipeline = started(2, 2)
    pipeline.scheduler.abort([RequestId("r0"), RequestId("r1")])
    assert sorted(pipeline.submit_empty().gone_request_ids) == ["r0", "r1"]
    assert pipeline.submit() is None


def test_runnable_requests_are_those_that_wait_and_those_that_run() -> None:
    pipeline = Pipeline(2, max_num_batched_tokens=16)
    for index in range(3):
        pipeline.add(f"r{index}", 4, [index] * 16)
    pipeline.submit_all()
    assert pipeline.scheduler.stats().num_running == 2
    assert pipeline.scheduler.num_runnable == 3
    pipeline.finish()
    assert pipeline.scheduler.num_runnable == 0
