"""The pure decisions, over every small case hypothesis can think of."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdserve.connectors.base import KVSource
from pdserve.scheduler.plan import (
    MAX_OVERTAKEN,
    Candidate,
    Rank,
    Room,
    next_line,
    plan_admission,
    plan_running,
)

BLOCK = 4


def room(budget: int, free: int, *, may_split: bool = True, max_of_one: int = 0) -> Room:
    """What a step may use of tokens and blocks."""
    return Room(
        token_budget=budget,
        num_free_blocks=free,
        block_size=BLOCK,
        may_split=may_split,
        max_of_one=max_of_one,
    )


@st.composite
def candidates(draw: st.DrawFn) -> list[Candidate]:
    """Running requests with as many blocks as their tokens need, in order of rank."""
    found = []
    for order in range(draw(st.integers(0, 6))):
        computed = draw(st.integers(0, 30))
        found.append(
            Candidate(
                draw(st.one_of(st.just(1), st.integers(0, 20))),
                computed,
                -(-computed // BLOCK),
                (draw(st.integers(0, 2)), 0.0, order),
                draw(st.booleans()),
            )
        )
    return found


@given(
    batch=candidates(),
    budget=st.integers(1, 24),
    free=st.integers(0, 8),
    may_split=st.booleans(),
    may_preempt=st.booleans(),
)
def test_a_plan_keeps_within_budget_and_blocks_and_preempts_the_lowest_first(
    batch: list[Candidate], budget: int, free: int, may_split: bool, may_preempt: bool
) -> None:
    plan = plan_running(
        batch,
        room(budget, free, may_split=may_split),
        freed_by=(lambda index: batch[index].num_blocks) if may_preempt else None,
    )
    assert sum(plan.num_tokens.values()) + plan.budget_left == budget
    freed = sum(batch[index].num_blocks for index in plan.preempted)
    assert sum(plan.num_new_blocks.values()) <= free + freed
    assert not set(plan.preempted) & set(plan.num_tokens)
    assert may_preempt or not plan.preempted
    idle = [i for i, c in enumerate(batch) if c.num_wanted and i not in plan.num_tokens]
    if may_split and plan.budget_left and not plan.is_short_of_blocks:
        assert set(idle) <= set(plan.preempted), "one sits out for no reason"
    for index, num_tokens in plan.num_tokens.items():
        request = batch[index]
        assert 0 < num_tokens <= request.num_wanted
        assert may_split or num_tokens == request.num_wanted
        blocks = request.num_blocks + plan.num_new_blocks[index]
        assert blocks * BLOCK >= request.num_computed + num_tokens
    ranks = [batch[index].rank for index in plan.preempted]
    assert ranks == sorted(ranks, reverse=True)
    kept = [c.rank for i, c in enumerate(batch) if i not in plan.preempted]
    assert not ranks or not kept or min(ranks) > max(kept), "a lower one was kept"


def test_a_prompt_leaves_a_token_to_each_stream_behind_it_and_goes_on_beside_any_number() -> None:
    wants = [40, 1, 9, 1]
    batch = [Candidate(num, 4, 2, (0, 0.0, order)) for order, num in enumerate(wants)]
    assert plan_running(batch, room(8, 100), freed_by=None).num_tokens == {0: 6, 1: 1, 3: 1}
    assert plan_running(batch, room(1, 100), freed_by=None).num_tokens == {0: 1}


@given(batch=candidates(), budget=st.integers(1, 24))
def test_with_blocks_to_spare_the_first_request_always_advances(
    batch: list[Candidate], budget: int
) -> None:
    plan = plan_running(
        batch,
        room(budget, 1000),
        freed_by=None,
    )
    hungry = [index for index, request in enumerate(batch) if request.num_wanted]
    assert not hungry or hungry[0] in plan.num_tokens


@given(
    batch=candidates(),
    budget=st.integers(1, 24),
    free=st.integers(0, 8),
    max_of_one=st.integers(1, 24),
)
def test_no_request_gets_more_of_a_step_than_one_may_have_and_what_is_left_goes_to_others(
    batch: list[Candidate], budget: int, free: int, max_of_one: int
) -> None:
    plan = plan_running(
        batch,
        room(budget, free, max_of_one=max_of_one),
        freed_by=None,
    )
    assert all(num_tokens <= max_of_one for num_tokens in plan.num_tokens.values())
    assert sum(plan.num_tokens.values()) + plan.budget_left == budget
    idle = {i for i, c in enumerate(batch) if c.num_wanted} - plan.num_tokens.keys()
    assert not idle or not plan.budget_left or plan.is_short_of_blocks


@given(
    batch=candidates(),
    max_decodes=st.integers(1, 4),
    free=st.integers(0, 8),
    may_preempt=st.booleans(),
)
def test_a_step_has_its_share_of_the_decoding_requests_and_no_more(
    batch: list[Candidate], max_decodes: int, free: int, may_preempt: bool
) -> None:
    plan = plan_running(
        batch,
        room(1000, free),
        freed_by=(lambda index: batch[index].num_blocks) if may_preempt else None,
        max_decodes=max_decodes,
    )
    decoding = [index for index in plan.num_tokens if batch[index].is_decode]
    assert len(decoding) <= max_decodes
    hungry = {i for i, c in enumerate(batch) if c.num_wanted} - set(plan.preempted)
    if not plan.is_short_of_blocks:
        wanted = [i for i in sorted(hungry) if batch[i].is_decode]
        if not plan.preempted:
            assert decoding == wanted[:max_decodes]
        assert {i for i in hungry if not batch[i].is_decode} <= set(plan.num_tokens)


def test_a_preempted_request_leaves_its_place_among_the_decoding_ones() -> None:
    late, early, other = (
        Candidate(1, 4, num, (0, rank), True) for num, rank in ((2, 9), (1, 1), (2, 2))
    )
    plan = plan_running(
        [late, early, other],
        room(10, 0),
        freed_by=lambda index: 2,
        max_decodes=2,
    )
    assert (plan.preempted, plan.num_tokens) == ([0], {1: 1, 2: 1})


@given(
    num_tokens=st.integers(1, 100),
    computed=st.integers(0, 99),
    budget=st.integers(1, 50),
    free=st.integers(0, 30),
    reserved=st.integers(0, 3),
    may_split=st.booleans(),
    max_of_one=st.integers(0, 50),
)
def test_a_request_is_admitted_only_if_all_of_it_fits(
    num_tokens: int,
    computed: int,
    budget: int,
    free: int,
    reserved: int,
    may_split: bool,
    max_of_one: int,
) -> None:
    max_of_one *= may_split
    computed = min(computed, num_tokens - 1) // BLOCK * BLOCK
    hit = computed // BLOCK
    admission = plan_admission(
        room(budget, free, may_split=may_split, max_of_one=max_of_one),
        num_tokens=num_tokens,
        num_computed=computed,
        num_hit_blocks=hit,
        num_hit_free=hit,
        num_reserved_blocks=reserved,
    )
    fits = -(-num_tokens // BLOCK) + reserved <= free
    if not fits:
        assert admission is None
    elif admission is None:
        assert not may_split
        assert num_tokens - computed > budget
    else:
        most = min(budget, max_of_one or budget)
        assert admission == min(most, num_tokens - computed)


RANKS = st.tuples(st.integers(0, 2), st.just(0.0), st.integers(0, 9))


@given(
    heads=st.dictionaries(st.sampled_from(KVSource), RANKS), num=st.integers(0, 2 * MAX_OVERTAKEN)
)
def test_only_a_handoff_goes_before_the_best_rank_and_only_before_a_push(
    heads: dict[KVSource, Rank], num: int
) -> None:
    line = next_line(heads, num_overtaken=num)
    if line is None:
        assert not heads
        return
    best = min(heads.values())
    if heads[line] == best:
        return
    assert line is KVSource.READY
    assert heads[KVSource.PLANNED] == best
    assert heads[line][0] == best[0], "a worse priority is never served first"
    assert num < MAX_OVERTAKEN
