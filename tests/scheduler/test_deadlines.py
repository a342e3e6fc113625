"""Nobody works for a client that has stopped waiting."""

from __future__ import annotations

import pytest

from pdserve.kvcache.manager import SharedPrompt
from pdserve.scheduler.request import Request
from pdserve.wire.request import FinishReason
from tests.scheduler.invariants import assert_nothing_held
from tests.scheduler.scripted import Engine, failed, make_handoff, make_request

PROMPT = [1, 2] * 12


def test_who_waits_behind_others_ends_when_it_is_late() -> None:
    engine = Engine(max_num_seqs=1)
    deadline_s = engine.clock.monotonic_s() + 1.0
    engine.scheduler.add(make_request("first", PROMPT, 20))
    engine.scheduler.add(make_request("second", PROMPT))
    engine.scheduler.add(make_request("third", PROMPT, deadline_s=deadline_s))
    engine.step()
    engine.clock.advance(2.0)
    outputs = engine.step()
    (late,) = [each for each in outputs if each.finish_reason]
    assert (late.request_id, late.finish_reason) == ("third", FinishReason.ABORT)
    assert "while it waited" in str(late.error)
    assert {each.request_id for each in engine.run()} == {"first", "second"}
    assert_nothing_held(engine.scheduler)


@pytest.mark.parametrize("ahead_s", [-300.0, 300.0])
def test_who_has_time_left_is_served_however_wrong_the_hosts_wall_clock_is(ahead_s: float) -> None:
    engine = Engine(ahead_s=ahead_s)
    deadline_s = engine.clock.monotonic_s() + 1.0
    engine.scheduler.add(make_request("r", PROMPT, 4, deadline_s=deadline_s))
    assert [output.finish_reason for output in engine.run()[-1:]] == [FinishReason.LENGTH]


def test_who_runs_ends_when_it_is_late() -> None:
    engine = Engine()
    deadline_s = engine.clock.monotonic_s() + 1.0
    engine.scheduler.add(make_request("r", PROMPT, 20, deadline_s=deadline_s))
    for _ in range(4):
        engine.step()
    assert engine.submit() is not None
    engine.clock.advance(2.0)
    assert engine.submit() is not None  # that "r" is gone
    (output,) = engine.take()
    assert output.finish_reason is FinishReason.ABORT
    assert "while it ran" in str(output.error)
    assert engine.blocks("held") > 0  # the step in flight may still write them


def test_whose_kv_is_on_its_way_ends_when_it_is_late_and_keeps_its_blocks() -> None:
    engine = Engine()
    deadline_s = engine.clock.monotonic_s() + 1.0
    handoff = make_handoff("lease", [1], num_tokens=len(PROMPT))
    engine.scheduler.add(make_request("d", PROMPT, handoff=handoff, deadline_s=deadline_s))
    engine.step()
    engine.clock.advance(2.0)
    (output,) = engine.report()
    assert output.finish_reason is FinishReason.ABORT
    assert list(engine.connector.ended) == ["d"]
    assert engine.blocks("quarantined") == 4
    engine.report(failed=[failed("d")])
    assert_nothing_held(engine.scheduler)


def test_a_lease_has_no_deadline_but_its_own() -> None:
    engine = Engine()
    deadline_s = engine.clock.monotonic_s() + 1.0
    engine.scheduler.add(make_request("p", PROMPT, remote_decode=True, deadline_s=deadline_s))
    engine.run()
    engine.clock.advance(2.0)
    assert engine.step() == []
    assert engine.blocks("leased") > 0


def test_entries_of_requests_that_are_over_are_swept() -> None:
    state = Engine().scheduler.state
    chain = state.kv.chain(PROMPT, "")
    for order in range(5000):
        wire = make_request("same", PROMPT, deadline_s=1e9)
        last = Request(wire, chain, SharedPrompt(), rank=(0, 0.0, order), now_s=0.0)
        state.add(last)
        if order < 4999:
            state.end(last, 0.0, "over")
    assert len(state.deadlines) <= 1025
    assert state.take_late(2e9) == [last]
    assert not state.deadlines
