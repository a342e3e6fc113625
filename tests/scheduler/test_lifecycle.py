"""When blocks change hands, moment by moment."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgspec
import pytest

from pdserve.connectors.memory.exchange import Exchange
from pdserve.errors import InternalError
from pdserve.kvcache.manager import SharedPrompt
from pdserve.observe.clock import ManualClock
from pdserve.scheduler.life import State
from pdserve.scheduler.request import Request
from pdserve.scheduler.state import WaitingQueue
from pdserve.wire.ids import RequestId
from pdserve.wire.request import (
    EngineOutput,
    EngineStats,
    ErrorCode,
    FinishReason,
    GenerateRequest,
)
from pdserve.wire.sampling import Pooling, TokenLogprobs
from pdserve.wire.transfer import (
    ConnectorReport,
    Failed,
    KVHandoff,
    LeaseEnd,
    LoadFailure,
    Received,
    Settled,
)
from tests.scheduler.invariants import assert_nothing_held
from tests.scheduler.scripted import Engine, make_ticket
from tests.scheduler.scripted import make_request as scripted_request
from tests.toy import ToyEngine, sampling
from tests.toy_executor import expected_output

PROMPT = [1] * 20


class Pair:
    """Two toy engines that reach one another."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        exchange = Exchange()
        self.prefill = ToyEngine("p", exchange, self.clock)
        self.decode = ToyEngine("d", exchange, self.clock)
        self._num_handoffs = 0

    def hand_off(self, max_tokens: int = 8) -> KVHandoff:
        """Prefill `PROMPT` and return what P gives."""
        self._num_handoffs += 1
        request = make_request(f"p{self._num_handoffs}", max_tokens, remote_decode=True)
        self.prefill.scheduler.add(request)
        (output,) = [o for o in self.prefill.settle() if o.finish_reason]
        assert output.finish_reason is FinishReason.HANDOFF
        assert output.handoff is not None
        return output.handoff


def make_request(
    request_id: str,
    max_tokens: int,
    *,
    remote_decode: bool = False,
    handoff: KVHandoff | None = None,
    deadline_s: float | None = None,
    prompt: list[int] = PROMPT,
    **fields: Any,
) -> GenerateRequest:
    """A request, for `PROMPT` unless told otherwise, with some sampling fields."""
    return GenerateRequest(
        request_id=RequestId(request_id),
        prompt_token_ids=prompt,
        sampling=msgspec.structs.replace(sampling(max_tokens, ignore_eos=True), **fields),
        arrival_s=0.0,
        remote_decode=remote_decode,
        handoff=handoff,
        deadline_s=deadline_s,
    )


def test_leased_blocks_stay_until_the_reader_has_settled() -> None:
    pair = Pair()
    handoff = pair.hand_off()
    assert pair.prefill.blocks("leased") == 3
    pair.decode.scheduler.add(make_request("d", 8, handoff=handoff))
    tokens = [t for o in pair.decode.settle() for t in o.new_token_ids]
    assert tokens == expected_output(PROMPT, sampling(8, ignore_eos=True))
    assert pair.prefill.blocks("leased") == 3  # read, but P has not heard of it yet
    pair.prefill.settle()
    assert_nothing_held(pair.prefill.scheduler)
    assert_nothing_held(pair.decode.scheduler)
    assert pair.decode.scheduler.stats().local_compute_tokens == 0


def test_a_request_that_ends_keeps_its_blocks_while_a_step_in_flight_may_write_them() -> None:
    engine = Pair().decode
    engine.scheduler.add(make_request("r", 8))
    engine.submit()
    engine.collect()  # the first chunk of 16 tokens
    engine.submit()  # the other 4
    engine.submit()  # the first output token, planned before it is known
    assert len(engine.in_flight) == 2
    engine.scheduler.abort([RequestId("r")])
    assert engine.blocks("held") > 0
    engine.collect()
    assert engine.blocks("held") > 0
    engine.collect()
    assert engine.blocks("held") == 0


def test_a_handoff_with_its_last_token_already_out_needs_no_kv() -> None:
    pair = Pair()
    pair.decode.scheduler.add(make_request("d", 1, handoff=pair.hand_off()))
    (output,) = pair.decode.settle()
    assert output.finish_reason is FinishReason.LENGTH
    assert len(output.new_token_ids) == 1
    pair.prefill.settle()
    assert_nothing_held(pair.prefill.scheduler)
    assert pair.prefill.scheduler.stats().lease_ends["released"] == 1


