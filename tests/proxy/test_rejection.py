"""Requests that would miss their objectives are turned away as they come, and only those."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from pdserve.proxy.brain import rejection as rejections
from pdserve.proxy.brain.decision import decide
from pdserve.proxy.brain.question import RouteQuestion, default_ttft_slo_s
from tests.proxy.scripted import ScriptedEngine
from tests.proxy.test_pairing import MODEL, engine, fleets, learned


def asked(num_tokens, *engines, **more):
    times = MODEL.times()
    question = RouteQuestion(
        num_tokens=num_tokens,
        candidates=engines,
        times=times,
        ttft_slo_s=default_ttft_slo_s(times, num_tokens),
        itl_slo_s=0.03,
    )
    return msgspec.structs.replace(question, **more)


def rejection(question, *, waiting_s, passed_s=0.0):
    decision = decide(question, lambda prefill, decode: True)
    return rejections.rejection(decision, waiting_s=waiting_s, passed_s=passed_s)


@given(st.integers(1, 100_000), st.floats(1e-3, 10.0), st.floats(1e-4, 1.0))
def test_an_idle_deployment_turns_nobody_away(num_tokens, ttft_slo_s, itl_slo_s):
    idle = engine("p", "prefill"), engine("d", "decode")
    question = asked(num_tokens, *idle, ttft_slo_s=ttft_slo_s, itl_slo_s=itl_slo_s)
    assert rejection(question, waiting_s=0.0) is None


@given(fleets, st.integers(1, 30_000), st.floats(0, 5.0))
def test_what_is_turned_away_would_be_late_and_is_told_when_to_come_again(fleet, num, before):
    found = rejection(asked(num, *fleet), waiting_s=before)
    if found is not None:
        assert found.predicted_s > found.limit_s
        assert 1.0 <= found.retry_after_s <= 60.0
        assert "may take" in found.in_words


def test_a_prompt_is_turned_away_where_others_would_be_computed_for_too_long():
    behind = {"num_prompts": 20, "prompt_tokens": 200_000, "prompt_pairs": 1e9}
    busy = engine("p", "prefill", **behind), engine("d", "decode", **behind)
    found = rejection(asked(4000, *busy), waiting_s=0.0)
    assert found.reason == "ttft"
    assert found.parts["queue"] > 5.0
    assert rejection(asked(4000, busy[0], engine("d", "decode")), waiting_s=0.0) is None
    idle = engine("p", "prefill"), engine("d", "decode")
    assert rejection(asked(4000, *idle), waiting_s=2.0).parts["waiting"] > 1.0


def test_who_would_be_a_little_late_is_turned_away():
    idle = engine("p", "prefill"), engine("d", "decode")
    question = asked(4000, *idle, ttft_slo_s=2.0)
    alone_s = decide(question, lambda prefill, decode: True).chosen.ttft_s
    assert rejection(question, waiting_s=1.95 - alone_s) is None
    assert rejection(question, waiting_s=2.05 - alone_s).limit_s == 2.0


def test_who_would_be_late_because_others_pass_is_turned_away():
    idle = engine("p", "prefill"), engine("d", "decode")
    question = asked(4000, *idle, ttft_slo_s=2.0)
    assert rejection(question, waiting_s=1.0) is None
    assert rejection(question, waiting_s=1.0, passed_s=1.0).parts["passed"] == 1.0


def test_a_request_is_turned_away_where_tokens_would_come_too_slowly_once_they_begin():
    full = {"num_streams": 400, "kv_tokens": 1_000_000}
    question = asked(2000, engine("p", "prefill"), engine("d", "decode", **full))
    assert rejection(question, waiting_s=0.0).reason == "itl"
    short = msgspec.structs.replace(question.times, mean_output=2.0)
    late = msgspec.structs.replace(question, times=short, num_tokens=8000, ttft_slo_s=2.0)
    assert rejection(late, waiting_s=0.0) is None, "they have ended when this prompt is computed"


async def test_who_is_turned_away_gets_429_and_a_time_and_it_is_counted(make_stack):
    prefill, decode = [ScriptedEngine("prefill")], [ScriptedEngine("decode")]
    stack = await make_stack(prefill, decode, split_policy="predicted")
    pairing = stack.proxy.pairing
    pairing.model = learned()
    urls = [each.url for each in stack.proxy.backends]
    body = {"prompt": list(range(600)), "max_tokens": 4, "seed": 3}
    for url in urls:
        work = pairing.ledger.of(url)
        work.num_prompts, work.prompt_tokens = 20, 200_000
    async with stack.post(body) as response:
        assert response.status == 429
        assert 5 <= int(response.headers["Retry-After"]) <= 60
        assert "its first token would take" in (await response.json())["error"]["message"]
    for url in urls:
        work = pairing.ledger.of(url)
        work.num_prompts = work.prompt_tokens = 0
    assert await stack.stream(body)
    metrics = await stack.metrics()
    assert metrics['pdserve_rejected_total{reason="ttft"}'] == 1
    assert metrics['pdserve_requests_total{outcome="shed"}'] == 1
    assert metrics['pdserve_slo_requests_total{kept="both",slo="default"}'] == 1
    assert metrics["pdserve_goodput_ratio"] == 1


async def test_without_early_rejection_every_request_is_taken(make_stack):
    prefill, decode = [ScriptedEngine("prefill")], [ScriptedEngine("decode")]
    stack = await make_stack(prefill, decode, split_policy="predicted", early_rejection=False)
    stack.proxy.pairing.model = learned()
    body = {"prompt": list(range(600)), "max_tokens": 4, "seed": 3, "slo": {"ttft_ms": 1}}
    async with stack.post(body) as response:
        assert response.status == 200
