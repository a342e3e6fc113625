"""What the scheduler owes to any connector, and what no connector can do to it."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.connectors.base import Match
from pdserve.observe.engine_series import counts_of
from pdserve.wire.ids import RequestId
from pdserve.wire.request import EngineOutput, EngineStats, FinishReason, OnLoadFailure
from pdserve.wire.transfer import LeaseEnd, LoadFailure
from tests.scheduler.invariants import assert_nothing_held
from tests.scheduler.scripted import (
    BLOCK_SIZE,
    NONCE,
    Engine,
    failed,
    make_request,
    make_ticket,
    received,
    settled,
)
from tests.toy import sampling
from tests.toy_executor import expected_output

PROMPT = [1, 2] * 12  # three whole blocks


def tokens_of(outputs: list[Any], request_id: str) -> list[int]:
    return [t for each in outputs if each.request_id == request_id for t in each.new_token_ids]


def right(num_tokens: int) -> list[int]:
    """What follows `PROMPT`."""
    return expected_output(PROMPT, sampling(num_tokens, ignore_eos=True))


def engine_with(request_id: str, match: Match, **fields: Any) -> Engine:
    """An engine whose connector has `match` of a prompt; nobody else has."""
    engine = Engine(**fields)
    engine.connector.offers[request_id] = match
    engine.scheduler.add(make_request(request_id, PROMPT))
    return engine


def cached_by_source(stats: EngineStats) -> dict[str, float]:
    counts = counts_of(stats)
    name = "vllm:prompt_tokens_cached_by_source"
    return {label: number for (series, label), number in counts.items() if series == name}


# ---- a hit that covers the whole prompt --------------------------------------------------


def test_the_last_token_of_a_prompt_that_is_loaded_whole_is_computed_again() -> None:
    engine = engine_with("stored", Match(24, is_async=False))
    engine.scheduler.add(make_request("behind", [3] * 4))
    step = engine.submit()
    assert step is not None
    assert step.num_scheduled_tokens == {"stored": 1, "behind": 4}
    assert step.loading_request_ids == ["stored"]
    engine.fill(PROMPT, "stored")
    outputs = engine.collect() + engine.run()
    assert tokens_of(outputs, "stored") == right(8)
    assert len(tokens_of(outputs, "behind")) == 8
    stats = engine.scheduler.stats()
    assert (stats.external_kv_tokens, stats.local_compute_tokens) == (24, 4)
    assert cached_by_source(stats) == {"device": 0, "p2p": 0, "external_unspecified": 24}
    assert_nothing_held(engine.scheduler)


def test_so_is_that_of_one_whose_load_no_step_waits_for() -> None:
    engine = engine_with("stored", Match(24, is_async=True))
    engine.scheduler.add(make_request("behind", [3] * 4))
    outputs = engine.step()
    assert engine.scheduler.stats().num_receiving == 1
    engine.fill(PROMPT, "stored")
    outputs += engine.report(received=[received("stored")])
    outputs += engine.run()
    assert tokens_of(outputs, "stored") == right(8)
    assert len(tokens_of(outputs, "behind")) == 8
    # The block whose last token was written again could be found by nobody before.
    engine.scheduler.add(make_request("again", [*PROMPT, 0]))
    engine.run()
    assert cached_by_source(engine.scheduler.stats()) == {
        "device": 24,
        "p2p": 24,
        "external_unspecified": 0,
    }
    assert_nothing_held(engine.scheduler)


# ---- a load inside a step that fails ------------------------------------------------------


@pytest.mark.parametrize(("num_valid", "first_token"), [(0, 0), (8, 8), (15, 8), (24, 16)])
def test_what_was_computed_from_a_load_that_failed_is_computed_again_and_no_token_of_it_leaves(
    num_valid: int, first_token: int
) -> None:
    engine = engine_with("stored", Match(16, is_async=False), max_num_batched_tokens=32)
    engine.scheduler.add(make_request("beside", [3] * 4, 2))
    step = engine.submit()
    assert step is not None
    assert step.num_scheduled_tokens == {"stored": 8, "beside": 4}
    engine.fill(PROMPT, "stored", min(num_valid, 16))
    outputs = engine.collect(failed_loads=[failed("stored", num_valid_tokens=num_valid)])
    assert tokens_of(outputs, "stored") == []
    assert len(tokens_of(outputs, "beside")) == 1
    assert engine.blocks("cached") == 0
    again = engine.submit()
    assert again is not None
    assert again.gone_request_ids == ["stored"]
    (whole,) = again.new_requests
    assert whole.num_computed_tokens == first_token
    assert again.num_scheduled_tokens["stored"] == 24 - first_token
    outputs = engine.collect() + engine.run()
    assert tokens_of(outputs, "stored") == right(8)
    stats = engine.scheduler.stats()
    assert stats.kv_load_failures["peer_lost"] == 1
    assert stats.external_kv_tokens == first_token
    assert stats.prompt_tokens == 28
    assert_nothing_held(engine.scheduler)


def test_a_request_that_becomes_nan_beside_a_load_that_failed_ends_once() -> None:
    engine = engine_with("stored", Match(16, is_async=False), max_num_batched_tokens=32)
    engine.scheduler.add(make_request("beside", [3] * 4, 2))
    assert engine.submit() is not None
    engine.fill(PROMPT, "stored", 0)
    outputs = engine.collect(
        failed_loads=[failed("stored", num_valid_tokens=0)], non_finite_ids=[RequestId("beside")]
    )
    assert [output.finish_reason for output in outputs] == [FinishReason.ERROR]
    assert tokens_of(engine.run(), "stored") == right(8)
    assert_nothing_held(engine.scheduler)


def test_a_load_that_has_failed_although_all_of_it_came_leaves_the_last_token_to_compute() -> None:
    engine = engine_with("stored", Match(24, is_async=False))
    step = engine.submit()
    assert step is not None
    engine.fill(PROMPT, "stored")
    assert engine.collect(failed_loads=[failed("stored", num_valid_tokens=24)]) == []
    assert tokens_of(engine.run(), "stored") == right(8)
    assert_nothing_held(engine.scheduler)


def test_so_is_what_the_steps_behind_it_have_computed_where_several_are_in_flight() -> None:
    engine = engine_with("stored", Match(8, is_async=False), max_num_batched_tokens=8, num_stages=2)
    first, second = engine.submit(), engine.submit()
    assert first is not None
    assert second is not None
    assert second.num_scheduled_tokens == {"stored": 8}
    assert engine.collect(failed_loads=[failed("stored")]) == []
    assert engine.collect() == []
    assert tokens_of(engine.run(), "stored") == right(8)
    assert engine.scheduler.stats().kv_load_failures["peer_lost"] == 1
    assert_nothing_held(engine.scheduler)


def test_until_a_load_inside_a_step_is_known_to_have_come_its_request_is_unproven() -> None:
    engine = engine_with("stored", Match(8, is_async=False), max_num_batched_tokens=8, num_stages=2)
    request = engine.scheduler.state.requests[RequestId("stored")]
    assert not request.is_unproven
    engine.submit()
    engine.submit()  # what the second step computes rests on the load of the first
    assert request.is_unproven
    engine.fill(PROMPT, "stored", 8)
    engine.collect()
    assert not request.is_unproven
    assert tokens_of(engine.collect() + engine.run(), "stored") == right(8)


def test_a_connector_hears_that_a_load_inside_a_step_has_failed() -> None:
    engine = engine_with("stored", Match(16, is_async=False))
    engine.submit()
    engine.fill(PROMPT, "stored", 8)
    engine.collect(failed_loads=[failed("stored", num_valid_tokens=8)])
    (report,) = engine.connector.reports
    assert report.failed == [failed("stored", num_valid_tokens=8)]
    assert tokens_of(engine.run(), "stored")[-1:] == right(8)[-1:]


# ---- loads in parts --------------------------------------------------------------------------


def test_what_there_is_behind_a_load_that_has_come_is_loaded_too() -> None:
    engine = engine_with("stored", Match(8, is_async=True))
    outputs = engine.step()
    engine.fill(PROMPT, "stored", 8)
    engine.connector.offers["stored"] = Match(8, is_async=True)
    outputs += engine.report(received=[received("stored")])
    assert engine.scheduler.stats().num_receiving == 1
    engine.fill(PROMPT, "stored", 16)
    outputs += engine.report(received=[received("stored")]) + engine.run()
    assert tokens_of(outputs, "stored") == right(8)
    stats = engine.scheduler.stats()
    assert (stats.external_kv_tokens, stats.local_compute_tokens) == (16, 8)
    _, generations = engine.connector.tables[RequestId("stored")]
    assert generations, "it was told that the request starts"
    assert_nothing_held(engine.scheduler)


def test_a_request_of_which_one_of_two_parts_fails_is_computed_from_where_the_first_ends() -> None:
    engine = engine_with("stored", Match(8, is_async=True))
    outputs = engine.step()
    engine.fill(PROMPT, "stored", 8)
    engine.connector.offers["stored"] = Match(16, is_async=True)
    outputs += engine.report(received=[received("stored")])
    outputs += engine.report(failed=[failed("stored", num_valid_tokens=8)]) + engine.run()
    assert tokens_of(outputs, "stored") == right(8)
    assert engine.scheduler.stats().local_cache_hit_tokens == 8
    assert_nothing_held(engine.scheduler)


def test_what_another_source_has_of_a_load_that_has_failed_is_loaded_from_there() -> None:
    engine = engine_with("stored", Match(16, is_async=True), recompute_tokens_per_s=0)
    outputs = engine.step()
    engine.connector.is_elsewhere = True
    engine.connector.offers["stored"] = Match(24, is_async=True)
    outputs += engine.report(failed=[failed("stored")])
    outputs += engine.step()
    assert engine.scheduler.stats().num_receiving == 1
    engine.fill(PROMPT, "stored")
    outputs += engine.report(received=[received("stored")]) + engine.run()
    assert tokens_of(outputs, "stored") == right(8)
    stats = engine.scheduler.stats()
    assert stats.external_kv_tokens == 24
    assert not any(stats.kv_ladder.values())
    assert_nothing_held(engine.scheduler)


def test_a_prefill_that_is_pushed_stays_pinned_behind_a_load_from_a_store() -> None:
    engine = Engine()
    engine.connector.offers["p"] = Match(8, is_async=True, is_pinned=True)
    engine.connector.is_registered = True
    ticket = make_ticket()
    engine.scheduler.add(make_request("p", PROMPT, remote_decode=True, ticket=ticket))
    engine.step()
    engine.fill(PROMPT, "p", 8)
    engine.report(received=[received("p")])
    assert engine.scheduler.state.running[RequestId("p")].is_pinned
    engine.run()
    engine.report(settled=[settled("p")])
    assert_nothing_held(engine.scheduler)


# ---- a save that goes on ---------------------------------------------------------------------


def save_of(engine: Engine, request_id: str) -> list[int]:
    """The blocks that a save of the request reads from now on."""
    engine.connector.saving.add(request_id)
    request = engine.scheduler.state.requests[RequestId(request_id)]
    assert request.holding is not None
    return list(request.holding.blocks)


def given_to_others(engine: Engine) -> set[int]:
    """Blocks that requests have now, or could get."""
    pool = engine.scheduler.kv.pool
    held = {
        block
        for request in engine.scheduler.state.requests.values()
        if request.holding is not None and not request.waits_for
        for block in request.holding.blocks
    }
    return held | set(pool._free)


@pytest.mark.parametrize("ending", ["aborted", "length"])
def test_blocks_that_a_save_reads_stay_as_they_are_when_their_request_ends(ending: str) -> None:
    engine = Engine()
    engine.scheduler.add(make_request("saved", PROMPT, 2))
    engine.step()
    engine.step()
    blocks = save_of(engine, "saved")
    if ending == "aborted":
        engine.scheduler.abort([RequestId("saved")])
    else:
        assert engine.step()[-1].finish_reason is FinishReason.LENGTH
    num_held = engine.blocks("quarantined")
    assert num_held >= len(blocks)
    engine.scheduler.add(make_request("other", [3] * 30, 2))
    engine.run()
    assert not given_to_others(engine) & set(blocks)
    engine.report(settled=[settled("saved", LeaseEnd.RELEASED, nonce="another's")])
    assert engine.blocks("quarantined") == num_held
    engine.report(settled=[settled("saved", LeaseEnd.RELEASED, nonce="save 0")])
    assert_nothing_held(engine.scheduler)


@pytest.mark.parametrize("is_leased", [False, True])
def test_blocks_that_several_connectors_hold_are_kept_until_the_last_lets_go(
    is_leased: bool,
) -> None:
    engine = Engine()
    engine.connector.savers = ["a", "b"]
    engine.connector.saving.add("saved")
    engine.scheduler.add(make_request("saved", PROMPT, 2, remote_decode=is_leased))
    engine.run()
    kind = "leased" if is_leased else "quarantined"
    assert engine.blocks(kind)
    names = ["", "a", "b"] if is_leased else ["a", "b"]
    for name in names:
        assert engine.blocks(kind)
        nonce = "save 0" if name else NONCE
        engine.report(settled=[settled("saved", nonce=nonce, connector="another")])
        engine.report(settled=[settled("saved", nonce=nonce, connector=name)])
    assert engine.scheduler.stats().lease_ends["read"] == is_leased
    assert_nothing_held(engine.scheduler)


def test_blocks_that_a_save_reads_stay_as_they_are_when_their_request_is_preempted() -> None:
    engine = Engine(num_blocks=7)
    engine.connector.savers = ["a", "b"]
    engine.scheduler.add(make_request("first", [3] * 16, 30))
    engine.scheduler.add(make_request("saved", PROMPT, 20))
    outputs = engine.step() + engine.step() + engine.step()
    blocks = save_of(engine, "saved")
    while not engine.scheduler.stats().num_preemptions:
        outputs += engine.step()
    assert engine.scheduler.stats().num_waiting == 1
    assert engine.blocks("quarantined") >= len(blocks)
    for _ in range(4):  # who goes on has no block of them, and sits out rather than take one
        outputs += engine.step()
        assert not given_to_others(engine) & set(blocks)
    engine.connector.saving.clear()
    for name in engine.connector.savers:
        assert engine.blocks("quarantined") >= len(blocks)
        end = LeaseEnd.RELEASED
        outputs += engine.report(settled=[settled("saved", end, nonce="save 0", connector=name)])
    outputs += engine.run()
    assert tokens_of(outputs, "saved") == right(20)
    assert_nothing_held(engine.scheduler)


def test_while_a_save_reads_the_blocks_of_one_that_was_preempted_the_others_keep_theirs() -> None:
    engine = Engine(num_blocks=9)
    prompts = {name: [token_id] * 16 for token_id, name in enumerate(["a", "b", "c"], 2)}
    engine.connector.saving.update(prompts)
    for name, prompt in prompts.items():
        engine.scheduler.add(make_request(name, prompt, 30))
    outputs: list[EngineOutput] = []
    while not engine.scheduler.stats().num_preemptions:
        outputs += engine.step()
    outputs += engine.step()
    assert engine.scheduler.stats().num_preemptions == 1
    engine.connector.saving.clear()
    outputs += engine.report(settled=[settled("c", nonce="save 0")])
    outputs += engine.run()
    for name, prompt in prompts.items():
        wanted = expected_output(prompt, sampling(30, ignore_eos=True))
        assert tokens_of(outputs, name) == wanted
    assert_nothing_held(engine.scheduler)


# ---- a store that fails ----------------------------------------------------------------------


@pytest.mark.parametrize("wish", list(OnLoadFailure))
def test_a_load_from_a_store_that_fails_is_computed_whatever_the_budget_for_outages(
    wish: OnLoadFailure,
) -> None:
    engine = Engine(recompute_tokens_per_s=0)
    engine.connector.offers["stored"] = Match(16, is_async=True)
    engine.scheduler.add(make_request("stored", PROMPT, on_load_failure=wish))
    engine.step()
    outputs = engine.report(failed=[failed("stored", LoadFailure.TIMEOUT)])
    outputs += engine.run()
    assert tokens_of(outputs, "stored") == right(8)
    assert not any(output.error for output in outputs)
    stats = engine.scheduler.stats()
    assert stats.recompute_tokens == 0
    assert stats.kv_ladder == {"retry": 0, "recompute": 1, "report": 0, "shed": 0}
    assert_nothing_held(engine.scheduler)


def test_what_has_failed_a_request_is_not_tried_for_it_for_ever() -> None:
    engine = engine_with("stored", Match(16, is_async=True))
    engine.step()
    outputs = engine.report(failed=[failed("stored")])
    assert tokens_of(outputs + engine.run(), "stored") == right(8)
    assert_nothing_held(engine.scheduler)


def test_every_request_ends_once_for_its_connector_however_it_ends() -> None:
    engine = Engine(num_blocks=7)
    engine.scheduler.add(make_request("length", [3] * 16, 2))
    engine.scheduler.add(make_request("aborted", PROMPT))
    engine.scheduler.add(make_request("waiting", PROMPT))
    engine.step()
    engine.scheduler.abort([RequestId("aborted"), RequestId("waiting")])
    engine.run()
    assert engine.connector.ended == {
        "length": FinishReason.LENGTH,
        "aborted": FinishReason.ABORT,
        "waiting": FinishReason.ABORT,
    }
    assert BLOCK_SIZE * engine.blocks("cached") == 16
    assert_nothing_held(engine.scheduler)


def test_a_request_for_another_engine_is_decoded_here_if_the_connector_hands_nothing_over() -> None:
    engine = Engine()
    engine.connector.hands_over = False
    engine.scheduler.add(make_request("r", PROMPT, remote_decode=True))
    outputs = engine.run()
    assert tokens_of(outputs, "r") == right(8)
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert_nothing_held(engine.scheduler)
