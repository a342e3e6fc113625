"""A push, at both ends: whose the blocks are, moment by moment."""

from __future__ import annotations

import msgspec
import pytest

from pdserve.config.schema import SchedulingPolicy
from pdserve.connectors.memory.exchange import Exchange
from pdserve.observe.clock import ManualClock
from pdserve.scheduler.plan import MAX_OVERTAKEN
from pdserve.wire.ids import RequestId
from pdserve.wire.request import FinishReason, GenerateRequest, OnLoadFailure
from pdserve.wire.transfer import KVMode, LeaseEnd, LoadFailure, PushTicket
from tests.scheduler.invariants import assert_nothing_held
from tests.scheduler.scripted import (
    NONCE,
    Engine,
    failed,
    make_handoff,
    make_request,
    make_ticket,
    received,
    settled,
    told_of,
)
from tests.toy import ToyEngine, sampling
from tests.toy_executor import expected_output

PROMPT = [1, 2] * 12  # three whole blocks


def expected(max_tokens: int) -> list[int]:
    """What follows `PROMPT`."""
    return expected_output(PROMPT, sampling(max_tokens, ignore_eos=True))


# ---- at D ----------------------------------------------------------------------------


def reserved(max_tokens: int = 8) -> Engine:
    """A D whose request `d` waits for P to write."""
    engine = Engine()
    engine.scheduler.add(make_request("d", PROMPT, max_tokens, ticket=make_ticket()))
    assert engine.step() == []
    return engine


def arrive(engine: Engine, first_token_id: int) -> list[int]:
    """P has written everything; return the tokens that D gives from there on."""
    engine.fill(PROMPT, "d")
    handoff = make_handoff(NONCE, [first_token_id])
    outputs = engine.report(received=[received("d", handoff=handoff, mode=KVMode.PUSH)])
    outputs += engine.run()
    assert outputs[-1].kv_mode == "push"
    return [token_id for output in outputs for token_id in output.new_token_ids]


def test_a_request_whose_first_token_was_its_last_ends_when_its_kv_is_there() -> None:
    engine = reserved(max_tokens=1)
    assert arrive(engine, expected(1)[0]) == expected(1)
    assert_nothing_held(engine.scheduler)


def test_nobody_finds_blocks_that_a_peer_still_writes() -> None:
    engine = reserved()
    engine.scheduler.add(make_request("local", PROMPT))
    engine.run()
    assert engine.scheduler.stats().local_cache_hit_tokens == 0
    engine.scheduler.kv.pool.forget_all()
    arrive(engine, expected(1)[0])
    engine.scheduler.add(make_request("again", [*PROMPT, 0]))
    engine.run()
    assert engine.scheduler.stats().local_cache_hit_tokens == len(PROMPT)
    assert_nothing_held(engine.scheduler)


@pytest.mark.parametrize("wish", list(OnLoadFailure))
def test_a_push_that_fails_goes_back_to_its_sender_and_is_not_computed_here(
    wish: OnLoadFailure,
) -> None:
    engine = Engine()
    engine.scheduler.add(make_request("d", PROMPT, ticket=make_ticket(), on_load_failure=wish))
    engine.step()
    (output,) = engine.report(failed=[failed("d", LoadFailure.WITHDRAWN)])
    assert output.finish_reason is FinishReason.ERROR
    assert output.error_code == "kv_transfer_failed"
    assert output.load_failures == ["withdrawn"]
    assert engine.run() == []
    assert engine.scheduler.stats().kv_ladder["report"] == 1
    assert_nothing_held(engine.scheduler)


@pytest.mark.parametrize("first_token_ids", [[], [99]], ids=["no token", "no such token"])
def test_kv_that_comes_with_an_unusable_token_is_not_used(first_token_ids: list[int]) -> None:
    engine = reserved()
    handoff = make_handoff(NONCE, first_token_ids)
    (output,) = engine.report(received=[received("d", handoff=handoff, mode=KVMode.PUSH)])
    assert output.error_code == "kv_transfer_failed"
    assert output.load_failures == ["incompatible"]
    assert output.new_token_ids == []
    assert engine.blocks("cached") == 0
    assert_nothing_held(engine.scheduler)


