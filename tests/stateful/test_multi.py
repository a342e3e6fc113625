"""An engine whose connector is several stores that are late, lose blocks and raise.

The toy worker reads every KV value it depends on, so what was loaded by the wrong one, twice, too
late, or saved from blocks that were others' already, fails the run at the step that reads it.
"""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdserve.connectors.multi import MultiConnector
from pdserve.connectors.multi.scheduler import MultiScheduler
from pdserve.wire.ids import RequestId
from pdserve.wire.request import EngineOutput, FinishReason, GenerateRequest
from tests.scheduler.invariants import assert_nothing_held, check
from tests.stateful.reaching import run_until_reached
from tests.toy import HeldEngine, sampling, toy_config
from tests.toy_executor import expected_output, toy_shape
from tests.toy_store import StoreError, ToyStore, ToyStoreConnector, Trouble

MAX_MODEL_LEN = 40
PREFIXES = [[1] * 8, [2] * 8, [1] * 16, [1] * 24]


class StoresMachine(RuleBasedStateMachine):
    """See the module.

    Attributes:
        reached: How often the situations that matter came up, over all runs.
        depth: Steps in flight.
        num_ranks: Of the engine, each with its KV and its halves of the connectors.
    """

    reached: ClassVar[Counter[str]] = Counter()
    depth = 1
    num_ranks = 1

    @initialize(
        kinds=st.lists(
            st.tuples(st.booleans(), st.booleans(), st.booleans()), min_size=2, max_size=3
        ),
        rates=st.tuples(*[st.sampled_from([0.0, 0.0, 0.05, 0.3]) for _ in range(3)]),
        seed=st.integers(0, 1000),
    )
    def begin(
        self,
        kinds: list[tuple[bool, bool, bool]],
        rates: tuple[float, float, float],
        seed: int,
    ) -> None:
        loses, is_late, raises = rates
        self.troubles = [
            Trouble(
                seed=seed + number,
                loses=loses,
                is_late=is_late,
                raises=raises / 5 if may_raise else 0.0,
            )
            for number, (_, _, may_raise) in enumerate(kinds)
        ]
        self.stores = [ToyStore() for _ in kinds]
        connector = MultiConnector.of(
            [
                ToyStoreConnector(
                    name=f"store{number}",
                    store=self.stores[number],
                    trouble=self.troubles[number],
                    is_async=is_async,
                    may_wait=may_wait,
                )
                for number, (is_async, may_wait, _) in enumerate(kinds)
            ]
        )
        self.engine = HeldEngine(
            toy_config(max_num_batched_tokens=12, num_stages=self.depth),
            toy_shape(7, 8, pp=self.num_ranks),
            connector=connector,
            max_model_len=MAX_MODEL_LEN,
            depth=self.depth,
        )
        self.scheduler = self.engine.scheduler
        self.expected: dict[RequestId, list[int]] = {}
        self.out: dict[RequestId, list[int]] = {}
        self.over: set[RequestId] = set()
        self.aborted: set[RequestId] = set()
        self.num_requests = 0

    @rule(
        prefix=st.sampled_from(PREFIXES),
        tail=st.lists(st.integers(0, 1), min_size=0, max_size=9),
        max_tokens=st.integers(1, 24),
    )
    def arrive(self, prefix: list[int], tail: list[int], max_tokens: int) -> None:
        prompt = prefix + tail
        request_id = RequestId(f"r{self.num_requests}")
        self.num_requests += 1
        params = sampling(min(max_tokens, MAX_MODEL_LEN - len(prompt)))
        self.expected[request_id] = expected_output(prompt, params)
        self.out[request_id] = []
        self.scheduler.add(
            GenerateRequest(
                request_id=request_id, prompt_token_ids=prompt, sampling=params, arrival_s=0.0
            )
        )

    @precondition(lambda self: len(self.engine.in_flight) < self.depth)
    @rule()
    def submit(self) -> None:
        self.engine.submit()

    @rule()
    def collect(self) -> None:
        for output in self.engine.collect():
            self._take(output)

    def _take(self, output: EngineOutput) -> None:
        request_id = output.request_id
        if request_id in self.aborted:
            return  # it had come before
        assert request_id not in self.over, "an output after the end"
        self.out[request_id] += output.new_token_ids
        assert self.out[request_id] == self.expected[request_id][: len(self.out[request_id])]
        if output.finish_reason is FinishReason.ERROR:
            assert StoreError.__name__ in str(output.error), output.error
            self.reached["ended by a child that raised"] += 1
        elif output.finish_reason is not None:
            assert self.out[request_id] == self.expected[request_id]
        if output.finish_reason is not None:
            self.over.add(request_id)

    @precondition(lambda self: len(self.over) < len(self.expected))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(set(self.expected) - self.over)))
        self.scheduler.abort([request_id])
        self.over.add(request_id)
        self.aborted.add(request_id)

    @rule()
    def forget_prefixes(self) -> None:
        self.scheduler.kv.pool.forget_all()

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.stores)).evict(data.draw(st.integers(0, 9)))

    @invariant()
    def every_block_has_one_owner(self) -> None:
        if self.num_requests:
            check(self.scheduler)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(3000):
            for output in self.engine.settle():
                self._take(output)
            if self.scheduler.is_idle and not self.engine.in_flight:
                break
        assert self.over == set(self.expected), "a request never ended"
        for _ in range(20):
            self.engine.collect()
        assert_nothing_held(self.scheduler)
        half = self.scheduler.state.connector
        assert isinstance(half, MultiScheduler)
        assert not half.num_open
        stats = self.scheduler.stats()
        num_sources = sum(number > 0 for number in stats.kv_source_tokens.values())
        self.reached["loaded from one"] += num_sources == 1
        self.reached["loaded from several"] += num_sources > 1
        self.reached["failed loads"] += sum(stats.kv_load_failures.values()) > 0
        self.reached["preempted"] += stats.num_preemptions > 0
        self.reached["loaded"] += stats.external_kv_tokens > 0
        self.engine.close()


class StagesMachine(StoresMachine):
    """The same with two stages, and a step in flight for each."""

    reached: ClassVar[Counter[str]] = Counter()
    depth = num_ranks = 2


SITUATIONS = (
    "loaded from one",
    "loaded from several",
    "failed loads",
    "preempted",
    "ended by a child that raised",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "machine",
    [StoresMachine, StagesMachine],
)
def test_several_stores_give_only_right_tokens_and_keep_no_block(
    machine: type[StoresMachine],
) -> None:
    run_until_reached(machine, SITUATIONS, max_examples=15)
