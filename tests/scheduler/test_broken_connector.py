"""A connector that fails over a request, before it runs or at its end, ends no other one."""

from __future__ import annotations

import logging

import pytest

from pdserve.wire.request import FinishReason
from tests.scheduler.scripted import NONCE, Engine, make_handoff, make_request
from tests.stateful.toy import expected_output

PROMPT = [1, 2] * 10


def engine_that_fails(method: str) -> Engine:
    engine = Engine()
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
        "check_handoff",
        "request_queued",
        "get_num_new_matched_tokens",
        "update_state_after_alloc",
    ],
)
def test_a_request_that_its_connector_fails_over_ends_alone_with_its_story(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, logger="pdserve.scheduler.scheduler")
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
    engine.scheduler.assert_nothing_held()


def test_a_connector_that_fails_over_an_end_does_not_keep_the_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = engine_that_fails("request_aborted")
    engine.scheduler.add(make_request("bad", PROMPT))
    engine.scheduler.add(make_request("good", PROMPT))
    engine.step()
    engine.scheduler.abort([make_request("bad", PROMPT).request_id])
    assert {output.request_id for output in engine.run()} == {"good"}
    assert "failed over the end of request bad" in caplog.text
    engine.scheduler.assert_nothing_held()
