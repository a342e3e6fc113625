"""The scheduler under random arrivals, steps, aborts and steps in flight."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdserve.config.schema import SchedulingPolicy
from pdserve.observe.clock import ManualClock
from pdserve.wire.ids import RequestId
from pdserve.wire.request import FinishReason, GenerateRequest
from tests.scheduler.invariants import assert_nothing_held, check
from tests.stateful.reaching import in_ci
from tests.toy import HeldEngine, sampling, toy_config
from tests.toy_drafts import mixed
from tests.toy_executor import expected_output, toy_shape

MAX_MODEL_LEN = 32


class SchedulerMachine(RuleBasedStateMachine):
    """One engine of its own: every output must be the toy model's only right answer."""

    policy = SchedulingPolicy.FCFS
    may_split = True
    num_stages = 1
    depth = 2
    max_drafted = 0

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.engine = HeldEngine(
            toy_config(
                max_num_batched_tokens=12 if self.may_split else MAX_MODEL_LEN,
                enable_chunked_prefill=self.may_split,
                policy=self.policy,
                num_stages=self.num_stages,
                max_drafted=self.max_drafted,
            ),
            toy_shape(11, 8),
            clock=self.clock,
            max_model_len=MAX_MODEL_LEN,
        )
        self.engine.executor.drafter = mixed
        self.scheduler = self.engine.scheduler
        self.expected: dict[RequestId, list[int]] = {}
        self.out: dict[RequestId, list[int]] = {}
        self.over: set[RequestId] = set()
        self.num_requests = 0

    @rule(
        # Three short prefixes, so that prompts share blocks and hashes collide on purpose.
        prefix=st.sampled_from([[1] * 8, [2] * 8, [1] * 16]),
        tail=st.lists(st.integers(0, 2), min_size=1, max_size=9),
        max_tokens=st.integers(1, 12),
        priority=st.integers(0, 2),
        yields_s=st.sampled_from([0.0, 0.02, 1.0]),
        seed=st.integers(0, 1),
    )
    def arrive(
        self,
        prefix: list[int],
        tail: list[int],
        max_tokens: int,
        priority: int,
        yields_s: float,
        seed: int,
    ) -> None:
        prompt = prefix + tail
        request_id = RequestId(f"r{self.num_requests}")
        self.num_requests += 1
        params = sampling(min(max_tokens, MAX_MODEL_LEN - len(prompt)), seed=seed)
        self.expected[request_id] = expected_output(prompt, params)
        self.out[request_id] = []
        self.scheduler.add(
            GenerateRequest(
                request_id=request_id,
                prompt_token_ids=prompt,
                sampling=params,
                arrival_s=self.clock.wall_s(),
                priority=priority,
                yields_s=yields_s,
            )
        )

    @precondition(lambda self: len(self.engine.in_flight) < self.depth)
    @rule()
    def submit(self) -> None:
        step = self.engine.submit()
        if step is not None:
            num_rows = step.num_tokens + sum(step.num_draft_rows.values())
            assert num_rows <= (12 if self.may_split else MAX_MODEL_LEN)
            assert len(step.num_scheduled_tokens) <= 4

    @precondition(lambda self: len(self.engine.in_flight) < self.depth)
    @rule()
    def submit_empty(self) -> None:
        """As for a wave of other engines."""
        assert not self.engine.submit_empty().num_tokens

    @precondition(lambda self: self.engine.in_flight)
    @rule()
    def collect(self) -> None:
        self.clock.advance(0.01)
        for output in self.engine.collect():
            request_id = output.request_id
            assert request_id not in self.over, "an output after the end"
            self.out[request_id] += output.new_token_ids
            assert self.out[request_id] == self.expected[request_id][: len(self.out[request_id])]
            if output.finish_reason is not None:
                assert output.finish_reason is not FinishReason.ERROR, output.error
                assert self.out[request_id] == self.expected[request_id]
                self.over.add(request_id)

    @precondition(lambda self: len(self.over) < len(self.expected))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        alive = sorted(set(self.expected) - self.over)
        request_id = data.draw(st.sampled_from(alive))
        self.scheduler.abort([request_id])
        self.over.add(request_id)

    @rule()
    def forget_prefixes(self) -> None:
        self.scheduler.kv.pool.forget_all()

    @invariant()
    def every_block_has_one_owner(self) -> None:
        check(self.scheduler)

    def teardown(self) -> None:
        for _ in range(2000):
            while self.engine.in_flight:
                self.collect()
            self.submit()
            if not self.engine.in_flight:
                break
        assert self.over == set(self.expected), "a request never ended"
        assert_nothing_held(self.scheduler)


class PrioritySchedulerMachine(SchedulerMachine):
    """The same with priorities."""

    policy = SchedulingPolicy.PRIORITY


class WholePromptSchedulerMachine(SchedulerMachine):
    """The same without chunked prefill."""

    may_split = False


class TwoStageSchedulerMachine(SchedulerMachine):
    """The same with tokens that the worker has to be told, and a step for each stage."""

    num_stages = 2


class ThreeStageSchedulerMachine(SchedulerMachine):
    """The same with three."""

    num_stages = 3
    depth = 3


class DraftingSchedulerMachine(SchedulerMachine):
    """The same with drafts that are right for a while."""

    max_drafted = 4


class DraftingPipelineSchedulerMachine(DraftingSchedulerMachine):
    """The same with tokens that the worker has to be told."""

    num_stages = 2


class ShallowPipelineSchedulerMachine(PrioritySchedulerMachine):
    """The same with fewer steps in flight than stages, and with priorities."""

    num_stages = 3
    depth = 2


SETTINGS = in_ci(30)

TestFcfs = SchedulerMachine.TestCase
TestFcfs.settings = SETTINGS
TestPriority = PrioritySchedulerMachine.TestCase
TestPriority.settings = SETTINGS
TestWholePrompts = WholePromptSchedulerMachine.TestCase
TestWholePrompts.settings = SETTINGS
TestTwoStages = TwoStageSchedulerMachine.TestCase
TestTwoStages.settings = SETTINGS
TestThreeStages = ThreeStageSchedulerMachine.TestCase
TestThreeStages.settings = SETTINGS
TestShallowPipeline = ShallowPipelineSchedulerMachine.TestCase
TestShallowPipeline.settings = SETTINGS
TestDrafting = DraftingSchedulerMachine.TestCase
TestDrafting.settings = SETTINGS
TestDraftingPipeline = DraftingPipelineSchedulerMachine.TestCase
TestDraftingPipeline.settings = SETTINGS
