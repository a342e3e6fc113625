"""What becomes of a request whose KV did not come, and how much may be computed in its place."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pdserve.scheduler.ladder import TokenBucket
from pdserve.wire.ids import RequestId
from pdserve.wire.request import EngineOutput, FinishReason, OnLoadFailure
from pdserve.wire.transfer import LoadFailure
from tests.scheduler.invariants import assert_nothing_held
from tests.scheduler.scripted import Engine, failed, make_handoff, make_request, received
from tests.toy import sampling
from tests.toy_executor import expected_output

PROMPT = [1, 2] * 12  # three whole blocks
LEASE = "lease-1"


def loading(*names: str, wish: OnLoadFailure = OnLoadFailure.RECOMPUTE, **fields: Any) -> Engine:
    """A D whose requests' KV is on its way; their first tokens are out."""
    engine = Engine(num_blocks=64, **fields)
    for name in names:
        handoff = make_handoff(LEASE, expected(1), num_tokens=len(PROMPT))
        engine.scheduler.add(make_request(name, PROMPT, handoff=handoff, on_load_failure=wish))
    outputs = engine.step()
    assert [output.new_token_ids for output in outputs] == [expected(1)] * len(names)
    return engine


def expected(max_tokens: int) -> list[int]:
    """What follows `PROMPT`."""
    return expected_output(PROMPT, sampling(max_tokens, ignore_eos=True))


def tokens(outputs: list[EngineOutput]) -> list[int]:
    """All tokens in them."""
    return [token_id for output in outputs for token_id in output.new_token_ids]


def test_a_load_that_fails_is_tried_once_more_into_the_same_blocks() -> None:
    engine = loading("d")
    engine.connector.num_retries = 1
    table = engine.connector.tables[RequestId("d")]
    assert engine.report(failed=[failed("d")]) == []
    assert engine.blocks("receiving") == 4
    engine.fill(PROMPT, "d")
    outputs = engine.report(received=[received("d")]) + engine.run()
    assert tokens(outputs) == expected(8)[1:]
    assert outputs[0].load_failures == outputs[-1].load_failures == ["peer_lost"]
    assert outputs[0].kv_mode == outputs[-1].kv_mode == "pull"
    assert engine.connector.tables[RequestId("d")][0] == table[0]
    stats = engine.scheduler.stats()
    assert stats.kv_ladder == {"retry": 1, "recompute": 0, "report": 0, "shed": 0}
    assert stats.local_compute_tokens == 0
    assert_nothing_held(engine.scheduler)


def test_what_arrived_whole_before_a_load_failed_is_not_computed_again() -> None:
    engine = loading("d")
    engine.fill(PROMPT, "d", num_tokens=16)
    engine.report(failed=[failed("d", num_valid_tokens=17)])
    assert tokens(engine.run()) == expected(8)[1:]
    stats = engine.scheduler.stats()
    assert stats.local_cache_hit_tokens == 16
    assert stats.local_compute_tokens == 8
    assert stats.recompute_tokens == 8
    assert stats.kv_ladder["recompute"] == 1
    assert_nothing_held(engine.scheduler)


def test_what_was_not_confirmed_is_never_found_by_anybody() -> None:
    engine = loading("d")
    engine.report(failed=[failed("d", LoadFailure.DIGEST, num_valid_tokens=7)])
    assert engine.blocks("cached") == 0
    assert tokens(engine.run()) == expected(8)[1:]
    assert_nothing_held(engine.scheduler)


def test_whoever_has_other_ways_is_told_of_a_failed_load() -> None:
    engine = loading("d", wish=OnLoadFailure.REPORT)
    engine.fill(PROMPT, "d", num_tokens=8)
    (output,) = engine.report(failed=[failed("d", LoadFailure.LEASE_LOST, num_valid_tokens=8)])
    assert output.finish_reason is FinishReason.ERROR
    assert output.error_code == "kv_transfer_failed"
    assert output.load_failures == ["lease_lost"]
    assert engine.blocks("cached") == 1
    stats = engine.scheduler.stats()
    assert stats.kv_ladder["report"] == 1
    assert stats.recompute_tokens == 0
    assert_nothing_held(engine.scheduler)


def test_a_load_over_the_budget_is_shed_and_told_when_to_come_again() -> None:
    engine = loading("d1", "d2", "d3", recompute_tokens_per_s=12)  # a burst of 48
    outputs = engine.report(failed=[failed(name) for name in ("d1", "d2", "d3")])
    (output,) = outputs
    assert output.request_id == "d3"
    assert output.finish_reason is FinishReason.ERROR
    assert output.error_code == "recompute_budget_exhausted"
    assert output.retry_after_s == pytest.approx(2.0)
    engine.run()
    stats = engine.scheduler.stats()
    assert stats.kv_ladder == {"retry": 0, "recompute": 2, "report": 0, "shed": 1}
    assert_nothing_held(engine.scheduler)


