"""Engines in virtual time behind real routers: nothing is lost, and the order is known."""

from __future__ import annotations

import functools

import pytest

from benchmarks.routing import figures, settings_of
from benchmarks.routing_work import conversations, greedy
from pdserve.config.http import KVTransfer
from pdserve.config.policies import POLICIES, SPLIT_POLICIES
from pdserve.planner.fleet import Fleet
from pdserve.planner.work import (
    FleetCosts,
    FleetLayout,
    Work,
    least_computed,
    output_token,
    parse_layout,
)
from pdserve.scheduler.scheduler import Scheduler
from tests.scheduler.invariants import assert_nothing_held

pytestmark = pytest.mark.slow

TURNS = conversations(24, 8.0, num_turns=4, num_systems=2, seed=1)


def test_an_idle_hour_asks_no_engine_for_its_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(parse_layout("1P1D"), settings_of("round_robin"))
    asked, stats = [], Scheduler.stats
    monkeypatch.setattr(Scheduler, "stats", lambda self: asked.append(self) or stats(self))
    fleet.run([Work(0.0, [1] * 100, 10), Work(60.0, [2] * 100, 10)])
    assert len(asked) < 20  # there are four heartbeats a second
    for engine in fleet.engines.values():
        assert engine.load() == engine.scheduler.stats().in_brief()


def run(policy: str, layout: str = "2P2D", workload: list[Work] = TURNS):
    fleet = Fleet(parse_layout(layout), settings_of(policy))
    outcomes = fleet.run(workload)
    for proxy in fleet.proxies:
        for backend in proxy.backends:
            assert (backend.in_flight, backend.pending_tokens) == (0, 0), backend.url
    for engine in fleet.engines.values():
        assert_nothing_held(engine.scheduler)
    assert all(each.end_s is not None for each in outcomes)
    return figures(outcomes, least_computed(workload))


known = functools.cache(run)
"""A run is the same whenever it is."""


@pytest.mark.parametrize(
    "policy",
    [*sorted(POLICIES), "least_loaded/never", "prefix_sticky/ppd", "dynamo_cost+least_loaded/llmd"],
)
def test_every_request_ends_and_leaves_nothing_under_every_policy(policy):
    assert known(policy)["unfinished"] == 0


def test_policies_that_look_at_prefixes_compute_fewer_tokens():
    blind, sticky, aware = (
        known(policy)["computed_tokens"]
        for policy in ("least_loaded", "prefix_sticky", "cache_aware")
    )
    assert sticky < 0.8 * blind
    assert aware < 0.8 * blind


def test_split_policies_split_all_none_or_what_is_not_cached():
    shares = {name: known(f"prefix_sticky/{name}")["split"] for name in SPLIT_POLICIES}
    assert shares["always"] == 100.0
    assert shares["never"] == 0.0
    assert 0.0 < shares["isl_bounding"] < 100.0
    assert shares["isl_bounding"] <= shares["ppd"] <= shares["llmd"]


def test_engines_that_do_both_are_a_layout_too():
    assert run("prefix_sticky", "4B")["split"] == 0.0
    assert parse_layout("4P4D") == FleetLayout(4, 4, 0)
    assert parse_layout("8B") == FleetLayout(0, 0, 8)


@pytest.mark.parametrize(("kv_mode", "num_waited_for"), [("pull", 8000), ("auto", 8000 % 2048)])
def test_a_push_is_waited_for_behind_the_last_chunk_alone(kv_mode, num_waited_for):
    costs, layout = FleetCosts(), FleetLayout(1, 1, step_tokens=2048)
    fleet = Fleet(layout, settings_of("least_loaded") | {"kv_mode": KVTransfer(kv_mode)}, costs)
    (outcome,) = fleet.run([Work(0.0, range(8000), 2)])
    waited_s = outcome.token_s[1] - outcome.token_s[0] - costs.of_prompt(8001, 8000)
    assert waited_s == pytest.approx(costs.handover + costs.of_wire(num_waited_for))


def test_a_prompt_that_is_pushed_is_computed_once_its_blocks_are_there():
    workload = [Work(0.0, range(8000), 200), Work(0.0, range(9000, 17_000), 2)]
    for kv_tokens, has_room in ((700_000, True), (9_000, False)):
        layout = FleetLayout(1, 1, kv_tokens=kv_tokens)
        first, second = Fleet(layout, settings_of("least_loaded")).run(workload)
        assert first.end_s is not None
        assert second.ttft_s is not None
        assert (second.ttft_s < first.end_s) == has_room


def test_the_same_run_is_the_same_again():
    assert run("prefix_sticky") == known("prefix_sticky")


def test_a_turn_repeats_what_was_answered_before_it():
    numbers = {id(work): number for number, work in enumerate(TURNS)}
    num_found = 0
    for work in TURNS:
        for later in TURNS:
            start = len(work.prompt)
            if later is work or list(later.prompt[:start]) != list(work.prompt):
                continue
            num_found += 1
            answer = later.prompt[start : start + work.num_output]
            seed = numbers[id(work)]
            assert list(answer) == [output_token(seed, start + i) for i in range(len(answer))]
    assert num_found >= len(TURNS) // 2


@pytest.mark.matrix
def test_first_tokens_come_nearly_as_soon_beside_a_tenant_that_sends_ten_times_as_much():
    both = greedy(350, 2.4, times=10.0, seed=8)
    late_s = []
    for workload in (both, [each for each in both if each.tenant == "modest"]):
        fleet = Fleet(parse_layout("2P2D"), settings_of("prefix_sticky/predicted"))
        late_s.append(
            sorted(
                outcome.ttft_s
                for outcome in fleet.run(workload)
                if outcome.tenant == "modest" and outcome.ttft_s is not None
            )[-3]
        )
    assert late_s[0] < 1.3 * late_s[1]