@pytest.mark.parametrize("remote_decode", [True, False])
def test_a_ticket_that_is_refused_is_an_error_of_its_own_kind(remote_decode: bool) -> None:
    engine = Engine()
    engine.connector.refusals[NONCE] = "it is not signed"
    engine.scheduler.add(
        make_request("r", PROMPT, ticket=make_ticket(), remote_decode=remote_decode)
    )
    (output,) = engine.step()
    assert output.error_code == "handoff_refused"
    assert_nothing_held(engine.scheduler)


def test_blocks_of_an_aborted_push_are_quarantined_until_nothing_writes_them() -> None:
    engine = reserved()
    engine.scheduler.abort([RequestId("d")])
    assert engine.blocks("quarantined") == 4
    assert engine.blocks("free") == 12
    assert engine.connector.ended == {"d": FinishReason.ABORT}
    assert engine.report(failed=[failed("d", LoadFailure.ABORTED)]) == []
    assert engine.blocks("quarantined") == 0
    assert_nothing_held(engine.scheduler)


def test_blocks_of_an_aborted_push_that_arrives_all_the_same_are_free_then() -> None:
    engine = reserved()
    engine.scheduler.abort([RequestId("d")])
    handoff = make_handoff(NONCE, expected(1))
    assert engine.report(received=[received("d", handoff=handoff, mode=KVMode.PUSH)]) == []
    assert_nothing_held(engine.scheduler)


def test_reservations_leave_everybody_a_block_to_grow_into() -> None:
    engine = Engine()
    for index in range(4):
        ticket = make_ticket(f"push-{index}")
        engine.scheduler.add(make_request(f"d{index}", [index] * 24, ticket=ticket))
    engine.step()
    stats = engine.scheduler.stats()
    assert stats.num_receiving == 3
    assert stats.blocks["free"] >= 3
    engine.scheduler.abort([RequestId(f"d{index}") for index in range(4)])
    engine.report(failed=[failed(f"d{index}") for index in range(4)])
    assert_nothing_held(engine.scheduler)


def handed_over(name: str) -> GenerateRequest:
    """A request whose KV lies ready at P."""
    handoff = make_handoff(f"of {name}", expected(1), num_tokens=len(PROMPT))
    return make_request(name, PROMPT, handoff=handoff)


def test_kv_that_lies_ready_is_read_before_a_push_may_begin() -> None:
    engine = Engine(max_num_seqs=1)
    engine.scheduler.add(make_request("pushed", PROMPT, ticket=make_ticket()))
    engine.scheduler.add(handed_over("ready"))
    engine.step()
    assert list(engine.connector.tables) == ["ready"]


def test_no_push_is_given_blocks_while_kv_that_lies_ready_lacks_them() -> None:
    engine = Engine(num_blocks=6)
    engine.scheduler.add(make_request("local", [3] * 12))
    engine.step()
    engine.scheduler.add(make_request("pushed", [3, 2], ticket=make_ticket()))
    engine.scheduler.add(handed_over("ready"))
    engine.step()
    assert list(engine.connector.tables) == ["local"]
    engine.scheduler.abort([RequestId("ready")])
    engine.step()
    assert list(engine.connector.tables) == ["local", "pushed"]


def test_a_push_waits_for_so_many_others_and_no_more() -> None:
    engine = Engine(max_num_seqs=1)
    engine.scheduler.add(make_request("pushed", PROMPT, ticket=make_ticket()))
    for number in range(MAX_OVERTAKEN + 1):
        engine.scheduler.add(handed_over(f"r{number}"))
    for _ in range(MAX_OVERTAKEN):
        engine.step()
        ready = list(engine.connector.tables)[-1]
        assert ready != "pushed"
        engine.scheduler.abort([ready])
        engine.report(failed=[failed(ready, LoadFailure.ABORTED)])
    engine.step()
    assert list(engine.connector.tables)[-1] == "pushed"


def test_a_push_of_better_priority_is_not_overtaken() -> None:
    engine = Engine(max_num_seqs=1, policy=SchedulingPolicy.PRIORITY)
    pushed = make_request("pushed", PROMPT, ticket=make_ticket())
    engine.scheduler.add(msgspec.structs.replace(pushed, priority=1))
    engine.scheduler.add(msgspec.structs.replace(handed_over("ready"), priority=2))
    engine.step()
    assert list(engine.connector.tables) == ["pushed"]


