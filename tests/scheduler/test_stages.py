"""Where the time of a request went: the stages follow one another without a gap."""

from __future__ import annotations

import pytest

from pdserve.wire.ids import RequestId
from pdserve.wire.request import EngineOutput, RequestStages
from pdserve.wire.transfer import Fetched, KVMode
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
from tests.toy import sampling
from tests.toy_executor import expected_output

PROMPT = [1, 2] * 12
FIRST = expected_output(PROMPT, sampling(1, ignore_eos=True))


def total(stages: RequestStages) -> float:
    """What they sum to; the other fields are parts of these."""
    return (
        stages.queue_s
        + stages.prefill_s
        + stages.kv_wait_s
        + stages.kv_transfer_s
        + stages.handover_s
        + stages.first_step_s
    )


def stages_of(outputs: list[EngineOutput]) -> RequestStages:
    """Of the first output that has any."""
    return next(output.stages for output in outputs if output.stages is not None)


def run(engine: Engine) -> RequestStages:
    """Steps of half a second each until something has stages."""
    while True:
        assert engine.submit() is not None
        engine.clock.advance(0.5)
        outputs = engine.collect()
        if any(output.stages is not None for output in outputs):
            return stages_of(outputs)


def loading() -> Engine:
    """A D whose request was taken at 0 s, and began to load at 1 s."""
    engine = Engine()
    handoff = make_handoff("lease", FIRST, num_tokens=len(PROMPT))
    engine.scheduler.add(make_request("d", PROMPT, handoff=handoff))
    engine.clock.advance(1.0)
    engine.step()
    return engine


def test_what_came_from_a_store_lies_inside_other_stages() -> None:
    engine = Engine()
    engine.scheduler.add(make_request("r", PROMPT))
    engine.connector.fetched.append(
        Fetched(request_id=RequestId("r"), num_tokens=16, num_bytes=1600, seconds=0.25)
    )
    engine.report(payloads=[b"from the store"])
    engine.clock.advance(1.0)
    stages = run(engine)
    assert (stages.store_tokens, stages.store_bytes, stages.store_s) == (16, 1600, 0.25)
    assert total(stages) == pytest.approx(2.0)


def test_stages_of_a_pull() -> None:
    engine = loading()
    engine.clock.advance(4.0)
    engine.fill(PROMPT, "d")
    engine.report(received=[received("d", wait_s=1.0, transfer_s=2.0, digest_s=0.5, elapsed_s=3.0)])
    stages = run(engine)
    assert stages.queue_s == pytest.approx(1.0)
    assert stages.kv_wait_s == pytest.approx(1.0)
    assert stages.kv_transfer_s == pytest.approx(2.0)
    assert stages.kv_digest_s == pytest.approx(0.5)
    assert stages.handover_s == pytest.approx(1.0)
    assert stages.step_wait_s == 0.0
    assert stages.first_step_s == pytest.approx(0.5)
    assert total(stages) == pytest.approx(5.5)
    seconds = engine.scheduler.stats().kv_seconds
    assert seconds == {"wait": 1.0, "transfer": 2.0, "digest": 0.5}


def test_a_first_attempt_that_failed_was_waiting() -> None:
    engine = loading()
    engine.connector.num_retries = 1
    engine.clock.advance(4.0)
    engine.report(failed=[failed("d")])
    engine.clock.advance(3.0)
    engine.fill(PROMPT, "d")
    engine.report(received=[received("d", wait_s=1.0, transfer_s=2.0)])
    stages = run(engine)
    assert stages.kv_wait_s == pytest.approx(5.0)
    assert stages.kv_transfer_s == pytest.approx(2.0)
    assert total(stages) == pytest.approx(8.5)


def test_a_load_that_failed_for_good_was_waiting_and_then_it_is_a_prefill() -> None:
    engine = loading()
    engine.clock.advance(4.0)
    engine.report(failed=[failed("d")])
    engine.clock.advance(2.0)
    stages = run(engine)
    assert stages.queue_s == pytest.approx(3.0)
    assert stages.kv_wait_s == pytest.approx(4.0)
    assert stages.prefill_s == pytest.approx(1.0)  # 16 tokens, then 9
    assert total(stages) == pytest.approx(8.0)


def test_kv_that_was_ready_while_a_step_ran_waited_for_that_step() -> None:
    engine = loading()
    engine.scheduler.add(make_request("other", [3] * 4))
    assert engine.submit() is not None  # at 1 s
    engine.clock.advance(4.0)
    engine.collect()
    engine.clock.advance(1.0)
    engine.fill(PROMPT, "d")
    engine.report(received=[received("d", wait_s=1.0, transfer_s=1.0)])  # ready at 3 s
    engine.scheduler.abort(["other"])
    stages = run(engine)
    assert stages.handover_s == pytest.approx(3.0)
    assert stages.step_wait_s == pytest.approx(2.0)


def test_stages_of_a_push_at_d() -> None:
    engine = Engine()
    engine.scheduler.add(make_request("d", PROMPT, ticket=make_ticket()))
    engine.clock.advance(1.0)
    engine.step()
    engine.clock.advance(6.0)
    engine.fill(PROMPT, "d")
    engine.report(
        received=[
            received(
                "d",
                handoff=make_handoff(NONCE, FIRST),
                mode=KVMode.PUSH,
                wait_s=1.0,
                transfer_s=0.5,
                elapsed_s=5.0,
            )
        ]
    )
    stages = run(engine)
    assert stages.queue_s == pytest.approx(1.0)
    assert stages.kv_wait_s == pytest.approx(4.5)  # P's queue and its prefill, too
    assert stages.kv_transfer_s == pytest.approx(0.5)
    assert stages.handover_s == pytest.approx(1.0)
    assert total(stages) == pytest.approx(7.5)


def test_stages_of_a_push_at_p() -> None:
    engine = Engine()
    engine.scheduler.add(make_request("p", PROMPT, remote_decode=True, ticket=make_ticket()))
    engine.clock.advance(1.0)
    assert engine.submit() is None
    engine.clock.advance(3.0)
    engine.connector.is_registered = True
    engine.report(payloads=[told_of()])
    engine.clock.advance(0.25)
    stages = run(engine)
    assert stages.queue_s == pytest.approx(1.25)
    assert stages.kv_wait_s == pytest.approx(3.0)
    assert stages.prefill_s == pytest.approx(1.0)
    assert total(stages) == pytest.approx(5.25)
