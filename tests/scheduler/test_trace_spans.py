"""A request's spans are its stages, laid out in time; steps and counters are recorded."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest

from pdserve.observe.trace import CLOCK_ID
from pdserve.wire.request import RequestStages
from pdserve.wire.trace import CountersEvent, EngineRequest, RankSlice, SliceEvent, StepEvent
from pdserve.wire.transfer import ConnectorReport, KVMode
from tests.scheduler.scripted import (
    NONCE,
    Engine,
    failed,
    make_handoff,
    make_request,
    make_ticket,
    received,
    told_of,
)
from tests.scheduler.test_stages import FIRST, PROMPT, loading, run

IN_SPANS = ("queue", "prefill", "kv_wait", "kv_transfer", "handover", "first_step")


def traced(engine: Engine) -> EngineRequest:
    """The one request's time: its own if it is over, else until now."""
    over = [e for e in engine.scheduler.recorder.since(0.0) if isinstance(e, EngineRequest)]
    (found,) = over or engine.scheduler.telemetry.requests(engine.clock.monotonic_s())
    return found


def assert_spans_are(stages: RequestStages, event: EngineRequest) -> None:
    seconds: dict[str, float] = defaultdict(float)
    for span in event.spans:
        seconds[span.name] += span.end_s - span.start_s
    told = {name: getattr(stages, f"{name}_s") for name in IN_SPANS}
    assert {name: seconds[name] for name in IN_SPANS} == pytest.approx(told)
    for before, after in itertools.pairwise(event.spans):
        assert before.end_s == after.start_s


def test_of_a_plain_request():
    engine = Engine()
    engine.scheduler.add(make_request("p", PROMPT))
    engine.clock.advance(2.0)
    assert_spans_are(run(engine), traced(engine))


def test_of_a_pull():
    engine = loading()
    engine.clock.advance(3.0)
    engine.fill(PROMPT, "d")
    engine.report(received=[received("d", wait_s=0.5, transfer_s=1.5, elapsed_s=2.0)])
    engine.clock.advance(0.25)
    event_source = traced(engine).source_id
    assert_spans_are(run(engine), traced(engine))
    assert event_source == make_handoff("lease", FIRST, num_tokens=len(PROMPT)).request_id


def test_of_a_load_that_fails_and_is_computed_here():
    engine = loading()
    engine.clock.advance(1.0)
    engine.report(failed=[failed("d")])
    engine.clock.advance(0.5)
    stages = run(engine)
    assert stages.prefill_s > 0
    assert_spans_are(stages, traced(engine))


def test_of_a_push_at_p():
    engine = Engine()
    engine.scheduler.add(make_request("p", PROMPT, remote_decode=True, ticket=make_ticket()))
    engine.clock.advance(1.0)
    engine.step()
    engine.clock.advance(2.0)
    engine.connector.is_registered = True
    engine.report(payloads=[told_of()])
    engine.clock.advance(0.5)
    stages = run(engine)
    assert stages.kv_wait_s == 2.0
    assert_spans_are(stages, traced(engine))
    engine.clock.advance(1.0)
    leased = traced(engine).spans[-1]
    assert (leased.name, leased.end_s - leased.start_s) == ("leased", 1.0)


def test_of_a_push_at_d():
    engine = Engine()
    engine.scheduler.add(make_request("d", PROMPT, ticket=make_ticket()))
    engine.clock.advance(1.0)
    engine.step()
    engine.clock.advance(6.0)
    engine.fill(PROMPT, "d")
    handoff = make_handoff(NONCE, FIRST)
    pushed = received("d", handoff=handoff, mode=KVMode.PUSH, transfer_s=0.5, elapsed_s=5.0)
    engine.report(received=[pushed])
    stages = run(engine)
    assert stages.kv_wait_s == pytest.approx(4.5)
    assert_spans_are(stages, traced(engine))
    assert traced(engine).source_id == handoff.request_id


def test_a_load_on_its_way_waits_for_its_peer_until_now():
    engine = loading()
    engine.clock.advance(3.0)
    assert [span.name for span in traced(engine).spans] == ["queue", "kv_wait"]
    assert traced(engine).spans[-1].end_s == engine.clock.monotonic_s()


def test_a_request_that_waits_is_in_its_queue_until_now():
    engine = Engine()
    engine.scheduler.add(make_request("p", PROMPT))
    engine.clock.advance(2.0)
    (span,) = traced(engine).spans
    assert (span.name, span.end_s - span.start_s) == ("queue", 2.0)
    assert traced(engine).outcome == ""


def test_a_nonce_does_not_leave_the_engine():
    engine = Engine()
    engine.scheduler.add(make_request("p", PROMPT, remote_decode=True))
    run(engine)
    request = next(iter(engine.scheduler.state.requests.values()))
    assert request.handoff is not None
    assert request.handoff.nonce in request.story()
    assert request.handoff.nonce not in str(traced(engine))


def test_a_step_says_how_many_tokens_of_which_kind_it_computed():
    engine = Engine()
    engine.scheduler.add(make_request("p", PROMPT))
    for _ in range(3):
        assert engine.submit() is not None
        engine.clock.advance(0.5)
        engine.collect()
    steps = [e for e in engine.scheduler.recorder.since(0.0) if isinstance(e, StepEvent)]
    counts = [(e.num_requests, e.num_prefill_tokens, e.num_decode_tokens) for e in steps]
    assert counts == [(1, 16, 0), (1, 8, 0), (1, 0, 1)]  # 16 tokens a step
    assert [e.at_s - e.start_s for e in steps] == [0.5, 0.5, 0.5]


def test_counters_are_recorded_when_they_change_and_not_too_often():
    engine = Engine()

    def samples() -> list[CountersEvent]:
        return [e for e in engine.scheduler.recorder.since(0.0) if isinstance(e, CountersEvent)]

    engine.scheduler.telemetry.sample(engine.clock.monotonic_s())
    engine.scheduler.telemetry.sample(engine.clock.monotonic_s())
    assert len(samples()) == 1
    engine.scheduler.add(make_request("p", PROMPT))
    engine.clock.advance(0.02)
    engine.scheduler.telemetry.sample(engine.clock.monotonic_s())
    assert samples()[-1].counters["requests"]["waiting"] == 1
    engine.step()
    engine.clock.advance(0.001)
    engine.scheduler.telemetry.sample(engine.clock.monotonic_s())
    assert len(samples()) == 2
    engine.clock.advance(0.02)
    engine.scheduler.telemetry.sample(engine.clock.monotonic_s())
    assert samples()[-1].counters["KV blocks"]["held"] > 0


def test_what_ranks_did_is_recorded_when_it_is_told_of():
    engine = Engine()
    engine.clock.advance(5.0)
    did = RankSlice(1.0, 2.0, "KV lanes", "read", {"bytes": 9})
    engine.scheduler.apply_report(ConnectorReport(slices=[did], clock_id=CLOCK_ID))
    now_s = engine.clock.monotonic_s()
    assert engine.scheduler.recorder.since(0.0) == [
        SliceEvent(now_s, 1.0, "KV lanes", "read", {"bytes": 9}, 2.0)
    ]


def test_what_a_rank_did_by_another_machines_clock_is_left_out():
    engine = Engine()
    did = RankSlice(1.0, 2.0, "KV lanes", "read", {})
    engine.scheduler.apply_report(ConnectorReport(slices=[did], clock_id="of another boot"))
    assert engine.scheduler.recorder.since(0.0) == []
