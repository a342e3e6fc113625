"""Decisions that are kept: each follows from its record, and can be held against other policies."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.cli import main
from pdserve.commands.route import compared, explained
from pdserve.config.http import ProxyConfig
from pdserve.config.policies import POLICIES, SPLIT_POLICIES
from pdserve.errors import ConfigError
from pdserve.proxy.brain.decision import MARGIN, repeated
from pdserve.proxy.brain.pairing import (
    DWELL_S,
    MAX_SESSIONS,
    Sessions,
    preference,
)
from pdserve.proxy.brain.question import PairDecision
from pdserve.proxy.brain.record import NUM_KEPT, DecisionLog, chosen_by
from tests.proxy.scripted import ScriptedEngine
from tests.proxy.test_pairing import are_unlike, choose, engine, fleets, learned


@given(fleets, st.integers(1, 30_000), st.sampled_from([None, True, False]))
def test_a_decision_follows_from_its_record_bit_for_bit(fleet, num, was_split):
    decision = choose(num, *fleet, may_pair=are_unlike, was_split=was_split)
    sent = msgspec.json.decode(msgspec.json.encode(decision), type=PairDecision)
    assert sent == decision
    assert repeated(sent) == decision
    assert len(decision.question.candidates) <= 9


@given(fleets, st.integers(1, 30_000), st.integers(0, 99))
def test_every_policy_says_what_it_would_have_chosen_among_the_engines_of_a_record(
    fleet, num, sequence
):
    decision = choose(num, *fleet, may_pair=lambda p, d: p != "e0")
    for policy in POLICIES:
        for split in SPLIT_POLICIES:
            cost = chosen_by(policy, split, decision.question, sequence)
            urls = {each.url for each in decision.question.candidates}
            assert {cost.prefill, cost.decode} <= urls
            assert cost.is_local or (cost.prefill, cost.decode) not in decision.question.apart
            assert not (split == "never" and not cost.is_local)


def test_a_session_keeps_what_it_had_while_the_other_is_not_clearly_better():
    prefill = engine("p", "prefill")
    near = [
        (streams, choose(2000, prefill, engine("d", "decode", num_streams=streams)))
        for streams in range(200)
    ]
    gains = {
        streams: (each.other.total - each.chosen.total, each.margin)
        for streams, each in near
        if each.chosen.is_local
    }
    streams, (gain, margin) = min(gains.items(), key=lambda item: item[1][0])
    assert gain < 2 * margin
    busy = engine("d", "decode", num_streams=streams)
    kept = choose(2000, prefill, busy, was_split=True)
    assert not kept.chosen.is_local
    assert kept.reason == "session"
    assert kept.margin >= MARGIN
    assert choose(2000, prefill, busy, was_split=False).chosen.is_local


def test_a_session_counts_for_a_while_and_the_longest_unused_one_is_forgotten():
    sessions = Sessions()
    sessions.note("a", is_split=True, now_s=0.0)
    sessions.note("", is_split=True, now_s=0.0)
    assert len(sessions) == 1
    assert sessions.was_split("a", DWELL_S) is True
    assert sessions.was_split("a", DWELL_S + 0.1) is None
    assert sessions.was_split("b", 0.0) is None
    for number in range(MAX_SESSIONS):
        sessions.note(str(number), is_split=False, now_s=1.0)
    assert sessions.was_split("a", 1.0) is None
    assert len(sessions) == MAX_SESSIONS


def test_cold_prompts_spread_over_idle_engines_and_another_engine_moves_few_of_them():
    urls = [f"http://d{i}" for i in range(8)]
    first = {n: min(urls, key=lambda url: preference(str(n), url)) for n in range(400)}
    assert min(map(list(first.values()).count, urls)) > 25
    fewer = {n: min(urls[1:], key=lambda url: preference(str(n), url)) for n in range(400)}
    assert all(fewer[n] == first[n] for n in first if first[n] != urls[0])


def test_the_last_decisions_are_kept_and_of_a_request_the_last_one():
    log, decision = DecisionLog(), choose(100, engine("a"), engine("b"))
    for number in range(NUM_KEPT + 10):
        log.add(f"r{number}", decision, 1.0)
    log.add("r500", decision, 2.0)
    newest = log.newest()
    assert len(newest) == NUM_KEPT
    assert newest[0].request_id == "r500"
    assert log.of("r5") is None
    assert [each.request_id for each in log.newest(after_seq=newest[2].seq)] == [
        "r500",
        f"r{NUM_KEPT + 9}",
    ]


def test_an_explanation_has_every_engine_and_says_whether_the_record_is_right():
    busy = engine("p", "prefill", num_prompts=2, prompt_tokens=20_000, prompt_pairs=2e8)
    log = DecisionLog()
    log.add("r1", choose(4000, busy, engine("d", "decode", hit=1024)), 5.0)
    told = "\n".join(explained(log.newest()[0], is_equal=True, now_s=8.0))
    assert told.startswith("request r1, 4000 prompt tokens, 3 s ago: one engine, because ")
    for part in (
        "  queue",
        "  nine in ten within",
        "  harm",
        "20000",
        "1024",
        "bit for bit",
        "is unknown",
    ):
        assert part in told
    assert told.count("objectives 1000 ms") == 1
    assert "DIFFERENT" in explained(log.newest()[0], is_equal=False, now_s=8.0)[-1]
    table = "\n".join(compared(log.newest(), "round_robin/never"))
    assert table.startswith("round_robin/never would have sent")


def test_columns_are_aligned_however_long_the_names_of_engines_are():
    names = [f"http://10.0.0.{100 + i}:8100" for i in range(2)]
    log = DecisionLog()
    log.add("r1", choose(4000, engine(names[0], "prefill"), engine(names[1], "decode")), 5.0)
    _, told, _, engines, *_ = "\n".join(explained(log.newest()[0], is_equal=True, now_s=8.0)).split(
        "\n\n"
    )
    _, figures, largest = "\n".join(compared(log.newest(), "round_robin/never")).split("\n\n")
    for table in (told, engines, figures, largest):
        assert len({len(line) for line in table.splitlines()}) == 1, table


async def test_the_command_line_explains_a_request_and_compares_policies(make_stack, capsys):
    prefill, decode = [ScriptedEngine("prefill")], [ScriptedEngine("decode") for _ in range(2)]
    stack = await make_stack(prefill, decode, split_policy="predicted")
    stack.proxy.pairing.model = learned()
    body = {"prompt": list(range(600)), "max_tokens": 9, "seed": 3, "session_id": "s"}
    slo = {"slo": {"ttft_ms": 250, "itl_ms": 20}}
    async with stack.post({**body, **slo}) as response:
        assert response.status == 200
        name = response.headers["X-Request-Id"]
    url = ["--url", str(stack.url)]
    assert await asyncio.to_thread(main, ["route", "explain", name, *url]) == 0
    told = capsys.readouterr().out
    assert f"request {name}, 600 prompt tokens" in told
    assert "objectives 250 ms, then 20 ms" in told
    assert "identical, bit for bit" in told
    assert await asyncio.to_thread(main, ["route", "compare", *url, "--policy", "ppd"]) == 3
    assert await asyncio.to_thread(main, ["route", "compare", *url]) == 0
    assert "prefix_sticky would have sent" in capsys.readouterr().out
    assert await asyncio.to_thread(main, ["route", "explain", "nobody", *url]) == 1
    metrics = await stack.metrics()
    assert metrics["pdserve_route_seconds_count"] == 1


async def test_a_model_has_objectives_of_its_own_which_a_request_may_change(make_stack):
    slo = ("tiny=ttft:300", "tiny=itl:25", "other=ttft:9")
    engines = [ScriptedEngine("prefill")], [ScriptedEngine("decode")]
    stack = await make_stack(*engines, split_policy="predicted", model_slo=slo, itl_slo_s=0.04)
    stack.proxy.pairing.model = learned()
    body = {"prompt": list(range(600)), "max_tokens": 4, "seed": 3}
    for more in ({}, {"model": "tiny"}, {"model": "tiny", "slo": {"itl_ms": 20}}):
        await stack.stream({**body, **more})
    asked = [each.decision.question for each in reversed(stack.proxy.pairing.log.newest())]
    assert [each.itl_slo_s for each in asked] == [0.04, 0.025, 0.02]
    assert [each.ttft_slo_s for each in asked] == [1.0, 0.3, 0.3]
    assert {each.max_output for each in asked} == {4}


@pytest.mark.parametrize(
    "word",
    ["tiny", "tiny=ttft", "=ttft:3", "m=itl:0", "m=ttft:1e-310", "m=e2el:5", "m=itl:x"],
)
def test_what_is_no_objective_of_a_model_is_refused_by_its_flag(word):
    with pytest.raises(ConfigError, match=r"--model-slo is .*MODEL=ttft:300"):
        ProxyConfig(model_slo=(word,))


@pytest.mark.parametrize("seconds", [-1.0, 1e-310])
@pytest.mark.parametrize("flag", ["ttft", "itl"])
def test_an_objective_below_a_microsecond_is_refused_by_its_flag(flag, seconds):
    with pytest.raises(ConfigError, match=f"--{flag}-slo is {seconds}: use 1e-06 or more"):
        ProxyConfig(**{f"{flag}_slo_s": seconds})


def test_an_objective_of_a_model_that_is_given_twice_is_refused():
    with pytest.raises(ConfigError, match=r"--model-slo is 'm=itl:5': the itl of m is given twice"):
        ProxyConfig(model_slo=("m=itl:25", "m=ttft:3", "m=itl:5"))


@pytest.mark.parametrize(
    "slo",
    [{"ttft_ms": 0}, {"ttft_ms": 1e-310}, {"itl_ms": "soon"}, 5, {"ttft_ms": 1e9}, {"ttft": 300}],
)
async def test_an_objective_that_is_none_is_refused_by_name(make_stack, slo):
    stack = await make_stack([ScriptedEngine("prefill")], [ScriptedEngine("decode")])
    async with stack.post({"prompt": "x", "slo": slo}) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == "slo"