def test_a_fallback_counts_against_the_budget_and_others_do_not() -> None:
    engine = Engine(num_blocks=64, recompute_tokens_per_s=24, max_num_seqs=8)
    engine.scheduler.kv.enable_prefix_caching = False
    for index in range(4):
        engine.scheduler.add(make_request(f"local{index}", PROMPT))
    for index in range(3):
        engine.scheduler.add(make_request(f"fallback{index}", PROMPT, is_fallback=True))
    outputs = engine.run()
    (shed,) = [each for each in outputs if each.error]
    assert shed.request_id == "fallback2"
    assert shed.error_code == "recompute_budget_exhausted"
    assert shed.retry_after_s == pytest.approx(1.0)
    stats = engine.scheduler.stats()
    assert stats.recompute_tokens == 2 * len(PROMPT)
    assert stats.kv_ladder["recompute"] == 2
    engine.clock.advance(1.0)
    engine.scheduler.add(make_request("later", PROMPT, is_fallback=True))
    assert tokens(engine.run()) == expected(8)
    assert_nothing_held(engine.scheduler)


def test_a_fallback_pays_only_for_what_the_prefix_cache_has_not() -> None:
    engine = Engine(num_blocks=64, recompute_tokens_per_s=1)  # a burst of 48
    engine.scheduler.add(make_request("local", PROMPT))
    engine.run()
    for index in range(5):
        engine.scheduler.add(make_request(f"fallback{index}", PROMPT, is_fallback=True))
        assert tokens(engine.run()) == expected(8)
    assert engine.scheduler.stats().recompute_tokens == 5 * 8
    assert_nothing_held(engine.scheduler)


def test_what_was_found_cached_and_is_gone_when_it_starts_is_paid_for_then() -> None:
    engine = Engine(num_blocks=64, recompute_tokens_per_s=1)
    engine.scheduler.add(make_request("local", PROMPT))
    engine.run()
    engine.scheduler.add(make_request("first", PROMPT, is_fallback=True))
    engine.scheduler.kv.pool.forget_all()
    engine.run()
    assert engine.scheduler.stats().recompute_tokens == len(PROMPT)
    engine.scheduler.kv.pool.forget_all()
    engine.scheduler.add(make_request("second", [*PROMPT, 1], is_fallback=True))
    assert engine.run()[0].error_code == "recompute_budget_exhausted"
    assert_nothing_held(engine.scheduler)


def test_what_never_started_gives_its_budget_back() -> None:
    engine = Engine(num_blocks=64, recompute_tokens_per_s=1)
    for index in range(5):
        request_id = RequestId(f"fallback{index}")
        engine.scheduler.add(make_request(request_id, [3] * 40, is_fallback=True))
        engine.scheduler.abort([request_id])
    assert engine.scheduler.drain_outputs() == []
    assert_nothing_held(engine.scheduler)


def test_without_a_budget_nothing_is_computed_for_a_failed_engine() -> None:
    engine = loading("d", recompute_tokens_per_s=0)
    engine.scheduler.add(make_request("fallback", PROMPT, is_fallback=True))
    outputs = engine.report(failed=[failed("d")])
    assert [each.error_code for each in outputs] == ["recompute_budget_exhausted"] * 2
    assert all(each.retry_after_s for each in outputs)
    assert engine.scheduler.stats().recompute_tokens == 0
    assert_nothing_held(engine.scheduler)


def test_an_aborted_load_that_fails_is_not_tried_again() -> None:
    engine = loading("d")
    engine.connector.num_retries = 1
    engine.scheduler.abort([RequestId("d")])
    assert engine.blocks("quarantined") == 4
    assert engine.report(failed=[failed("d", LoadFailure.ABORTED)]) == []
    assert engine.scheduler.stats().kv_ladder["retry"] == 0
    assert_nothing_held(engine.scheduler)


# ---- the bucket ------------------------------------------------------------------------


def test_a_full_bucket_gives_a_burst_and_then_its_rate() -> None:
    bucket = TokenBucket(10, 50, now_s=0.0)
    assert bucket.take(50, 0.0) == 0.0
    assert bucket.take(20, 1.0) == pytest.approx(1.0)
    assert bucket.take(20, 2.0) == 0.0
    assert bucket.take(1, 2.0) == pytest.approx(0.1)


def test_a_bucket_never_holds_more_than_a_burst() -> None:
    bucket = TokenBucket(10, 50, now_s=0.0)
    bucket.correct(30)
    assert bucket.take(50, 0.0) == 0.0
    assert bucket.take(1, 0.0) > 0.0
    assert bucket.take(50, 100.0) == 0.0
    assert bucket.take(1, 100.0) > 0.0


def test_what_no_bucket_can_give_is_refused_for_good() -> None:
    assert TokenBucket(10, 50, now_s=0.0).take(51, 0.0) == math.inf
    assert TokenBucket(0, 50, now_s=0.0).take(1, 0.0) == math.inf
