"""Home roles of engines that do both: they follow the load, one at a time, and not back at once."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.routing import settings_of
from benchmarks.routing_work import Shape, turned
from pdserve.config.schema import Role
from pdserve.planner.fleet import Fleet
from pdserve.planner.work import parse_layout
from pdserve.proxy.brain.record import DecisionsShown
from pdserve.proxy.brain.roles import (
    DWELL_S,
    INTERVAL_S,
    NUM_INTERVALS,
    Demand,
    HomeBounds,
    HomeControl,
    load_of,
)
from tests.proxy.scripted import ScriptedEngine
from tests.proxy.test_pairing import MODEL

TIMES = MODEL.times()
FOUR = HomeBounds(num_prefill=0, num_decode=0, num_both=4)
PROMPTS = Demand(prompt_engines=2.5, tokens_per_s=2000.0, kv_tokens=2000.0)
TOKENS = Demand(prompt_engines=0.2, tokens_per_s=18_000.0, kv_tokens=500.0)
bounds = st.builds(
    HomeBounds,
    num_prefill=st.integers(0, 3),
    num_decode=st.integers(0, 3),
    num_both=st.integers(0, 6),
)
demands = st.builds(
    Demand,
    prompt_engines=st.floats(0, 20),
    tokens_per_s=st.floats(0, 1e6),
    kv_tokens=st.floats(0, 1e5),
)


class Driven:
    """A control that looks at one interval after the other.

    Attributes:
        made: Engines for prompts after each look.
    """

    def __init__(self, fleet: HomeBounds = FOUR) -> None:
        self.control = HomeControl(0.03)
        self.fleet = fleet
        self.now_s = 0.0
        self.nums: list[int] = []

    def look(self, demand: Demand, times: int = 1):
        for _ in range(times):
            self.now_s += INTERVAL_S
            found = self.control.look(demand, TIMES, self.fleet, now_s=self.now_s, at_s=self.now_s)
            self.nums.append(self.fleet.nearest(self.control.share))
        return found


def test_a_home_changes_when_the_third_interval_in_a_row_says_so():
    driven = Driven()
    looks = [driven.look(PROMPTS) for _ in range(NUM_INTERVALS)]
    assert [each.num_in_row for each in looks] == [1, 2, 3]
    assert [each.is_made for each in looks] == [False, False, True]
    assert driven.nums == [2, 2, 3]
    assert looks[-1].better.in_words().startswith("3P+1D: prefill 83% busy, itl 1")


def test_an_interval_that_disagrees_or_says_nothing_begins_the_count_anew():
    driven = Driven()
    driven.look(PROMPTS, 2)
    driven.look(TOKENS)
    driven.look(PROMPTS, 2)
    driven.control.interrupt()
    driven.look(PROMPTS, 2)
    assert set(driven.nums) == {2}
    driven.look(PROMPTS)
    assert driven.nums[-1] == 3


def test_a_change_is_not_taken_back_before_a_minute_and_three_intervals_say_so():
    driven = Driven()
    driven.look(PROMPTS, 3)
    made_s = driven.now_s
    while driven.nums[-1] == 3:
        driven.look(TOKENS)
    assert driven.now_s - made_s >= DWELL_S + (NUM_INTERVALS - 1) * INTERVAL_S


def test_each_role_keeps_one_engine_however_uneven_the_load_is():
    driven = Driven()
    driven.look(msgspec.structs.replace(TOKENS, prompt_engines=0.0), 40)
    assert driven.nums[-1] == 1
    driven.look(msgspec.structs.replace(PROMPTS, tokens_per_s=0.0, prompt_engines=40.0), 40)
    assert driven.nums[-1] == 3


def test_what_matters_to_nobody_changes_no_home():
    driven = Driven()
    idle = Demand(prompt_engines=0.05, tokens_per_s=20.0, kv_tokens=100.0)
    assert driven.look(idle, 20).better is None
    assert set(driven.nums) == {2}


@given(bounds, demands, st.floats(0, 1))
def test_whatever_is_there_each_role_has_one_or_nobody_has_a_home(fleet, demand, share):
    if not fleet.has_choice:
        assert fleet.num_both == 0 or fleet.num_prefill + fleet.num_decode == 0
        return
    num = fleet.nearest(share)
    load = load_of(demand, TIMES, fleet, num, 0.03)
    assert 0 <= num <= fleet.num_both
    assert min(load.num_prefill, load.num_decode) >= 1


@given(demands, st.integers(1, 2))
def test_fewer_engines_of_a_role_are_never_better_for_what_it_does(demand, num):
    fewer, more = (load_of(demand, TIMES, FOUR, each, 0.03) for each in (num, num + 1))
    assert fewer.prefill_share >= more.prefill_share
    assert fewer.itl_s <= more.itl_s


@pytest.mark.matrix
def test_homes_follow_a_load_that_turns_from_tokens_to_prompts():
    workload = turned(
        Shape(100, 800, per_s=9.0, seconds=36.0), Shape(2000, 20, per_s=15.0, seconds=80.0)
    )
    fleet = Fleet(parse_layout("3B"), settings_of("prefix_sticky/predicted"))
    outcomes = fleet.run(workload)
    assert fleet.first.homes is not None
    made = [each.better.num_prefill for each in fleet.first.homes.looks if each.is_made]
    assert made == [1, 2]
    assert [each.home.value for each in fleet.first.backends] == ["prefill", "prefill", "decode"]
    assert sum(each.is_rejected for each in outcomes) < 0.01 * len(outcomes)


async def test_engines_for_both_are_split_over_and_show_their_homes(make_stack):
    both = [ScriptedEngine("both"), ScriptedEngine("both")]
    stack = await make_stack(prefill=both, decode=both, split_policy="predicted")
    homes = {"prefill": 1, "decode": 1}
    assert [each.home for each in stack.proxy.backends].count(Role.PREFILL) == 1
    async with stack.post() as response:
        assert response.status == 200
    metrics = await stack.metrics()
    for role in homes:
        name = f'role="{role}"'
        assert sum(key.startswith("pdserve_engine_home{") and name in key for key in metrics) == 1
    assert metrics['pdserve_disagg_decisions_total{decision="disaggregated",reason="cold"}'] == 1
    shown = msgspec.convert(await stack.get("/debug/decisions"), type=DecisionsShown)
    assert sorted(shown.homes.engines.values()) == ["decode", "prefill"]


async def test_where_the_engine_for_prompts_is_drained_the_other_has_no_home(make_stack):
    both = [ScriptedEngine("both"), ScriptedEngine("both")]
    stack = await make_stack(prefill=both, decode=both, split_policy="predicted")
    backends, homes = list(stack.proxy.backends), stack.proxy.homes
    backends[0].is_draining = True
    homes.sample()
    assert {each.home for each in backends} == {Role.BOTH}
    backends[0].is_draining = False
    homes.sample()
    assert {each.home for each in backends} == {Role.PREFILL, Role.DECODE}


async def test_a_deployment_whose_roles_are_fixed_keeps_them(make_stack):
    stack = await make_stack(
        prefill=[ScriptedEngine("prefill")],
        decode=[ScriptedEngine("decode")],
        split_policy="predicted",
    )
    assert {each.home_role for each in stack.proxy.backends} == {None}
    await asyncio.sleep(0)
