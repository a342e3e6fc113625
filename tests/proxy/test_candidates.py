"""What a choice looks at in a large fleet: few engines, the right ones among them."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.routing_scale import Fleet
from pdserve.config.schema import Role
from pdserve.proxy.backend import Health
from pdserve.proxy.brain.candidates import FEW
from pdserve.proxy.brain.index import PrefixIndex
from pdserve.proxy.brain.prompt import RoutePrompt
from pdserve.wire.events import DEVICE, GrainsStored

GRAINS = tuple(range(1, 41))
SIZE = 200


@pytest.fixture(scope="module")
def fleet() -> Fleet:
    return Fleet(SIZE)


def prompt(request_id: str = "r", session: str = "", grains: tuple[int, ...] = GRAINS):
    num_tokens = 256 * len(grains)
    return RoutePrompt(4 * num_tokens, num_tokens, grains, request_id=request_id, session=session)


def considered(fleet: Fleet, asked: RoutePrompt, **more) -> list:
    return list(fleet.router.considered(asked, more.get("layout"), more.get("failed", ())))


def test_of_few_engines_all_are_looked_at() -> None:
    assert len(considered(Fleet(FEW), prompt())) == FEW


def test_of_many_some_of_both_roles_are_and_others_in_turn(fleet):
    seen: Counter[str] = Counter()
    for number in range(SIZE):
        found = considered(fleet, prompt(f"{number}", grains=(number + 1000,)))
        assert 6 <= len(found) <= 16
        assert {each.role for each in found} == {Role.PREFILL, Role.DECODE}
        seen.update(each.url for each in found)
    assert len(seen) == SIZE
    assert max(seen.values()) < 0.2 * SIZE


def test_those_that_have_most_of_a_prompt_are_among_them_and_chosen_from():
    fleet = Fleet(SIZE)
    holders = list(fleet.holders.items())
    for _, holder in holders:
        holder.apply(GrainsStored(list(GRAINS[:4]), DEVICE))
    url, warm = holders[60]  # of a prefill engine
    warm.apply(GrainsStored(list(GRAINS), DEVICE))
    for number in range(20):
        asked = prompt(f"{number}")
        assert url in {each.url for each in considered(fleet, asked)}
        plan = fleet.router.plan(asked)
        assert url in (plan.decision.chosen.prefill, plan.decision.chosen.decode)


def test_a_request_goes_where_it_was_admitted_for_while_the_engines_are_ready():
    fleet, asked = Fleet(SIZE), prompt()
    before = fleet.router.plan(asked)
    for _ in range(3):
        assert fleet.router.plan(asked, decision=before.decision) == before
    before.prefill.health = Health.NOT_READY
    after = fleet.router.plan(asked, decision=before.decision)
    assert after.decision is not before.decision
    assert after.prefill.available


def test_a_session_finds_the_same_engines_again_wherever_it_asks(fleet):
    other = Fleet(SIZE)
    sets = [
        {each.url for each in considered(each_fleet, prompt(f"{n}", "session", (n + 5000,)))}
        for n, each_fleet in enumerate((fleet, other, fleet))
    ]
    assert len(set.intersection(*sets)) >= 4


def test_where_those_drawn_do_not_do_all_are_looked_at():
    fleet = Fleet(SIZE)
    for backend in fleet.backends:
        if backend.role is Role.DECODE and not backend.url.endswith("1:8000"):
            backend.health = Health.NOT_READY
    for number in range(50):
        found = considered(fleet, prompt(f"{number}", grains=(number + 1000,)))
        assert any(each.decodes() for each in found)
        assert all(each.available for each in found)
    failed = set(considered(fleet, prompt()))
    assert not failed & set(considered(fleet, prompt(), failed=failed))


@given(
    held=st.lists(st.integers(0, 6), min_size=1, max_size=12),
    at_most=st.integers(1, 14),
    turn=st.integers(0, 40),
)
def test_the_deepest_holders_are_found_without_the_others(held, at_most, turn):
    index, grains = PrefixIndex(), list(range(6))
    bits = [index.open(f"{number}") for number in range(len(held))]
    for bit, depth in zip(bits, held, strict=True):
        index.add(bit, grains[:depth])
    everything = index.depths(grains, 0.0)
    assert everything == {bit: n for bit, n in zip(bits, held, strict=True) if n}
    some = index.depths(grains, 0.0, at_most=at_most, turn=turn)
    assert some.items() <= everything.items()
    assert sorted(some.values()) == sorted(everything.values())[-at_most:]
    for bit, depth in zip(bits, held, strict=True):
        assert index.depth_of([bit], grains) == depth
