"""Pushes and failed loads on the engine hop: what comes in, what goes out, what is counted."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
import pytest

from pdserve.server.choice import raise_if_failed
from pdserve.server.reply import error_response
from pdserve.wire.hop import KV_MODE_HEADER, LOAD_FAILURES_HEADER, STAGES_HEADER
from pdserve.wire.ids import RequestId
from pdserve.wire.request import (
    EngineOutput,
    EngineStats,
    FinishReason,
    KVStoreStats,
    OnLoadFailure,
    RequestStages,
)
from pdserve.wire.transfer import TICKETS, EngineRef, PushTicket
from tests.server.conftest import events, make_engine, serving
from tests.server.test_hop import COMPLETIONS, pair
from tests.server.test_status import named, scrape


def ref(engine) -> EngineRef:
    info = engine.info
    return EngineRef(
        engine_id=info.engine_id,
        incarnation=info.incarnation,
        endpoints=tuple(info.endpoints),
        shape=info.kv_shape,
    )


def ticket_of(prefill, decode, nonce: str = "n1") -> PushTicket:
    return PushTicket(nonce=nonce, prefill=ref(prefill), decode=ref(decode))


def at_p(push: PushTicket, secret: str = "", **ours: Any) -> dict[str, Any]:
    pinned = {"final_length": True, "created": 1, "seed": 5, "ticket": TICKETS.seal(push, secret)}
    return {"kv_transfer_params": {"do_remote_decode": True, "pdserve": pinned | ours}}


def at_d(push: PushTicket, secret: str = "", **ours: Any) -> dict[str, Any]:
    pinned = {"created": 1, "seed": 5, "ticket": TICKETS.seal(push, secret)}
    return {"kv_transfer_params": {"do_remote_prefill": True, "pdserve": pinned | ours}}


# --- tickets


@pytest.mark.parametrize("first_delivered", [True, False])
async def test_the_receiver_goes_on_from_a_first_token_that_comes_with_the_kv(
    text, first_delivered
):
    body = {"prompt": "The quick", "max_tokens": 8, "seed": 5, "logprobs": 1}
    async with pair(text, can_push=True) as both:
        ticket = ticket_of(both.prefill.engine, both.decode.engine)
        prefilled, received = await asyncio.gather(
            both.prefill.stream(COMPLETIONS, body | at_p(ticket), X_Request_Id="one"),
            both.decode.stream(
                COMPLETIONS,
                body | at_d(ticket, first_delivered=first_delivered),
                X_Request_Id="one",
            ),
        )
        alone = {"kv_transfer_params": {"pdserve": {"created": 1}}}
        whole = events(await both.decode.stream(COMPLETIONS, body | alone, X_Request_Id="one"))
        stats = both.decode.engine.stats
    *first, handoff = events(prefilled)
    assert handoff["pdserve_handoff"]["pdserve"]["handoffs"]
    assert (first if first_delivered else []) + events(received) == whole
    assert (stats.kv_loads, stats.external_kv_tokens) == ({"push": 1, "pull": 0}, 2)


async def test_the_ticket_reaches_both_engines_as_it_was_sealed(text):
    async with pair(text, can_push=True) as both:
        ticket = ticket_of(both.prefill.engine, both.decode.engine)
        body = {"prompt": "The", "max_tokens": 2}
        await asyncio.gather(
            both.prefill.ok(COMPLETIONS, body | at_p(ticket)),
            both.decode.ok(COMPLETIONS, body | at_d(ticket, on_load_failure="report")),
        )
        [prefill], [decode] = both.prefill.engine.requests, both.decode.engine.requests
    assert prefill.ticket == decode.ticket == ticket
    assert (prefill.remote_decode, decode.remote_decode) == (True, False)
    assert decode.handoff is None
    assert decode.on_load_failure is OnLoadFailure.REPORT


@pytest.mark.slow
@pytest.mark.parametrize("where", [at_p, at_d])
@pytest.mark.parametrize(
    ("more", "ours"),
    [
        ({"n": 2}, {}),
        ({"prompt": ["a", "b"]}, {}),
        ({}, {"ticket": "!"}),
        ({}, {"ticket": "AAAA"}),
        ({}, {"ticket": 3}),
        ({}, {"on_load_failure": "panic"}),
    ],
    ids=str,
)
async def test_a_ticket_that_cannot_be_meant_is_a_400(server, where, more, ours):
    ticket = ticket_of(server.engine, server.engine)
    body = {"prompt": "x"} | more | where(ticket, **ours)
    status, error = await server.refused(COMPLETIONS, body)
    assert (status, error["param"]) == (400, "kv_transfer_params")
    assert not server.engine.requests


async def test_a_ticket_and_a_handoff_exclude_each_other(server):
    ticket = ticket_of(server.engine, server.engine)
    body = {"prompt": "x"} | at_d(ticket, handoffs=["AAAA"])
    status, error = await server.refused(COMPLETIONS, body)
    assert (status, error["param"]) == (400, "kv_transfer_params")


async def test_a_receiver_that_is_left_says_why_its_kv_did_not_come(text):
    ends = {"prompt": "The", "max_tokens": 2}
    async with pair(text, can_push=True, eos_after=0) as both:
        ticket = ticket_of(both.prefill.engine, both.decode.engine)
        answer, (status, error) = await asyncio.gather(
            both.prefill.ok(COMPLETIONS, ends | at_p(ticket)),
            both.decode.refused(COMPLETIONS, ends | at_d(ticket)),
        )
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert (status, error["code"]) == (503, "kv_transfer_failed")


async def test_a_ticket_that_an_engine_cannot_trust_is_a_409(text):
    async with pair(text, can_push=True) as both:
        ticket = ticket_of(both.prefill.engine, both.decode.engine)
        for server, where in ((both.prefill, at_p), (both.decode, at_d)):
            body = {"prompt": "x"} | where(ticket, "another secret")
            status, error = await server.refused(COMPLETIONS, body)
            assert (status, error["code"]) == (409, "handoff_refused")
            assert "PDSERVE_SECRET" in error["message"]
            assert not server.engine.requests


# --- loads that fail


@pytest.mark.parametrize("report", [True, False])
async def test_a_proxy_that_asks_is_told_of_a_failed_load_and_others_get_their_tokens(
    text, report, caplog
):
    caplog.set_level(logging.INFO, "pdserve.requests")
    body = {"prompt": "The", "max_tokens": 4}
    async with pair(text, num_broken=2) as both:
        leg = {"kv_transfer_params": {"do_remote_decode": True}}
        params = (await both.prefill.ok(COMPLETIONS, body | leg))["kv_transfer_params"]
        if report:
            params["pdserve"]["on_load_failure"] = "report"
        url, payload = both.decode.url + COMPLETIONS, body | {"kv_transfer_params": params}
        async with both.decode.session.post(url, json=payload) as response:
            answer = await response.json()
            assert response.status == (503 if report else 200)
            told = response.headers.get("X-Pdserve-Load-Failures")
            assert told == ("digest,digest" if report else None)
        stats = both.decode.engine.stats
        for nonce in both.prefill.engine.leases:
            await both.prefill.engine.release_lease(nonce)
    rungs = {rung: number for rung, number in stats.kv_ladder.items() if number}
    assert rungs == {"retry": 1, "report" if report else "recompute": 1}
    assert stats.recompute_tokens == (0 if report else 1)
    _, line = (each for each in caplog.records if each.name == "pdserve.requests")
    assert line.levelname == "INFO"
    if report:
        assert answer["error"]["code"] == "kv_transfer_failed"
        assert " reported status=503 reason=digest,digest " in line.getMessage()


async def test_a_fallback_beyond_the_budget_is_a_503_that_says_when_to_come_back(text):
    engine = make_engine(text, recompute_tokens_per_s=1, max_model_len=16)  # a burst of 16
    async with serving(text, engine) as server:
        body: dict[str, Any] = {"prompt": [60] * 10, "max_tokens": 2}
        assert await server.ok(COMPLETIONS, body)
        body["kv_transfer_params"] = {"pdserve": {"is_fallback": True}}
        assert await server.ok(COMPLETIONS, body)
        async with server.session.post(server.url + COMPLETIONS, json=body) as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "4"
            assert (await response.json())["error"]["code"] == "recompute_budget_exhausted"
        assert server.engine.stats.recompute_tokens == 10


@pytest.mark.parametrize(
    ("code", "status", "retry_after"),
    [
        ("kv_transfer_failed", 503, "1"),
        ("recompute_budget_exhausted", 503, "3"),
        ("handoff_refused", 409, None),
        ("bad_request", 400, None),
        ("", 500, "3"),
        ("something_else", 500, "3"),
    ],
)
def test_an_engines_error_code_decides_the_status(code, status, retry_after):
    output = EngineOutput(
        request_id=RequestId("r"),
        finish_reason=FinishReason.ERROR,
        error="why",
        error_code=code,
        retry_after_s=2.5,
    )
    with pytest.raises(Exception, match="why") as raised:
        raise_if_failed(output, None, 0.0)
    response = error_response(raised.value, "/v1/completions")
    assert (response.status, response.headers.get("Retry-After")) == (status, retry_after)
    if code not in ("", "something_else", "bad_request"):
        assert msgspec.json.decode(response.body)["error"]["code"] == code


# --- what is told and counted


@pytest.mark.parametrize(
    ("failures", "ending"),
    [
        (["aborted"], ("disconnected", 499, logging.INFO)),
        (["digest"], ("shed", 503, logging.WARNING)),
    ],
)
async def test_a_push_that_its_prefill_engine_has_answered_is_no_failure(
    text, failures, ending, caplog
):
    async def outputs(request, siblings):
        yield EngineOutput(
            request_id=request.request_id,
            finish_reason=FinishReason.ERROR,
            error_code="kv_transfer_failed",
            load_failures=failures,
        )

    caplog.set_level(logging.INFO, logger="pdserve.requests")
    engine = make_engine(text)
    engine.generate = outputs
    async with serving(text, engine) as server:
        async with server.session.post(server.url + COMPLETIONS, json={"prompt": "x"}) as response:
            assert response.status == 503
    [record] = [r for r in caplog.records if r.name == "pdserve.requests"]
    fields = record.msg.fields
    assert (fields["outcome"], fields["status"], record.levelno) == ending


def with_stages(engine, stages: RequestStages, **more: Any) -> None:
    """Let an engine account for its requests like this."""

    def told(output):
        changed = {"stages": stages} if output.stages is not None else {}
        return msgspec.structs.replace(output, **changed, **more)

    engine.told = told


STAGES = RequestStages(
    kv_transfer_s=0.004,
    handover_s=0.003,
    first_step_s=0.001,
    kv_bytes=8_400_000,
    kv_digest_s=0.0015,
    step_wait_s=0.002,
    store_tokens=1,
    store_bytes=4_200_000,
    store_s=0.002,
)


@pytest.mark.parametrize(("asks", "says"), [("1", ["pull", "peer_lost"]), ("0", [None, None])])
async def test_a_stream_says_as_it_begins_how_its_kv_came(text, asks, says):
    engine = make_engine(text)
    with_stages(engine, STAGES, kv_mode="pull", load_failures=["peer_lost"])
    async with serving(text, engine) as server:
        body, headers = {"prompt": "x", "max_tokens": 3, "stream": True}, {STAGES_HEADER: asks}
        url = server.url + COMPLETIONS
        async with server.session.post(url, json=body, headers=headers) as answer:
            names = (KV_MODE_HEADER, LOAD_FAILURES_HEADER)
            assert [answer.headers.get(name) for name in names] == says
            assert (await answer.text()).count("peer_lost") == int(asks)


async def test_parts_of_stages_are_told_and_not_summed(text, caplog):
    caplog.set_level(logging.INFO, logger="pdserve.requests")
    engine = make_engine(text, prefill_s=0.03)
    with_stages(engine, STAGES, kv_mode="push")
    async with serving(text, engine) as server:
        body = {"prompt": "x", "max_tokens": 3}
        told = (await server.ok(COMPLETIONS, body, X_Pdserve_Stages="1"))["pdserve_stages"]
        samples = await scrape(server)
    terms = {k: v for k, v in told.items() if k.endswith("_s") and k != "ttft_s"}
    parts = [terms.pop(name) for name in ("kv_digest_s", "step_wait_s", "store_s")]
    assert parts == [0.0015, 0.002, 0.002]
    assert sum(terms.values()) == pytest.approx(told["ttft_s"])
    assert told["kv_mode"] == "push"
    waits = {
        kind: named(samples, "pdserve_kv_transfer_wait_seconds_sum", kind=kind)
        for kind in ("load", "handover", "step")
    }
    assert waits == pytest.approx({"load": 0.0, "handover": 0.001, "step": 0.002})
    [record] = [r for r in caplog.records if r.name == "pdserve.requests"]
    assert "kv 4.0 (8.4 MB, 2.1 GB/s, digest 1.5)" in record.getMessage()
    assert record.getMessage().endswith(" | kv from store 1 of 1, 2.1 GB/s")


async def test_what_the_engine_counts_of_kv_has_one_series_each(text):
    engine = make_engine(text)
    counted = {
        "kv_loads": {"push": 3, "pull": 4},
        "kv_ladder": {"retry": 1, "recompute": 2, "report": 5, "shed": 6},
        "recompute_tokens": 70,
        "kv_seconds": {"digest": 0.25},
        "kv_load_failures": {"withdrawn": 8},
        "kv_store": KVStoreStats(
            is_up=True,
            num_queried_tokens=100,
            num_hit_tokens=101,
            loaded_bytes=102,
            load_s=103,
            saved_bytes=104,
            save_s=105,
            num_dropped_chunks=106,
            num_wrong_chunks=107,
            num_late_lookups=108,
            num_refused_chunks=109,
        ),
        "kv_source_tokens": {"nixl": 12, "lmcache": 0},
        "kv_events": {"published": 9, "dropped": 10, "queued": 11},
    }
    async with serving(text, engine) as server:
        both = {"kv_source_tokens": {"nixl": 0, "lmcache": 0}}
        plain, saved, pages = engine.stats, type(engine).stats, []
        try:
            for changes in (both, counted):
                stats: EngineStats = msgspec.structs.replace(plain, **changes)
                type(engine).stats = property(lambda self, stats=stats: stats)
                pages.append(await scrape(server))
        finally:
            type(engine).stats = saved
    before, after = pages
    for name, labels, value in (
        ("pdserve_kv_loads_total", {"mode": "push"}, 3),
        ("pdserve_kv_loads_total", {"mode": "pull"}, 4),
        ("pdserve_kv_ladder_total", {"rung": "retry"}, 1),
        ("pdserve_kv_ladder_total", {"rung": "recompute"}, 2),
        ("pdserve_kv_ladder_total", {"rung": "report"}, 5),
        ("pdserve_kv_ladder_total", {"rung": "shed"}, 6),
        ("pdserve_recompute_tokens_total", {}, 70),
        ("pdserve_kv_digest_seconds_total", {}, 0.25),
        ("pdserve_kv_transfer_failures_total", {"reason": "withdrawn"}, 8),
        ("pdserve_kv_source_tokens_total", {"source": "nixl"}, 12),
        ("vllm:external_prefix_cache_queries_total", {}, 100),
        ("vllm:external_prefix_cache_hits_total", {}, 101),
        ("pdserve_kv_tier_loaded_bytes_total", {}, 102),
        ("pdserve_kv_tier_load_seconds_total", {}, 103),
        ("pdserve_kv_tier_saved_bytes_total", {}, 104),
        ("pdserve_kv_tier_save_seconds_total", {}, 105),
        ("pdserve_kv_tier_dropped_saves_total", {}, 106),
        ("pdserve_kv_tier_digest_mismatches_total", {}, 107),
        ("pdserve_kv_tier_lookup_timeouts_total", {}, 108),
        ("pdserve_kv_tier_refused_saves_total", {}, 109),
        ("pdserve_kv_tier_server_up", {}, 1),
        ("pdserve_kv_events_published_total", {}, 9),
        ("pdserve_kv_events_dropped_total", {}, 10),
        ("pdserve_kv_events_queued", {}, 11),
    ):
        assert named(before, name, **labels) == 0
        assert named(after, name, **labels) == value
    assert before.keys() == after.keys()


@pytest.mark.parametrize("failing", [True, False])
async def test_a_stream_does_not_begin_with_what_its_client_has_already(text, failing):
    """An engine tells the token of a handoff at once; whether its KV arrives is seen later."""
    arrives = asyncio.Event()

    async def outputs(request, siblings):
        first = request.handoff.first_token_ids[0]
        yield EngineOutput(request_id=request.request_id, new_token_ids=[first])
        await arrives.wait()
        yield EngineOutput(
            request_id=request.request_id,
            new_token_ids=[] if failing else [60],
            finish_reason=FinishReason.ERROR if failing else FinishReason.LENGTH,
            error="lost",
            error_code="kv_transfer_failed",
            load_failures=["peer_lost"],
        )

    body = {"prompt": "The", "max_tokens": 4, "stream": True}
    async with pair(text) as both:
        both.decode.engine.generate = outputs
        leg = {"kv_transfer_params": {"do_remote_decode": True, "pdserve": {"final_length": True}}}
        *_, last = events(await both.prefill.stream(COMPLETIONS, body | leg))
        params = last["pdserve_handoff"]
        params["pdserve"]["first_delivered"] = True
        url, payload = both.decode.url + COMPLETIONS, body | {"kv_transfer_params": params}
        request = asyncio.create_task(both.decode.session.post(url, json=payload))
        await asyncio.sleep(0.05)
        assert not request.done()
        arrives.set()
        async with await request as response:
            assert response.status == (503 if failing else 200)
            if failing:
                assert response.headers["X-Pdserve-Load-Failures"] == "peer_lost"
        await both.prefill.engine.release_lease(*both.prefill.engine.leases)
