"""What engines have learned of their own steps is what a proxy begins with."""

from __future__ import annotations

import random
from contextlib import ExitStack

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.routing import settings_of
from benchmarks.routing_work import greedy
from pdserve.observe.linear_fit import LinearFit
from pdserve.planner.fleet import Fleet
from pdserve.planner.work import FleetCosts, parse_layout
from pdserve.proxy.brain.model import ServiceModel
from pdserve.proxy.brain.work import prompt_work
from pdserve.wire.learned import FitSums, LearnedTimes
from tests.proxy.conftest import until
from tests.proxy.scripted import ScriptedEngine
from tests.proxy.test_pairing import COSTS, choose, engine
from tests.proxy.test_prefixes import SECRET, telling


def learned(costs: FleetCosts = COSTS) -> LearnedTimes:
    """What a core has learned whose steps take so long."""
    rng, prompts, steps = random.Random(0), LinearFit(3), LinearFit(3)
    for _ in range(100):
        total, streams = rng.randint(50, 8000), rng.randint(1, 60)
        work = prompt_work(total, 0)
        prompts.learn((1.0, float(work.tokens), work.pairs), costs.of_prompt(total))
        kv = streams * rng.randint(100, 8000)
        steps.learn((1.0, float(streams), float(kv)), costs.of_step(streams, kv))
    return LearnedTimes(prompts.sums, steps.sums)


WORD = learned()


async def test_a_proxy_that_starts_decides_its_first_request_by_what_engines_have_learned(
    make_stack,
):
    prefill, decode = ScriptedEngine("prefill"), ScriptedEngine("decode")
    with ExitStack() as stack:
        for each, life in ((prefill, "a0"), (decode, "a1")):
            stack.enter_context(telling(each, life)).learned = WORD
        proxy = await make_stack([prefill], [decode], secret=SECRET, split_policy="predicted")
        await until(lambda: proxy.proxy.pairing.model.num_reporting == 2)
        assert await proxy.stream({"prompt": list(range(600)), "max_tokens": 4, "seed": 3})
        shown = await proxy.get("/debug/decisions")
    assert (shown["is_known"], shown["num_reporting"], len(shown["decisions"])) == (True, 2, 1)
    times = shown["decisions"][0]["decision"]["question"]["times"]
    assert times["step"] == pytest.approx([7e-3, 60e-6, 6e-8], rel=0.02)
    assert shown["model"]["prefill"]["reported_share"] > 0.9


async def test_what_an_engine_has_learned_is_forgotten_when_it_leaves(make_stack):
    one = ScriptedEngine("decode")
    with telling(one) as publisher:
        publisher.learned = WORD
        proxy = await make_stack([], [one], secret=SECRET, split_policy="predicted")
        await until(lambda: proxy.proxy.pairing.model.is_known)
        one.incarnation, one.kv_events = "another", []
        await until(lambda: not proxy.proxy.pairing.model.is_known)


def test_the_streams_of_an_engine_are_spread_over_its_cores():
    model = ServiceModel()
    model.hear("e", [WORD, WORD])
    assert model.times().step_s(40, 80_000) == pytest.approx(COSTS.of_step(20, 40_000), rel=0.02)


def test_of_a_large_fleet_most_engines_count_once_all_have_spoken():
    model = ServiceModel()
    slow = learned(FleetCosts(decode=14e-3, decode_request=120e-6, decode_token=12e-8))
    for number in range(100):
        model.hear(f"http://{number}", [slow])
    for number in range(100):
        model.hear(f"http://{number}", [WORD])
    assert model.times().step_s(20, 40_000) == pytest.approx(COSTS.of_step(20, 40_000), rel=0.1)


numbers = st.floats() | st.sampled_from([0.0, 1e-300, 1.0, 1e9, 1e59])
sums = st.builds(
    FitSums,
    numbers,
    numbers,
    st.lists(numbers, min_size=3, max_size=4).map(tuple),
    st.lists(numbers, min_size=5, max_size=6).map(tuple),
)


@given(
    st.builds(LearnedTimes, sums, sums)
    | st.tuples(sums, st.sampled_from([0.0, float("nan"), float("inf"), -1.0, 1e30])).map(
        lambda pair: msgspec.structs.replace(
            WORD,
            prompts=msgspec.structs.replace(WORD.prompts, num=pair[1]),
            steps=msgspec.structs.replace(WORD.steps, products=(pair[1], *WORD.steps.products[1:])),
        )
    )
)
def test_whatever_an_engine_says_times_are_finite_and_a_pair_is_chosen(said):
    model = ServiceModel()
    model.hear("http://good", [WORD])
    model.hear("http://bad", [said, said])
    times = model.times()
    for each in (*times.prefill, *times.step, times.prefill_error, times.step_error):
        assert 0 <= each < float("inf")
    decision = choose(4000, engine("p", "prefill"), engine("d", "decode"), times=times)
    assert decision.chosen.decode in "pd"
    assert 0 <= decision.chosen.total < float("inf")


def test_what_cannot_be_is_left_out_and_the_rest_is_taken():
    model = ServiceModel()
    broken = msgspec.structs.replace(WORD.steps, times=(float("nan"),) * 3)
    model.hear("http://e", [msgspec.structs.replace(WORD, steps=broken)])
    assert (model.prefill.is_known, model.step.is_known) == (True, False)


def test_each_of_four_proxies_decides_before_it_has_served_enough_to_learn_by():
    fleet = Fleet(parse_layout("2P2D"), settings_of("prefix_sticky/predicted"), num_proxies=4)
    fleet.run(greedy(60, 2.0, times=10.0))
    for proxy in fleet.proxies:
        assert proxy.pairing.model.step.num_samples < 20
        assert len(proxy.pairing.log.newest()) >= 5
