"""`--split-policy shadow`: the joint decision is made, told and measured, and nobody obeys it."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.cli import main
from pdserve.proxy.brain.decision import repeated
from pdserve.proxy.policies import split_policy_named
from pdserve.proxy.policies.splitting import always
from tests.proxy.scripted import ScriptedEngine, text_of
from tests.proxy.test_pairing import learned

SHORT = {"prompt": list(range(300)), "max_tokens": 6, "seed": 3, "stream": True}


@pytest.fixture
async def stack(make_stack):
    """One whose prefill engine is taken to be busy: requests are predicted to be better whole."""
    prefill, decode = ScriptedEngine("prefill"), ScriptedEngine("decode")
    stack = await make_stack([prefill], [decode], split_policy="shadow")
    pairing = stack.proxy.pairing
    pairing.model = learned()
    with pairing.ledger.hold(prefill.url, "prefill", 20_000, 0):
        yield stack


async def test_what_is_decided_in_shadow_is_kept_and_told_and_every_request_is_split(stack, caplog):
    caplog.set_level("INFO", "pdserve.requests")
    prefill, decode = stack.engines
    async with stack.post(SHORT) as response:
        await response.read()
    assert (len(prefill.calls), len(decode.calls)) == (1, 1)
    (record,) = stack.proxy.pairing.log.newest()
    assert record.decision.chosen.way == decode.url
    assert record.taken.way == f"{prefill.url}->{decode.url}"
    assert record.taken.total > record.decision.chosen.total
    assert repeated(record.decision) == record.decision
    (line,) = (each.getMessage() for each in caplog.records if each.name == "pdserve.requests")
    assert f"| shadow {decode.url} at " in line
    assert f", sent {record.taken.way} at " in line
    assert (await stack.get("/debug/decisions"))["is_obeyed"] is False


async def test_the_error_in_shadow_is_that_of_what_was_predicted_of_the_engines_it_had(stack):
    await stack.stream(SHORT)
    (record,) = stack.proxy.pairing.log.newest()
    metrics = await stack.metrics()
    error = abs(record.taken.ttft_s - record.measured.ttft_s) / record.measured.ttft_s
    found = metrics['pdserve_route_prediction_error_ratio_sum{term="ttft"}']
    assert found == pytest.approx(error)
    assert metrics['pdserve_shadow_decisions_total{change="split"}'] == 1
    missed_s = record.measured.ttft_s - record.decision.chosen.ttft_s
    regret_s = metrics["pdserve_route_regret_seconds_total"]
    assert regret_s == pytest.approx(max(0.0, missed_s))
    assert metrics['pdserve_disagg_decisions_total{decision="disaggregated",reason="default"}'] == 1


async def test_who_would_have_been_turned_away_is_counted_and_served(stack):
    for each in stack.proxy.backends:
        work = stack.proxy.pairing.ledger.of(each.url)
        work.num_prompts, work.prompt_tokens = 20, 200_000
    async with stack.post({**SHORT, "stream": False}) as response:
        assert (await response.json())["choices"][0]["text"] == text_of(3, 6)
    metrics = await stack.metrics()
    assert metrics['pdserve_shadow_rejected_total{reason="ttft"}'] == 1
    assert metrics['pdserve_rejected_total{reason="ttft"}'] == 0


async def test_an_explanation_says_where_a_request_went_instead(stack, capsys):
    async with stack.post(SHORT) as response:
        await response.read()
        name = response.headers["X-Request-Id"]
    argv = ["route", "explain", name, "--url", str(stack.url)]
    assert await asyncio.to_thread(main, argv) == 0
    told = capsys.readouterr().out
    prefill, decode = stack.engines
    assert f"in shadow mode: it went {prefill.url}->{decode.url} at " in told
    assert "bit for bit" in told


def test_the_policy_that_is_obeyed_in_shadow_splits_every_request():
    assert split_policy_named("shadow", flag="split-policy") is always