def test_work_that_is_already_late_is_not_started() -> None:
    pair = Pair()
    late = make_request("r", 8, deadline_s=pair.clock.monotonic_s() - 1)
    pair.decode.scheduler.add(late)
    (output,) = pair.decode.settle()
    assert output.finish_reason is FinishReason.ABORT
    assert "deadline" in str(output.error)
    assert pair.decode.scheduler.stats().local_compute_tokens == 0


def test_what_is_given_up_at_the_end_is_aborted_not_failed() -> None:
    pair = Pair()
    pair.decode.scheduler.add(make_request("r", 8))
    pair.decode.submit()
    pair.decode.scheduler.abort_all("the engine is shutting down")
    (output,) = pair.decode.take()
    assert output.finish_reason is FinishReason.ABORT
    assert output.error == "the engine is shutting down"


def test_a_late_report_does_not_free_what_a_step_in_flight_may_write() -> None:
    pair = Pair()
    scheduler = pair.decode.scheduler
    scheduler.add(make_request("d", 8, handoff=pair.hand_off()))
    while scheduler.stats().num_running == 0:
        pair.decode.step()
    pair.decode.submit()
    scheduler.abort([RequestId("d")])
    again = RequestId("d")
    scheduler.apply_report(
        ConnectorReport(
            received=[
                Received(
                    request_id=again, num_bytes=1, num_descriptors=1, wait_s=0.0, transfer_s=0.0
                )
            ],
            failed=[Failed(request_id=again, reason=LoadFailure.ABORTED)],
        )
    )
    assert pair.decode.blocks("held") > 0
    pair.decode.settle()
    pair.prefill.settle()
    assert_nothing_held(scheduler)


def test_a_second_request_with_the_same_id_is_refused_and_the_first_goes_on() -> None:
    engine = Pair().decode
    engine.scheduler.add(make_request("r", 8))
    engine.scheduler.add(make_request("r", 8))
    outputs = engine.settle()
    assert [o.error for o in outputs if o.error] == [
        "a request with this id is already being served"
    ]
    assert sum(len(o.new_token_ids) for o in outputs) == 8
    assert_nothing_held(engine.scheduler)


# ---- counters ------------------------------------------------------------------------


def assert_sources_sum(stats: EngineStats) -> None:
    """Every prompt token counted came from somewhere."""
    by_source = stats.local_compute_tokens, stats.local_cache_hit_tokens, stats.external_kv_tokens
    assert sum(by_source) == stats.prompt_tokens, by_source


def test_prompt_tokens_are_the_sum_of_their_sources_whatever_becomes_of_a_request() -> None:
    pair = Pair()
    scheduler = pair.decode.scheduler
    scheduler.add(make_request("never started", 8))
    scheduler.abort([RequestId("never started")])
    scheduler.add(make_request("over at once", 1, handoff=pair.hand_off()))
    scheduler.add(make_request("aborted on the way", 8, handoff=pair.hand_off()))
    pair.decode.submit()
    scheduler.abort([RequestId("aborted on the way")])
    pair.decode.settle()
    scheduler.add(make_request("loaded", 8, handoff=pair.hand_off()))
    pair.decode.settle()
    assert_sources_sum(scheduler.stats())
    assert scheduler.stats().prompt_tokens == len(PROMPT)
    lost = pair.hand_off()
    pair.prefill.close()
    scheduler.kv.pool.forget_all()
    scheduler.add(make_request("failed", 8, handoff=lost))
    pair.decode.settle()
    assert_sources_sum(scheduler.stats())
    assert scheduler.stats().local_compute_tokens == len(PROMPT)


def test_a_block_in_two_leases_is_one_leased_block() -> None:
    pair = Pair()
    pair.hand_off()
    pair.hand_off()  # shares the two full blocks of its prompt
    by_state = pair.prefill.scheduler.stats().blocks
    assert by_state["leased"] == 4
    assert sum(by_state.values()) == pair.prefill.scheduler.stats().num_blocks


def test_cached_blocks_in_front_of_a_load_are_not_receiving() -> None:
    pair = Pair()
    pair.decode.scheduler.add(make_request("local", 2))
    pair.decode.settle()
    pair.decode.scheduler.add(make_request("d", 8, handoff=pair.hand_off()))
    pair.decode.submit()
    assert pair.decode.blocks("receiving") == 1
    assert pair.decode.blocks("held") == 2