def test_a_request_of_this_engine_alone_overtakes_nobody() -> None:
    engine = Engine(max_num_seqs=1)
    engine.scheduler.add(make_request("pushed", PROMPT, ticket=make_ticket()))
    engine.scheduler.add(make_request("local", PROMPT))
    engine.step()
    assert list(engine.connector.tables) == ["pushed"]


def behind_two_prompts(**fields: int) -> Engine:
    """An engine whose step a prompt fills, another that waits for the next, and a push behind."""
    engine = Engine(**fields)
    engine.scheduler.add(make_request("first", [3] * 32, 1))
    engine.scheduler.add(make_request("second", [4] * 24, 1))
    engine.scheduler.add(make_request("d", PROMPT, 4, ticket=make_ticket()))
    return engine


def test_a_reservation_does_not_wait_behind_a_prompt_that_lacks_a_steps_budget_alone() -> None:
    engine = behind_two_prompts(num_blocks=16)
    engine.step()
    assert list(engine.connector.tables) == ["first", "d"]
    assert engine.scheduler.stats().num_waiting == 1
    engine.fill(PROMPT, "d")
    handoff = make_handoff(NONCE, expected(1))
    outputs = engine.report(received=[received("d", handoff=handoff, mode=KVMode.PUSH)])
    outputs += engine.run()
    assert [t for o in outputs if o.request_id == "d" for t in o.new_token_ids] == expected(4)
    assert {output.request_id for output in outputs} == {"first", "second", "d"}
    assert_nothing_held(engine.scheduler)


@pytest.mark.parametrize("scarce", [{"num_blocks": 9}, {"max_num_seqs": 2}], ids=["block", "seat"])
def test_a_reservation_takes_no_room_of_the_prompt_that_it_passes(scarce: dict[str, int]) -> None:
    engine = behind_two_prompts(**scarce)
    engine.step()
    assert list(engine.connector.tables) == ["first"]
    engine.step()
    engine.step()
    assert "second" in engine.connector.tables


def test_a_stream_whose_kv_has_come_does_not_wait_for_the_end_of_a_long_prompt() -> None:
    engine = Engine()
    engine.scheduler.add(make_request("d", PROMPT, 4, ticket=make_ticket()))
    engine.scheduler.add(make_request("long", [3] * 40, 1))
    engine.step()
    engine.fill(PROMPT, "d")
    handoff = make_handoff(NONCE, expected(1))
    engine.report(received=[received("d", handoff=handoff, mode=KVMode.PUSH)])
    step = engine.submit()
    assert step is not None
    assert step.num_scheduled_tokens == {"long": 15, "d": 1}
    engine.collect()
    engine.run()
    assert_nothing_held(engine.scheduler)


def test_a_reservation_has_a_seat() -> None:
    engine = Engine(max_num_seqs=1)
    engine.scheduler.add(make_request("d", PROMPT, ticket=make_ticket()))
    engine.scheduler.add(make_request("local", [3] * 4))
    assert engine.submit() is None
    engine.report(failed=[failed("d")])
    assert [output.request_id for output in engine.run()][-1] == "local"
    assert_nothing_held(engine.scheduler)


def test_the_prompts_logprobs_cannot_be_had_where_it_is_not_computed() -> None:
    engine = Engine()
    engine.scheduler.add(make_request("d", PROMPT, ticket=make_ticket(), prompt_logprobs=0))
    (output,) = engine.step()
    assert "prompt_logprobs" in str(output.error)
    assert_nothing_held(engine.scheduler)


# ---- at P ----------------------------------------------------------------------------


def expecting(max_tokens: int = 8, **fields: int) -> Engine:
    """A P whose request `p` waits for D to register."""
    engine = Engine(**fields)
    engine.scheduler.add(
        make_request("p", PROMPT, max_tokens, remote_decode=True, ticket=make_ticket())
    )
    assert engine.submit() is None
    return engine


def register(engine: Engine) -> None:
    """D has registered its blocks."""
    engine.connector.is_registered = True
    engine.report(payloads=[told_of()])


