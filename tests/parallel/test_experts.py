"""Placements: every expert is somewhere, ranks hold equally many, copies never share a rank."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import ConfigError, InternalError
from pdserve.parallel.experts import ExpertPlacement, place


@st.composite
def arguments(draw: st.DrawFn) -> tuple[int, int, str, int]:
    num_ranks = draw(st.integers(1, 9))
    num_experts = draw(st.integers(1, 40))
    most = num_experts * (num_ranks - 1)
    least = max(0, num_ranks - num_experts)
    num_redundant = draw(st.one_of(st.just(least), st.integers(least, most), st.just(most)))
    strategy = draw(st.sampled_from(["linear", "round_robin"]))
    return num_experts, num_ranks, strategy, num_redundant


def _place(of: tuple[int, int, str, int]) -> ExpertPlacement:
    num_experts, num_ranks, strategy, num_redundant = of
    return place(num_experts, num_ranks, strategy=strategy, num_redundant=num_redundant)


@given(arguments())
def test_every_expert_has_a_copy_and_no_rank_has_two(of: tuple[int, int, str, int]) -> None:
    placement = _place(of)
    assert {expert for held in placement.ranks for expert in held} == set(range(of[0]))
    assert all(len(set(held)) == len(held) for held in placement.ranks)


@given(arguments())
def test_ranks_hold_equally_many_copies_but_for_one(of: tuple[int, int, str, int]) -> None:
    sizes = [len(held) for held in _place(of).ranks]
    assert sum(sizes) == of[0] + of[3]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(arguments())
def test_experts_have_equally_many_copies_but_for_one(of: tuple[int, int, str, int]) -> None:
    counts = _place(of).copies.counts
    assert counts.max() - counts.min() <= 1


@given(arguments())
def test_lookups_name_exactly_the_copies_that_there_are(of: tuple[int, int, str, int]) -> None:
    placement = _place(of)
    counts, ranks, locals_ = placement.copies
    found = set()
    for expert in range(of[0]):
        at = list(zip(ranks[expert].tolist(), locals_[expert].tolist(), strict=True))
        assert all(placement.ranks[rank][local] == expert for rank, local in at)
        assert len(set(at)) == counts[expert]
        assert len(set(at[: counts[expert]])) == counts[expert]
        found |= set(at)
    assert len(found) == of[0] + of[3]


def test_linear_gives_runs_of_experts_and_the_remainder_to_the_first_ranks() -> None:
    assert place(7, 3).ranks == ((0, 1, 2), (3, 4), (5, 6))


def test_round_robin_deals_experts_out() -> None:
    assert place(7, 3, strategy="round_robin").ranks == ((0, 3, 6), (1, 4), (2, 5))


def test_redundant_copies_fill_the_emptiest_ranks_first() -> None:
    assert place(5, 3, num_redundant=2).ranks == ((0, 1, 2), (1, 3), (0, 4))


def test_more_copies_than_ranks_can_hold_are_refused_with_the_limit() -> None:
    with pytest.raises(ConfigError, match=r"num-redundant-experts is 5, .* at most 4 copies"):
        place(4, 2, num_redundant=5)


def test_a_rank_without_an_expert_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"num-redundant-experts 4"):
        place(4, 8)


def test_a_placement_that_lacks_an_expert_is_our_mistake() -> None:
    with pytest.raises(InternalError, match="lacks experts"):
        ExpertPlacement(((0,), (2,)))


def test_a_placement_with_an_expert_twice_on_a_rank_is_our_mistake() -> None:
    with pytest.raises(InternalError, match="holds an expert twice"):
        ExpertPlacement(((0, 0), (1, 2)))
