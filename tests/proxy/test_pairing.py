"""The joint decision: what is learned, what is counted, which pair is chosen and why."""

from __future__ import annotations

import math
import random
from contextlib import ExitStack

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from benchmarks.routing import figures, settings_of
from benchmarks.routing_work import conversations
from pdserve.config.http import ProxyConfig
from pdserve.observe.clock import ManualClock
from pdserve.planner.fleet import Fleet
from pdserve.planner.work import FleetCosts, least_computed, parse_layout
from pdserve.proxy.brain.decision import (
    BIAS,
    PairCosts,
    decide,
    repeated,
)
from pdserve.proxy.brain.ledger import RECENT_S, WorkLedger
from pdserve.proxy.brain.metrics import RouteMetrics
from pdserve.proxy.brain.model import ServiceModel
from pdserve.proxy.brain.pairing import Pairing
from pdserve.proxy.brain.question import REASONS, PairCandidate, RouteQuestion, default_ttft_slo_s
from pdserve.proxy.brain.work import EngineWork, prompt_work
from pdserve.proxy.story import Story
from pdserve.wire.hop import EngineStages
from tests.proxy.scripted import ScriptedEngine, text_of

COSTS = FleetCosts()


def learned(noise: float = 0.0, *, seed: int = 0, num: int = 300) -> ServiceModel:
    """A model that has seen engines of `COSTS`."""
    rng, model = random.Random(seed), ServiceModel()
    for _ in range(num):
        jitter = [1 + rng.uniform(-noise, noise) for _ in range(3)]
        total, streams = rng.randint(50, 20_000), rng.randint(1, 60)
        cached = rng.randint(0, total // 2)
        model.learn_prompts(prompt_work(total, cached), COSTS.of_prompt(total, cached) * jitter[0])
        kv = streams * rng.randint(100, 8000)
        model.learn_step(streams, kv, COSTS.of_step(streams, kv) * jitter[1])
        model.learn_wire(total, COSTS.of_wire(total) * jitter[2])
    return model


MODEL = learned()


def engine(url: str, role: str = "both", hit: int = 0, **work: float) -> PairCandidate:
    return PairCandidate(
        url,
        is_prefill=role != "decode",
        is_decode=role != "prefill",
        hit_tokens=hit,
        work=EngineWork(**work),
    )


def are_unlike(prefill: str, decode: str) -> bool:
    """Lets engines pair of which one has an odd number and the other an even one."""
    return (int(prefill[1]) + int(decode[1])) % 2 == 1


def choose(num_tokens: int, *engines: PairCandidate, may_pair=lambda p, d: True, **asked):
    times = MODEL.times()
    question = RouteQuestion(
        num_tokens=num_tokens,
        candidates=engines,
        times=times,
        ttft_slo_s=default_ttft_slo_s(times, num_tokens),
        itl_slo_s=0.03,
    )
    return decide(msgspec.structs.replace(question, **asked), may_pair)


@pytest.mark.parametrize(("noise", "tolerance"), [(0.0, 0.01), (0.2, 0.2)])
def test_what_engines_take_is_learned_whatever_the_noise(noise, tolerance):
    model = learned(noise)
    for total, cached in ((500, 0), (4000, 2000), (16_000, 0)):
        expected = COSTS.of_prompt(total, cached)
        assert model.times().prompt_s(total, cached) == pytest.approx(expected, rel=tolerance)
    assert model.times().step_s(20, 60_000) == pytest.approx(0.0118, rel=tolerance)
    assert model.times().wire_s(4000) == pytest.approx(0.033, rel=tolerance)
    assert model.prefill.error == pytest.approx(noise / 2, abs=0.06)


def test_half_of_first_tokens_come_later_than_predicted_and_nine_in_ten_within_the_band():
    rng, model = random.Random(1), learned()
    is_late, is_within = [], []
    for _ in range(1500):
        times = model.times()
        predicted_s = times.prompt_s(1000, 0)
        seconds = COSTS.of_prompt(1000, 0) * 1.4 * math.exp(rng.gauss(0.0, 0.2))
        model.learn_first(predicted_s, seconds, times)
        is_late.append(seconds > predicted_s)
        is_within.append(abs(seconds - predicted_s) <= times.first_band * predicted_s)
    assert sum(is_late[500:]) == pytest.approx(500, abs=60)
    assert sum(is_within[500:]) == pytest.approx(900, abs=25)
    assert model.first.factor == pytest.approx(1.4, rel=0.05)


@given(st.data())
def test_whatever_becomes_of_legs_the_ledger_is_empty_at_their_end(data):
    ledger, open_legs = WorkLedger(lambda: 0.0), []
    for _ in range(data.draw(st.integers(1, 20))):
        if not open_legs or data.draw(st.booleans()):
            kind = data.draw(st.sampled_from(["prefill", "decode", "local", "receive"]))
            tokens = data.draw(st.integers(0, 999))
            held = ledger.hold("e", kind, tokens, data.draw(st.integers(0, 1999)))
            open_legs.append((held, held.__enter__()))
        else:
            held, entry = open_legs[data.draw(st.integers(0, len(open_legs) - 1))]
            for _ in range(data.draw(st.integers(0, 2))):
                entry.computed()
            if data.draw(st.booleans()):
                held.__exit__(None, None, None)
                open_legs.remove((held, entry))
        work = ledger.of("e")
        assert min(work.num_prompts, work.prompt_tokens, work.num_streams, work.kv_tokens) >= 0
        assert min(work.num_coming, work.coming_tokens) >= 0
    for held, _ in open_legs:
        held.__exit__(None, None, None)
    assert msgspec.structs.replace(ledger.of("e"), prompt_pairs=0.0) == EngineWork()
    assert ledger.of("e").prompt_pairs == pytest.approx(0.0, abs=1e-3)


works = st.builds(
    EngineWork,
    num_prompts=st.integers(0, 5),
    prompt_tokens=st.integers(0, 50_000),
    num_streams=st.integers(0, 60),
    kv_tokens=st.integers(0, 300_000),
)
fleets = st.lists(
    st.builds(
        lambda *row: row,
        st.sampled_from(["prefill", "decode", "both"]),
        st.sampled_from([0, 256, 2048]),
        works,
        st.sampled_from([None, None, 0, 8192]),
    ),
    min_size=1,
    max_size=6,
).map(
    lambda rows: [
        msgspec.structs.replace(engine(f"e{i}", role, hit), work=work, room_tokens=room)
        for i, (role, hit, work, room) in enumerate(rows)
    ]
)


@given(fleets, st.integers(1, 30_000))
def test_a_decision_is_of_engines_that_may_its_terms_add_up_and_order_means_nothing(fleet, num):
    decision = choose(num, *fleet, may_pair=are_unlike)
    assert decision is not None
    chosen = decision.chosen
    assert chosen.is_local or are_unlike(chosen.prefill, chosen.decode)
    assert chosen.total == pytest.approx(sum(chosen.terms.values()))
    assert decision.reason in REASONS
    assert sum(chosen.ttft.values()) == pytest.approx(chosen.ttft_s)
    assert f"at {chosen.total:.2f}" in decision.in_words(0.05)
    again = choose(num, *reversed(fleet), may_pair=are_unlike)
    assert again.chosen.total == pytest.approx(chosen.total)


@given(fleets, st.integers(1, 30_000), st.integers(0, 5), works)
def test_an_engine_with_more_to_do_is_not_more_attractive(fleet, num, which, more):
    before = choose(num, *fleet).chosen
    busy = fleet[which % len(fleet)]
    if busy.url in (before.prefill, before.decode):
        return
    sums = {
        name: getattr(busy.work, name) + getattr(more, name)
        for name in ("num_prompts", "prompt_tokens", "num_streams", "kv_tokens")
    }
    work = msgspec.structs.replace(busy.work, **sums)
    busier = msgspec.structs.replace(busy, work=work)
    after = choose(num, *(busier if each is busy else each for each in fleet)).chosen
    assert busy.url not in (after.prefill, after.decode)


@given(fleets, st.integers(1, 30_000), st.sampled_from([256, 2048]))
def test_an_engine_that_has_more_of_the_prompt_is_not_less_attractive(fleet, num, more):
    fleet = [msgspec.structs.replace(each, hit_tokens=min(num, each.hit_tokens)) for each in fleet]
    before = choose(num, *fleet).chosen
    for url in {before.prefill, before.decode}:
        warmer = [
            msgspec.structs.replace(each, hit_tokens=min(num, each.hit_tokens + more))
            if each.url == url
            else each
            for each in fleet
        ]
        after = choose(num, *warmer).chosen
        assert url in (after.prefill, after.decode)


@given(fleets, st.integers(1, 30_000))
def test_the_reason_names_the_term_that_made_the_difference(fleet, num):
    decision = choose(num, *fleet)
    chosen, other = decision.chosen, decision.other
    if other is None:
        assert decision.reason in ("no_pair", "kv_room")
        return
    gains = {name: other.terms[name] - chosen.terms[name] for name in chosen.terms}
    most = max(gains, key=gains.get)
    named = {
        "shorter_queue": "ttft",
        "warm_prefill": "ttft",
        "prefill_busy": "ttft",
        "wire_slow": "wire",
        "home_role": "bias",
    }
    if decision.reason in named:
        assert most == named[decision.reason]


def test_of_engines_that_cost_the_same_the_first_is_taken():
    idle = [engine(f"e{i}") for i in range(4)]
    for first in range(4):
        turned = idle[first:] + idle[:first]
        assert choose(100, *turned).chosen.decode == f"e{first}"


def test_a_load_that_sways_within_the_margin_moves_a_session_once_at_most():
    prefill = engine("p", "prefill")
    plain = {n: choose(2000, prefill, engine("d", "decode", num_streams=n)) for n in range(200)}
    edge = next(n for n in plain if plain[n].chosen.is_local != plain[n + 1].chosen.is_local)
    was_split, changes = None, 0
    for turn in range(40):
        busy = engine("d", "decode", num_streams=edge + turn % 2)
        is_split = not choose(2000, prefill, busy, was_split=was_split).chosen.is_local
        changes += was_split is not None and is_split is not was_split
        was_split = is_split
    assert changes <= 1


def test_a_pair_of_roles_splits_a_long_prompt_and_not_a_cached_one_that_would_wait():
    prefill, streams = engine("p", "prefill"), {"num_streams": 30, "kv_tokens": 60_000}
    long = choose(12_000, prefill, engine("d", "decode", **streams))
    assert (long.chosen.prefill, long.chosen.decode) == ("p", "d")
    busy = engine("p", "prefill", num_prompts=2, prompt_tokens=20_000, prompt_pairs=2e8)
    cached = choose(4000, busy, engine("d", "decode", hit=3840, **streams))
    assert cached.chosen.is_local
    assert (cached.chosen.decode, cached.reason) == ("d", "mostly_cached")


def test_a_prefill_engine_that_is_behind_is_passed_by():
    behind = {"num_prompts": 20, "prompt_tokens": 200_000, "prompt_pairs": 1e9}
    decision = choose(4000, engine("p", "prefill", **behind), engine("d", "decode"))
    assert decision.chosen.is_local
    assert decision.chosen.terms["bias"] == BIAS
    assert decision.chosen.decode == "d"
    assert decision.reason == "prefill_busy"


def test_streams_that_prompts_hold_up_already_suffer_more_from_another_one():
    streams = {"num_streams": 30, "kv_tokens": 60_000}
    behind = {"num_prompts": 10, "prompt_tokens": 20_000}
    free, busy = engine("d0", "decode", **streams), engine("d1", "decode", **streams, **behind)
    costs = PairCosts(choose(2000, free, busy, ttft_slo_s=1e9, itl_slo_s=0.02).question)
    assert costs.of_prefill(busy) > 4 * costs.of_prefill(free)


def test_an_engine_that_is_busy_with_prompts_gives_tokens_more_slowly_even_between_two():
    streams = {"num_streams": 10, "kv_tokens": 20_000}
    busy, quiet = engine("d0", "decode", **streams), engine("d1", "decode", **streams)
    busy = msgspec.structs.replace(busy, busy_s=RECENT_S / 2)
    decision = choose(2000, engine("p", "prefill"), busy, quiet)
    assert decision.chosen.decode == "d1"
    costs = PairCosts(decision.question)
    p, both = engine("p", "prefill"), (busy, quiet)
    slow, fast = (costs.pair(p, each).itl_s for each in both)
    assert slow == pytest.approx(2 * fast)


def test_a_stream_to_come_slows_no_prompt_and_counts_where_a_stream_would_go():
    p, idle = engine("p", "prefill"), engine("idle", "decode")
    busy = engine("busy", "decode", num_streams=40, kv_tokens=200_000)
    soon = engine("soon", "decode", num_coming=40, coming_tokens=200_000)
    costs = PairCosts(choose(2000, p, idle).question)
    assert costs.ttft(soon) == costs.ttft(idle) != costs.ttft(busy)
    assert costs.pair(p, soon).itl_s == costs.pair(p, busy).itl_s > costs.pair(p, idle).itl_s


def test_a_leg_learns_a_step_beside_the_streams_that_were_there_when_its_own_began():
    ledger = WorkLedger(lambda: 0.0)
    with ledger.hold("d", "receive", 1000, 0) as ours:
        ledger.heard("d", num_prompts=0, num_streams=1)  # ours, as the engine counts
        assert ledger.of_others("d").num_requests == 0
        with ledger.hold("d", "decode", 500, 0):
            ours.computed()
        assert (ours.streams_before, ours.kv_before) == (1, 500)
        assert (ledger.at("d").num_streams, ledger.at("d").num_coming) == (1, 0)


def test_a_prompt_waits_for_the_rest_of_a_step_that_computes_several():
    clock, times = ManualClock(0.0), MODEL.times()
    ledger = WorkLedger(clock.monotonic_s)
    with ExitStack() as legs:
        first, *_ = [legs.enter_context(ledger.hold("e", "local", 500, 0)) for _ in range(4)]
        first.computed()  # the others are in the next step
        clock.advance(0.05)
        left_s = times.computing_s(ledger.of("e").prompts) - 0.05
        assert times.backlog_s(ledger.at("e"), ledger.begun_s("e")) == pytest.approx(left_s)


def test_a_prompt_alone_waits_for_a_step_of_streams_that_has_begun():
    streams = {"num_streams": 20, "kv_tokens": 40_000}
    step_s = MODEL.times().step_s(**streams)
    costs = PairCosts(choose(1000, engine("p", "prefill")).question)
    busy = engine("d", "decode", **streams)
    assert costs.ttft(busy)["beside"] == pytest.approx(1.5 * step_s)
    behind = engine("d", "decode", num_prompts=1, prompt_tokens=1000, **streams)
    assert costs.ttft(behind)["beside"] == pytest.approx(step_s)


def test_a_prompt_may_be_later_than_predicted_before_that_counts_as_late():
    idle, times = engine("p", "prefill"), msgspec.structs.replace(MODEL.times(), prefill_error=0.3)
    sure, unsure = (choose(20_000, idle, times=each) for each in (MODEL.times(), times))
    assert unsure.chosen.ttft_s == sure.chosen.ttft_s
    assert unsure.chosen.terms["ttft"] > sure.chosen.terms["ttft"]


def test_what_engines_have_behind_whole_grains_is_learned():
    model = ServiceModel()
    for num_known, num_cached in [(512, 600), (0, 64)] * 100:
        model.learn_hit(num_known, num_cached)
    assert model.hit(1024, 4000) == pytest.approx(1024 + 88, abs=1)
    assert (model.hit(1024, 1050), model.hit(0, 4000)) == (1050, 0)


def pairing_by(clock: ManualClock) -> Pairing:
    config = ProxyConfig(split_policy="predicted")
    return Pairing(config, clock, RouteMetrics(CollectorRegistry()))


def test_what_has_no_output_teaches_nothing_of_the_length_of_answers():
    pairing = pairing_by(clock := ManualClock())
    before = pairing.model.times()
    pairing.learn(Story("a", "/v1/embeddings", clock))
    assert pairing.model.times() == before


@pytest.mark.parametrize("num_choices", [1, 2])
def test_times_are_learned_of_requests_with_one_choice(num_choices):
    """Of several, an engine says how long the first took, and their chunks come side by side."""
    pairing = pairing_by(clock := ManualClock())
    story = Story("a", "/v1/completions", clock)
    with pairing.ledger.hold("d", "local", 600, 0) as entry:
        entry.computed()
    story.prompt_entry = story.stream_entry = entry
    for _ in range(9):
        story.token_gaps.add(0.01)
    story.prefill_stages = EngineStages(
        prompt_tokens=600, prefill_s=0.1, finish_reasons=("length",) * num_choices
    )
    pairing.learn(story)
    learned_of = pairing.model.prefill.num_samples, pairing.model.step.num_samples
    assert learned_of == ((1, 1) if num_choices == 1 else (0, 0))


def test_what_an_engine_was_busy_with_counts_less_and_less_others_prompts_included():
    clock = ManualClock(0.0)
    ledger = WorkLedger(clock.monotonic_s, seconds_of=lambda prompts: 0.5 * prompts.num)
    with ledger.hold("e", "local", 1000, 0) as ours:
        ours.computed()
    assert ledger.busy_s("e") == 0.5
    ledger.heard("e", num_prompts=2, num_streams=0)
    clock.advance(RECENT_S)
    assert ledger.busy_s("e") == pytest.approx(0.5 / math.e)
    ledger.heard("e", num_prompts=0, num_streams=0)
    assert ledger.busy_s("e") == pytest.approx(0.5 / math.e + 1.0)


def test_leaving_its_role_costs_an_engine_something_but_not_everything():
    idle = choose(100, engine("p", "prefill"), engine("d", "decode"))
    assert idle.chosen.decode != "p"
    assert idle.chosen.terms["bias"] in (0.0, BIAS)
    full = {"num_streams": 400, "kv_tokens": 3_000_000}
    assert choose(100, engine("p", "prefill"), engine("d", "decode", **full)).chosen.decode == "p"


def roomy(room_tokens: int | None, url: str, **work: float) -> PairCandidate:
    return msgspec.structs.replace(engine(url, "decode", **work), room_tokens=room_tokens)


def test_an_engine_without_room_for_the_kv_is_chosen_only_where_none_has_any():
    busy = {"num_streams": 20, "kv_tokens": 20_000}
    prefill = engine("p", "prefill")
    decision = choose(4000, prefill, roomy(4000, "full"), roomy(9000, "d", **busy))
    assert (decision.chosen.decode, decision.reason) == ("d", "kv_room")
    assert repeated(decision) == decision
    alike = choose(4000, prefill, roomy(9000, "full"), roomy(9000, "d", **busy))
    assert alike.chosen.decode == "full"
    both = choose(4000, roomy(0, "full"), roomy(0, "d", **busy))
    assert both.chosen.decode == "full"


def test_a_short_answer_has_room_where_an_answer_of_any_length_has_not():
    full, busy = roomy(4050, "full"), roomy(None, "d", num_streams=20, kv_tokens=20_000)
    assert choose(4000, full, busy).chosen.decode == "d"
    assert choose(4000, full, busy, max_output=40).chosen.decode == "full"


def test_a_wait_for_kv_weighs_more_before_a_short_answer_and_nothing_before_one_token():
    prefill, decode = engine("p", "prefill"), engine("d", "decode")
    costs = {
        limit: PairCosts(asked).pair(prefill, decode).terms["wire"]
        for limit in (None, 1, 8, 1000)
        for asked in [choose(4000, prefill, decode, max_output=limit).question]
    }
    assert costs[1] == 0 < costs[1000] == costs[None] < costs[8]


@pytest.mark.slow
def test_the_joint_decision_serves_conversations_in_the_comparison():
    workload = conversations(120, 12.0, num_turns=4, num_systems=2, seed=1)
    fleet = Fleet(parse_layout("2P2D"), settings_of("prefix_sticky/predicted"))
    found = figures(fleet.run(workload), least_computed(workload))
    assert found["unfinished"] == 0
    assert 0 < found["split"] <= 100
    assert found["goodput"] >= 99.0
    assert fleet.first.pairing.model.is_known
    left = fleet.first.pairing.ledger.of("http://d0")
    assert (left.num_prompts, left.prompt_tokens, left.num_streams, left.kv_tokens) == (0, 0, 0, 0)
    for each in fleet.first.pairing.log.newest():
        assert each.decision.reason in REASONS


async def test_answers_in_one_piece_teach_what_a_step_takes(make_stack):
    prefill, decode = [ScriptedEngine("prefill")], [ScriptedEngine("decode")]
    stack = await make_stack(prefill, decode, split_policy="predicted")
    async with stack.post({"prompt": list(range(600)), "max_tokens": 9, "seed": 3}) as response:
        assert response.status == 200
    assert stack.proxy.pairing.model.step.num_samples == 1


async def test_streams_teach_the_time_that_no_engine_takes(make_stack):
    prefill, decode = [ScriptedEngine("prefill")], [ScriptedEngine("decode")]
    stack = await make_stack(prefill, decode, split_policy="predicted")
    unknown_s = stack.proxy.pairing.model.times().hop_s
    for _ in range(20):
        await stack.stream({"prompt": list(range(600)), "max_tokens": 9, "seed": 3})
    assert stack.proxy.pairing.model.times().hop_s != unknown_s


async def test_what_was_decided_is_in_the_line_and_in_debug_decisions(make_stack, caplog):
    caplog.set_level("INFO", "pdserve.requests")
    prefill, decode = [ScriptedEngine("prefill")], [ScriptedEngine("decode") for _ in range(2)]
    stack = await make_stack(prefill, decode, split_policy="predicted")
    body = {"prompt": list(range(600)), "max_tokens": 4, "seed": 3}
    assert (await stack.get("/debug/decisions"))["is_known"] is False
    await stack.stream(body)
    assert prefill[0].calls, "nothing is known yet: it is split"
    pairing = stack.proxy.pairing
    pairing.model = learned()
    async with stack.post(body) as response:
        assert (await response.json())["choices"][0]["text"] == text_of(3, 4)
    shown = await stack.get("/debug/decisions")
    assert shown["is_known"] is True
    (record,) = shown["decisions"]
    chosen = record["decision"]["chosen"]
    assert sum(chosen["terms"].values()) == pytest.approx(chosen["total"])
    lines = [each.getMessage() for each in caplog.records if each.name == "pdserve.requests"]
    assert "| route " not in lines[0]
    assert f"because {record['decision']['reason']}" in lines[1]
    assert f"req {record['request_id']} " in lines[1]