def test_the_connector_is_told_of_each_chunk_but_the_last_of_what_will_be_leased() -> None:
    engine = Engine(max_num_batched_tokens=8)
    engine.scheduler.add(make_request("local", [3] * 20, 1))
    engine.run()
    engine.scheduler.add(make_request("p", PROMPT, remote_decode=True))
    pool = engine.scheduler.kv.pool
    for end in (8, 16, 24):
        engine.step()
        for request_id, blocks, generations, start, told_end in engine.connector.chunks:
            assert (request_id, start, told_end) == ("p", end - 8, end)
            assert len(blocks) == end // 8
            assert generations == pool.generations_of(blocks)
        assert len(engine.connector.chunks) == (end < len(PROMPT))
        engine.connector.chunks.clear()


def test_who_waits_for_a_peer_keeps_nobody_waiting_and_costs_nothing() -> None:
    engine = expecting()
    num_asked = engine.connector.num_asked
    engine.scheduler.add(make_request("local", [3] * 4))
    assert [output.request_id for output in engine.run()] == ["local"] * 8
    assert engine.connector.num_asked == num_asked + 1  # about the other
    assert engine.scheduler.num_runnable == 0
    assert engine.scheduler.stats().num_waiting == 1
    engine.scheduler.abort([RequestId("p")])
    assert_nothing_held(engine.scheduler)


def test_who_is_written_from_has_the_blocks_of_its_prompt_from_the_start() -> None:
    engine = expecting()
    register(engine)
    step = engine.submit()
    assert step is not None
    assert step.num_scheduled_tokens == {"p": 16}  # the first of two chunks
    blocks, generations = engine.connector.tables[RequestId("p")]
    assert len(blocks) == len(generations) == 4
    assert generations == [1] * 4
    (output,) = engine.collect() + engine.run()
    assert output.finish_reason is FinishReason.HANDOFF
    assert output.handoff is not None
    assert output.handoff.nonce == NONCE
    assert output.new_token_ids == expected(1)
    assert engine.blocks("leased") == 4
    engine.report(settled=[settled("p")])
    assert engine.scheduler.stats().lease_ends["read"] == 1
    assert_nothing_held(engine.scheduler)


def crowded(*, is_pushed: bool = True, num_blocks: int = 7) -> Engine:
    """A P whose request `p` computes slowly, while another one needs more and more blocks."""
    engine = Engine(num_blocks=num_blocks, max_num_batched_tokens=2)
    engine.connector.is_registered = True
    engine.scheduler.add(make_request("old", [3] * 8, 40))
    while not engine.step():
        pass
    ticket = make_ticket() if is_pushed else None
    engine.scheduler.add(make_request("p", PROMPT, remote_decode=True, ticket=ticket))
    engine.step()
    return engine


def test_who_is_written_from_is_never_preempted() -> None:
    engine = crowded()
    while not engine.blocks("leased"):
        engine.step()
    stats = engine.scheduler.stats()
    assert stats.num_preemptions == 0
    assert stats.blocks["free"] == 0
    engine.report(settled=[settled("p")])
    engine.run()
    assert_nothing_held(engine.scheduler)


def test_in_the_same_crowd_others_are_preempted() -> None:
    engine = crowded(is_pushed=False, num_blocks=6)
    while not engine.scheduler.stats().num_preemptions:
        engine.step()
    engine.scheduler.abort([RequestId("p")])
    engine.run()
    assert_nothing_held(engine.scheduler)


@pytest.mark.parametrize("is_settled_first", [True, False])
def test_blocks_of_an_aborted_push_stay_until_neither_a_write_nor_a_step_has_them(
    is_settled_first: bool,
) -> None:
    engine = expecting()
    register(engine)
    step = engine.submit()
    assert step is not None
    engine.scheduler.abort([RequestId("p")])
    assert engine.blocks("quarantined") == 4
    if is_settled_first:
        engine.report(settled=[settled("p", LeaseEnd.ABORTED)])
        assert engine.blocks("held") == 4
        engine.collect()
    else:
        engine.collect()
        assert engine.blocks("quarantined") == 4
        engine.report(settled=[settled("p", LeaseEnd.ABORTED)])
    engine.run()
    assert_nothing_held(engine.scheduler)