# ---- logprobs of the prompt ----------------------------------------------------------


def test_logprobs_of_an_aborted_prompt_are_not_kept() -> None:
    engine = Pair().decode
    engine.scheduler.add(make_request("r", 8, prompt_logprobs=0))
    step = engine.submit()
    assert step is not None
    engine.scheduler.abort([RequestId("r")])
    entries = [TokenLogprobs(1, -1.0, 1, [])] * step.num_tokens
    engine.collect(prompt_logprobs={RequestId("r"): entries})
    engine.settle()
    assert_nothing_held(engine.scheduler)


def test_a_prompt_of_one_token_has_one_empty_entry() -> None:
    engine = Pair().decode
    engine.scheduler.add(make_request("r", 2, prompt=[1], prompt_logprobs=0))
    outputs = engine.settle()
    assert [o.prompt_logprobs for o in outputs] == [[None], None]


@pytest.mark.parametrize(
    ("pooling", "is_cached"), [(None, True), (Pooling.LAST, True), (Pooling.MEAN, False)]
)
def test_a_prompt_whose_tokens_all_count_takes_nothing_from_the_prefix_cache(
    pooling: Pooling | None, is_cached: bool
) -> None:
    engine = Pair().decode
    engine.scheduler.add(make_request("before", 1))
    engine.settle()
    engine.scheduler.add(make_request("r", 1, pooling=pooling))
    (output,) = engine.settle()
    assert (output.num_cached_tokens > 0) is is_cached
    assert (output.pooled is not None) is (pooling is not None)


def test_a_request_that_waits_leaves_no_hole_in_the_heap_and_takes_little() -> None:
    engine, shared = Engine(), SharedPrompt()
    requests = [make_request(f"r{index}", 2) for index in range(200)]
    engine.scheduler.add(requests.pop(), shared)
    tracemalloc.start(1)
    for request in requests:
        engine.scheduler.add(request, shared)
    sizes = [trace.size for trace in tracemalloc.take_snapshot().traces]
    tracemalloc.stop()
    # Larger ones are the system's allocator's; a few are tables of all requests.
    assert sum(size > 512 for size in sizes) < 10
    assert sum(sizes) / len(requests) < 3000


# ---- who may start -------------------------------------------------------------------


def test_a_prompt_longer_than_the_budget_runs_where_prompts_may_not_be_split() -> None:
    engine = Engine(enable_chunked_prefill=False)
    engine.scheduler.add(make_request("r", 2))
    for _ in range(2):
        assert engine.submit() is not None, "it waits for a step that will never come"
        engine.collect()
    assert engine.scheduler.is_idle


def test_a_short_prompt_shares_steps_with_a_long_one_that_may_have_only_so_much_of_each() -> None:
    engine = Engine(max_num_batched_tokens=24, long_prefill_token_threshold=8)
    engine.scheduler.add(make_request("long", 2, prompt=[1] * 20))
    step = engine.submit()
    assert step is not None
    assert step.num_scheduled_tokens == {"long": 8}
    engine.collect()
    engine.scheduler.add(make_request("short", 2, prompt=[2] * 6))
    shares = []
    while not engine.scheduler.is_idle:
        step = engine.submit()
        assert step is not None
        shares.append(dict(step.num_scheduled_tokens))
        engine.collect()
    assert shares == [{"long": 8, "short": 6}, {"long": 4, "short": 1}, {"long": 1}]


def test_nobody_starts_with_blocks_that_a_running_request_lacks() -> None:
    engine = Engine(num_blocks=11, max_num_batched_tokens=40)
    engine.scheduler.add(make_request("first", 8, prompt=[2] * 33))
    engine.scheduler.add(make_request("long", 8, prompt=[1] * 40))
    step = engine.submit()
    assert step is not None
    assert step.num_scheduled_tokens == {"first": 33, "long": 7}
    engine.scheduler.kv.pool.take(2)  # as a load does
    engine.scheduler.add(make_request("late", 2, prompt=[3]))
    # "long" needs four blocks and three are free; a step in flight forbids to preempt anybody.
    engine.executor.max_in_flight = 2
    engine.core.step(lambda outputs: None)
    assert engine.scheduler.kv.pool.num_free == 3
    assert list(engine.in_flight[-1].num_scheduled_tokens) == ["first"]


