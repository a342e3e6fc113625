"""Moves in rounds: bounded, in order, and every state in between can serve."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdserve.parallel.balance import rebalance
from pdserve.parallel.experts import ExpertPlacement, place
from pdserve.parallel.moves import ExpertSlot, after, rounds

Case = tuple[ExpertPlacement, ExpertPlacement]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Two placements of the same experts on the same ranks, near or far."""
    num_ranks = draw(st.integers(2, 6))
    num_experts = draw(st.integers(num_ranks, 20))
    num_redundant = draw(st.integers(0, min(8, num_experts * (num_ranks - 1))))
    found = []
    for _ in range(2):
        tokens = draw(st.sampled_from([2, 1000]))
        load = draw(st.lists(st.integers(0, tokens), min_size=num_experts, max_size=num_experts))
        strategy = draw(st.sampled_from(["linear", "round_robin"]))
        placement = place(num_experts, num_ranks, strategy=strategy, num_redundant=num_redundant)
        found.append(rebalance(placement, load))
    return found[0], found[1]


@given(cases())
def test_rounds_lead_from_one_placement_to_the_other(case: Case) -> None:
    placement, wanted = case
    for moved in rounds(placement, wanted):
        placement = after(placement, moved)
    assert list(map(set, placement.ranks)) == list(map(set, wanted.ranks))


@given(cases())
def test_a_rank_sends_one_expert_and_receives_one_at_most(case: Case) -> None:
    for moved in rounds(*case):
        assert moved
        assert len({source.rank for source, _ in moved}) == len(moved)
        assert len({target.rank for _, target in moved}) == len(moved)
        assert all(source.rank != target.rank for source, target in moved)


@given(cases())
def test_no_more_is_moved_than_ranks_lack(case: Case) -> None:
    current, wanted = case
    num_lacking = sum(
        len(set(there) - set(here)) for here, there in zip(current.ranks, wanted.ranks, strict=True)
    )
    assert sum(map(len, rounds(current, wanted))) == num_lacking


@given(cases())
def test_an_expert_that_stays_on_a_rank_stays_in_its_slot(case: Case) -> None:
    current, wanted = case
    targets = {target for moved in rounds(current, wanted) for _, target in moved}
    for rank, (here, there) in enumerate(zip(current.ranks, wanted.ranks, strict=True)):
        staying = {ExpertSlot(rank, local) for local, expert in enumerate(here) if expert in there}
        assert not staying & targets


def test_two_ranks_swap_in_one_round() -> None:
    current, wanted = ExpertPlacement(((0, 1), (2, 3))), ExpertPlacement(((0, 3), (1, 2)))
    (moved,) = rounds(current, wanted)
    assert sorted(moved) == [
        (ExpertSlot(0, 1), ExpertSlot(1, 1)),
        (ExpertSlot(1, 1), ExpertSlot(0, 1)),
    ]


def test_a_circle_of_ranks_moves_in_one_round() -> None:
    current, wanted = ExpertPlacement(((0,), (1,), (2,))), ExpertPlacement(((2,), (0,), (1,)))
    assert len(rounds(current, wanted)) == 1


def test_a_copy_may_come_from_an_expert_that_leaves_in_the_same_round() -> None:
    # Rank 1 drops its copy of 0 and takes 1, which leaves rank 0 for 2, which leaves rank 2.
    current = ExpertPlacement(((1, 0), (0, 3), (2, 3)))
    wanted = ExpertPlacement(((2, 0), (1, 3), (0, 3)))
    assert len(rounds(current, wanted)) <= 2
