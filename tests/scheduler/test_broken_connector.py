"""A connector that fails over a request, before it runs or at its end, ends no other one."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from pdserve.wire.ids import RequestId
from pdserve.wire.request import EngineOutput, FinishReason
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
from tests.toy_executor import expected_output

if TYPE_CHECKING:
    from pdserve.connectors.views import StepView
    from pdserve.wire.transfer import ConnectorMetadata

PROMPT = [1, 2] * 10


def engine_that_fails(method: str, **fields: int) -> Engine:
    engine = Engine(**fields)
    whole = getattr(engine.connector, method)

    def fail(request, *arguments, **named):
        if request.request_id == "bad":
            raise ZeroDivisionError("nobody thought of this")
        return whole(request, *arguments, **named)

    setattr(engine.connector, method, fail)
    return engine


@pytest.mark.parametrize(
    "method",
    [
        "request_arrived",
        "get_num_new_matched_tokens",
        "update_state_after_alloc",
    ],
)
def test_a_request_that_its_connector_fails_over_ends_alone_with_its_story(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, logger="pdserve.scheduler.transfers")
    engine = engine_that_fails(method)
    good = make_request("good", PROMPT)
    engine.scheduler.add(good)
    engine.scheduler.add(make_request("bad", PROMPT, handoff=make_handoff(NONCE, [1])))
    outputs = engine.run()
    refused = [o for o in outputs if o.request_id == "bad" and o.finish_reason is not None]
    assert [output.finish_reason for output in refused] == [FinishReason.ERROR]
    assert "nobody thought of this" in str(refused[0].error)
    tokens = [t for o in outputs if o.request_id == "good" for t in o.new_token_ids]
    assert tokens == expected_output(PROMPT, good.sampling)
    assert "ZeroDivisionError" in caplog.text
    assert "request bad" in caplog.text
    assert_nothing_held(engine.scheduler)


def test_a_connector_that_fails_over_an_end_does_not_keep_the_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = engine_that_fails("request_finished")
    engine.scheduler.add(make_request("bad", PROMPT))
    engine.scheduler.add(make_request("good", PROMPT))
    engine.step()
    engine.scheduler.abort([make_request("bad", PROMPT).request_id])
    assert {output.request_id for output in engine.run()} == {"good"}
    assert "failed over the end of request bad" in caplog.text
    assert_nothing_held(engine.scheduler)


def ended_alone(engine: Engine, outputs: list[EngineOutput]) -> None:
    """`bad` has ended with an error, and `good` as if nothing had happened."""
    outputs += engine.run()
    (refused,) = [o for o in outputs if o.request_id == "bad" and o.finish_reason is not None]
    assert refused.finish_reason is FinishReason.ERROR
    assert "nobody thought of this" in str(refused.error)
    tokens = [t for o in outputs if o.request_id == "good" for t in o.new_token_ids]
    assert tokens == expected_output(PROMPT, make_request("good", PROMPT).sampling)
    assert_nothing_held(engine.scheduler)


def test_a_connector_that_fails_over_what_a_step_computes_of_a_request_ends_that_one() -> None:
    engine = Engine(max_num_batched_tokens=48)
    engine.connector.fails_over = "bad"
    engine.scheduler.add(make_request("bad", PROMPT, remote_decode=True))
    engine.scheduler.add(make_request("good", PROMPT))
    step = engine.submit()
    assert step is not None
    assert list(step.num_scheduled_tokens) == ["good"]
    ended_alone(engine, engine.collect())


def test_a_connector_that_asks_a_step_for_a_request_it_does_not_compute_ends_no_engine() -> None:
    engine = Engine()
    whole = engine.connector.build_connector_meta
    asked: list[RequestId] = []

    def ask_for_another(step: StepView) -> ConnectorMetadata | None:
        if not asked:
            asked.append(RequestId("gone"))
            step.get(asked[0])
        return whole(step)

    engine.connector.build_connector_meta = ask_for_another
    engine.scheduler.add(make_request("first", PROMPT))
    ends = [o.finish_reason for o in engine.run() if o.finish_reason is not None]
    assert ends == [FinishReason.ERROR], "of the only request in the step"
    good = make_request("good", PROMPT)
    engine.scheduler.add(good)
    tokens = [t for o in engine.run() for t in o.new_token_ids]
    assert tokens == expected_output(PROMPT, good.sampling)
    assert_nothing_held(engine.scheduler)


def test_a_connector_that_fails_over_a_handover_ends_the_request() -> None:
    engine = engine_that_fails("request_finished")
    engine.scheduler.add(make_request("good", PROMPT))
    engine.scheduler.add(make_request("bad", PROMPT, remote_decode=True))
    ended_alone(engine, [])


def test_a_connector_that_fails_over_a_preemption_ends_the_request() -> None:
    engine = engine_that_fails("preempted", num_blocks=7)
    engine.scheduler.add(make_request("good", PROMPT))
    engine.scheduler.add(make_request("bad", [3] * 20))
    ended_alone(engine, [])


def test_blocks_that_are_held_after_a_failed_preemption_go_to_nobody() -> None:
    engine = engine_that_fails("preempted", num_blocks=7)
    engine.connector.saving.add("bad")
    engine.scheduler.add(make_request("good", PROMPT))
    engine.scheduler.add(make_request("bad", [3] * 22))
    outputs: list[EngineOutput] = []
    while not engine.connector.holds:
        outputs += engine.step()
    outputs += engine.report(settled=[settled("bad", nonce="save 0")])
    ended_alone(engine, outputs)


@pytest.mark.parametrize("kind", ["received", "failed", "failing"])
def test_a_connector_that_fails_over_what_became_of_a_load_ends_the_request(kind: str) -> None:
    engine = Engine()
    engine.scheduler.add(make_request("bad", PROMPT, handoff=make_handoff(NONCE, [1])))
    engine.scheduler.add(make_request("good", PROMPT))
    outputs = engine.step()
    engine.connector.fails_over = "bad"
    fact = received("bad") if kind == "received" else failed("bad")
    outputs += engine.report(**{kind: [fact]})
    if kind == "failing":
        outputs += engine.report(failed=[fact])
    ended_alone(engine, outputs)


def test_a_connector_that_fails_over_the_end_of_a_lease_does_not_keep_the_blocks() -> None:
    engine = Engine()
    engine.scheduler.add(make_request("p", PROMPT, remote_decode=True))
    engine.run()
    assert engine.blocks("leased") == 3
    engine.connector.fails_over = "p"
    assert engine.report(settled=[settled("p")]) == []
    assert_nothing_held(engine.scheduler)


def test_a_connector_that_fails_over_news_of_a_push_ends_who_waited_for_them() -> None:
    engine = Engine()
    engine.scheduler.add(make_request("bad", PROMPT, remote_decode=True, ticket=make_ticket()))
    engine.scheduler.add(make_request("good", PROMPT))
    outputs = engine.step()
    engine.connector.fails_over = NONCE
    outputs += engine.report(payloads=[told_of()])
    ended_alone(engine, outputs)