def queued(order: int, priority: int = 0) -> Request:
    """A request for a queue."""
    chain = Pair().decode.scheduler.kv.chain((), "")
    wire = make_request(f"r{order}", 8)
    return Request(wire, chain, SharedPrompt(), rank=(priority, 0.0, order), now_s=0.0)


def test_who_leaves_from_behind_others_is_not_kept_until_those_start() -> None:
    queue = WaitingQueue()
    head, *others = [queued(order) for order in range(100)]
    sheddable = queued(100, priority=1)
    for request in (sheddable, head):
        queue.push(request)
    for request in others:  # its client gives up, and tries again
        queue.push(request)
        queue.remove(request)
        assert queue.peek() is head
    assert sum(map(len, queue._heaps.values())) < 50
    queue.remove(head)
    assert queue.peek() is sheddable


def test_who_starts_and_is_preempted_again_and_again_leaves_nothing_in_the_queue() -> None:
    queue = WaitingQueue()
    first, second = queued(0), queued(1)
    queue.push(first)
    queue.push(second)
    for _ in range(100):
        assert queue.peek() is first
        queue.remove(first)
        queue.push(first)
    assert len(queue) == 2
    assert queue.peek() is first
    assert sum(map(len, queue._heaps.values())) <= 3


def test_an_illegal_move_is_refused_with_the_story() -> None:
    pair = Pair()
    chain = pair.decode.scheduler.kv.chain((), "")
    request = Request(make_request("r", 8), chain, SharedPrompt(), rank=(0, 0.0, 0), now_s=0.0)
    with pytest.raises(InternalError, match=r"waiting -> leased(.|\n)*queued prompt=20"):
        request.move(State.LEASED, 1.0, "by mistake")
    assert request.state is State.WAITING


# ---- values that are not finite ------------------------------------------------------


def lose(engine: Engine, *names: str) -> list[EngineOutput]:
    """One step, after which the workers name these requests."""
    assert engine.submit() is not None
    return engine.collect(non_finite_ids=[RequestId(name) for name in names])


def test_a_request_that_becomes_nan_ends_alone_and_nobody_finds_its_blocks() -> None:
    engine = Engine()
    engine.scheduler.add(scripted_request("sound", [2] * 8, 8))
    engine.scheduler.add(scripted_request("bad", [1] * 20))
    engine.step()
    found = lose(engine, "bad")
    (error,) = [output for output in found if output.request_id == "bad"]
    assert error.finish_reason is FinishReason.ERROR
    assert error.error_code == ErrorCode.NON_FINITE_LOGITS.value
    assert error.new_token_ids == []
    tokens = [token for output in engine.run() for token in output.new_token_ids]
    expected = expected_output([2] * 8, scripted_request("sound", [2] * 8, 8).sampling)
    assert tokens == expected[-len(tokens) :]
    assert engine.scheduler.stats().num_running == 0
    # Not even what had been published of it before, in its first step.
    engine.scheduler.add(scripted_request("next", [1] * 20))
    first, *_ = engine.run()
    assert first.num_cached_tokens == 0
    assert_nothing_held(engine.scheduler)


def test_what_is_still_said_of_a_request_that_became_nan_means_nothing() -> None:
    engine = Engine(max_num_seqs=2)
    engine.scheduler.add(scripted_request("bad", [1] * 4))
    for _ in range(2):
        assert engine.submit() is not None
    (error,) = [
        output for _ in range(2) for output in engine.collect(non_finite_ids=[RequestId("bad")])
    ]
    assert error.error_code == ErrorCode.NON_FINITE_LOGITS.value
    engine.run()
    assert_nothing_held(engine.scheduler)


def test_a_prefill_that_becomes_nan_is_never_handed_over() -> None:
    engine = Engine()
    engine.connector.is_registered = True
    engine.scheduler.add(
        scripted_request("bad", [1] * 20, remote_decode=True, ticket=make_ticket())
    )
    assert engine.step() == []
    (error,) = lose(engine, "bad")
    assert (error.finish_reason, error.handoff) == (FinishReason.ERROR, None)
    assert list(engine.connector.ended) == ["bad"]
    engine.report(settled=[Settled(request_id=RequestId("bad"), end=LeaseEnd.ABORTED)])
    engine.run()
    assert_nothing_held(engine.scheduler)