def test_a_push_whose_first_token_is_the_last_one_is_stopped() -> None:
    engine = expecting(max_tokens=1)
    register(engine)
    (output,) = engine.run()
    assert output.finish_reason is FinishReason.LENGTH
    assert output.handoff is None
    assert list(engine.connector.ended) == ["p"]
    assert engine.blocks("quarantined") == 4
    engine.report(settled=[settled("p", LeaseEnd.ABORTED)])
    assert_nothing_held(engine.scheduler)


def test_settling_frees_only_what_it_names() -> None:
    engine = expecting()
    register(engine)
    engine.run()
    engine.report(settled=[settled("p", nonce="another")])
    assert engine.blocks("leased") == 4
    engine.report(settled=[settled("p")])
    assert_nothing_held(engine.scheduler)


def test_a_request_that_is_late_while_it_waits_for_a_peer_ends() -> None:
    engine = Engine()
    deadline_s = engine.clock.monotonic_s() + 1.0
    engine.scheduler.add(
        make_request("p", PROMPT, remote_decode=True, ticket=make_ticket(), deadline_s=deadline_s)
    )
    assert engine.step() == []
    engine.clock.advance(1.5)
    (output,) = engine.step()
    assert output.finish_reason is FinishReason.ABORT
    assert list(engine.connector.ended) == ["p"]
    assert_nothing_held(engine.scheduler)


def test_a_client_that_leaves_while_its_request_waits_for_a_peer_leaves_nothing() -> None:
    engine = expecting()
    engine.scheduler.abort([RequestId("p")])
    assert list(engine.connector.ended) == ["p"]
    assert_nothing_held(engine.scheduler)
    engine.report(payloads=[told_of()])  # too late
    assert engine.run() == []


def test_the_story_of_a_push_says_what_happened() -> None:
    engine = expecting()
    request = engine.scheduler.state.requests[RequestId("p")]
    register(engine)
    engine.submit()
    engine.scheduler.abort([RequestId("p")])
    for event in ("waits for its peer", "ready", "aborted; waits for: hold, step"):
        assert event in request.story()


# ---- both ends -----------------------------------------------------------------------


@pytest.mark.parametrize("num_stages", [1, 2])
def test_two_engines_of_which_one_writes_into_the_other_answer_as_one(num_stages: int) -> None:
    exchange, clock = Exchange(), ManualClock()
    prefill, decode = (
        ToyEngine(name, exchange, clock, num_stages=num_stages) for name in ("p", "d")
    )
    ticket = PushTicket(nonce=NONCE, prefill=prefill.ref, decode=decode.ref)
    decode.scheduler.add(make_request("d", PROMPT, ticket=ticket))
    prefill.scheduler.add(make_request("p", PROMPT, remote_decode=True, ticket=ticket))
    told, tokens = [], []
    for _ in range(40):
        told += prefill.step()
        tokens += [token_id for output in decode.step() for token_id in output.new_token_ids]
    assert tokens == expected(8)
    assert [output.finish_reason for output in told] == [FinishReason.HANDOFF]
    assert prefill.scheduler.stats().lease_ends["read"] == 1
    stats = decode.scheduler.stats()
    assert stats.kv_loads == {"push": 1, "pull": 0}
    assert stats.local_compute_tokens == 0
    assert_nothing_held(prefill.scheduler)
    assert_nothing_held(decode.scheduler)


def test_what_either_half_of_the_connector_counts_is_in_the_stats() -> None:
    engine = Engine()
    engine.connector.faults = {"report_unknown": 2, "agent_reset": 1}
    engine.report(faults={"agent_reset": 3})
    assert engine.scheduler.stats().kv_faults == {"report_unknown": 2, "agent_reset": 4}


def test_prompts_are_the_requests_without_a_token_that_no_other_engine_computes() -> None:
    engine = reserved()
    engine.scheduler.add(make_request("gone", PROMPT))
    engine.scheduler.add(make_request("local", [3] * 4))
    assert engine.scheduler.stats().num_prompts == 2
    engine.scheduler.abort([RequestId("gone")])
    assert engine.scheduler.stats().num_prompts == 1
    engine.step()
    assert engine.scheduler.stats().num_prompts == 0
    assert engine.scheduler.stats().num_running == 1
