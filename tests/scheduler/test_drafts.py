"""Drafts in steps: the same tokens, whatever they are, and rows only where they pay."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.scheduler.drafts import (
    TRIAL_INTERVAL,
    DraftHistory,
    DraftRecord,
    DraftWish,
    RowBudget,
)
from pdserve.wire.request import FinishReason
from tests.scheduler.invariants import assert_nothing_held
from tests.scheduler.scripted import Engine, make_request
from tests.toy import sampling
from tests.toy_drafts import mixed, right, spoiling, wrong
from tests.toy_executor import expected_output

if TYPE_CHECKING:
    from tests.toy_drafts import ToyDrafter

COSTS = ((1, 1.0), (4, 1.05), (16, 1.14), (32, 1.39), (64, 2.0))


def engine(drafter: ToyDrafter | None, *, max_drafted: int = 5, **fields: int) -> Engine:
    found = Engine(max_drafted=max_drafted, **fields)
    found.executor.drafter = drafter
    return found


def served(engine: Engine, **requests: tuple[list[int], int, bool]) -> dict[str, list[int]]:
    """The tokens of requests: prompt, most tokens, whether EOS ends it; nothing is left behind."""
    tokens: dict[str, list[int]] = {name: [] for name in requests}
    for name, (prompt, max_tokens, ends) in requests.items():
        engine.scheduler.add(make_request(name, prompt, max_tokens, ignore_eos=not ends))
    outputs = engine.settle()
    for output in outputs:
        assert output.error is None, output.error
        tokens[str(output.request_id)] += output.new_token_ids
    assert_nothing_held(engine.scheduler)
    return tokens


@pytest.mark.parametrize("drafter", [right, wrong, mixed, spoiling])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"depth": 2},
        {"num_stages": 2, "depth": 2},
        {"num_stages": 3, "depth": 3, "num_blocks": 8},
        {"num_blocks": 7},
        {"max_num_batched_tokens": 4},
    ],
    ids=["", "two in flight", "stages", "stages, few blocks", "few blocks", "few tokens"],
)
def test_tokens_are_those_without_drafts(drafter: ToyDrafter, fields: dict[str, int]) -> None:
    depth = fields.pop("depth", 1)
    under_test = engine(drafter, **fields)
    under_test.depth = depth
    fields["depth"] = depth
    requests = {
        "long": ([1, 2, 3], 40, False),
        "full": ([2] * 9, 39, False),
        "ends": ([1, 5], 30, True),
        "one": ([4] * 20, 1, False),
        "two": ([3] * 7, 2, False),
        "late": ([2, 2, 2], 28, True),
    }
    expected = {
        name: expected_output(prompt, sampling(most, ignore_eos=not ends))
        for name, (prompt, most, ends) in requests.items()
    }
    assert served(under_test, **requests) == expected


def test_right_drafts_save_steps_and_wrong_ones_cost_none() -> None:
    steps = {}
    for drafter in (None, right, wrong):
        under_test = engine(drafter)
        served(under_test, r=([1, 2], 40, False))
        steps[drafter] = under_test.scheduler.stats().num_steps
    # The prompt's step gives one token, each other one six.
    assert steps[right] <= 2 + -(-39 // 6)
    assert steps[wrong] == steps[None]


def test_a_token_that_ends_a_request_in_its_draft_is_its_last() -> None:
    prompt = next(
        p
        for p in ([a, b] for a in range(6) for b in range(6))
        if 3 < len(expected_output(p, sampling(30))) < 20
    )
    wanted = expected_output(prompt, sampling(30))
    under_test = engine(right, max_drafted=30)
    under_test.scheduler.add(make_request("r", prompt, 30, ignore_eos=False))
    outputs = under_test.settle()
    assert [token for output in outputs for token in output.new_token_ids] == wanted
    assert [output.finish_reason for output in outputs] == [None, FinishReason.STOP]
    assert_nothing_held(under_test.scheduler)


def test_what_a_draft_brought_is_found_by_others_as_far_as_it_was_right() -> None:
    under_test = engine(mixed)
    prompt = [1, 2, 3]
    output = served(under_test, first=(prompt, 30, False))["first"]
    again = [*prompt, *output]
    wanted = expected_output(again, sampling(5, ignore_eos=True))
    # The toy looks at all KV that it reads.
    assert served(under_test, second=(again, 5, False))["second"] == wanted
    assert under_test.scheduler.stats().local_cache_hit_tokens == 32


def test_what_a_draft_may_have_spoiled_is_found_by_nobody_and_computed_without_one() -> None:
    under_test = engine(spoiling)
    prompt = [1] * 7  # the first output token fills a block
    under_test.scheduler.add(make_request("first", prompt, 30))
    for _ in range(2):
        under_test.step()
    under_test.scheduler.add(
        make_request("second", [*prompt, *expected_output(prompt, sampling(1))], 30)
    )
    outputs = under_test.settle()
    assert not any(output.error for output in outputs)


def test_outputs_tell_logprobs_of_every_token_and_how_drafts_did() -> None:
    under_test = engine(right)
    under_test.scheduler.add(make_request("r", [1], 13, logprobs=2))
    outputs = under_test.settle()
    assert [len(output.new_token_ids) for output in outputs] == [1, 6, 6]
    for output in outputs:
        assert [entry.token_id for entry in output.logprobs or []] == output.new_token_ids
    assert [(o.num_drafted, o.num_accepted) for o in outputs] == [(0, 0), (5, 5), (10, 10)]
    assert [output.stages is not None for output in outputs] == [True, True, True]
    stats = under_test.scheduler.stats()
    assert (stats.num_drafts, stats.num_draft_tokens) == (2, 10)
    assert stats.accepted_by_position == [2] * 5
    assert stats.num_step_tokens == 13


def test_drafts_take_no_block_that_another_request_may_need() -> None:
    # Two requests of 24 tokens each fill the pool to its last block.
    under_test = engine(right, num_blocks=6, max_model_len=24)
    served(under_test, one=([1] * 3, 21, False), other=([2] * 3, 21, False))
    assert under_test.scheduler.stats().num_preemptions == 0


def test_where_steps_are_planned_ahead_a_request_that_rarely_has_a_draft_seldom_gets_rows() -> None:
    granted = {}
    for num_stages in (1, 2):  # a stage has nothing to plan ahead: it waits for the token
        under_test = engine(
            lambda request, rows: [], num_blocks=64, max_model_len=400, num_stages=num_stages
        )
        under_test.scheduler.add(make_request("r", [1], 300))
        num = 0
        for _ in range(250):
            step = under_test.submit()
            num += step is not None and bool(step.num_draft_rows)
            under_test.collect()
        granted[num_stages] = num
    assert granted[2] > 240
    assert granted[1] < 40


class TestRowBudget:
    def test_alone_a_request_gets_rows_as_far_as_they_raise_its_speed(self) -> None:
        budget = RowBudget(COSTS)
        most = {
            acceptance: budget.share([DraftWish(acceptance, 1.0, 15)], num_rows=1, num_requests=1)[
                0
            ]
            for acceptance in (0.0, 0.01, 0.3, 0.7, 1.0)
        }
        assert most[0.0] == most[0.01] == 0
        assert 1 <= most[0.3] <= 4 < most[0.7] <= 12
        assert most[1.0] == 15

    def test_rows_that_cost_nothing_are_all_given(self) -> None:
        budget = RowBudget([(1, 1.0), (100, 1.0)])
        assert budget.share([DraftWish(0.1, 1.0, 3)], num_rows=1, num_requests=1) == [3]

    def test_one_that_drafts_well_slows_others_by_less_than_it_gains(self) -> None:
        budget = RowBudget(COSTS)
        (given,) = budget.share([DraftWish(0.9, 1.0, 15)], num_rows=16, num_requests=16)
        assert 1 <= given <= 5
        # Its step takes at most a tenth longer: 32 rows take 1.22 times the time of 16.
        assert given / 16 * 0.25 / 1.14 < 0.1

    def test_in_a_batch_rows_go_to_those_whose_drafts_are_right(self) -> None:
        wishes = [DraftWish(0.9, 1.0, 7), DraftWish(0.5, 1.0, 7), DraftWish(0.05, 1.0, 7)]
        best, middle, worst = RowBudget(COSTS).share(wishes, num_rows=16, num_requests=16)
        assert best > middle > worst == 0

    def test_rows_without_drafts_cost_nothing(self) -> None:
        rare = [DraftWish(0.9, 0.05, 3)] * 16
        often = [DraftWish(0.9, 1.0, 3)] * 16
        budget = RowBudget(((1, 1.0), (16, 1.1), (24, 1.3), (32, 3.0)))
        given = [
            sum(budget.share(wishes, num_rows=16, num_requests=16)) for wishes in (rare, often)
        ]
        assert given[0] > given[1]

    def test_drafts_that_take_time_to_make_are_as_long_as_that_pays(self) -> None:
        wish = [DraftWish(0.75, 1.0, 15)]
        alone = [
            RowBudget(COSTS, cost).share(wish, num_rows=1, num_requests=1)[0]
            for cost in (0.0, 0.05, 0.2, 1.0)
        ]
        assert alone[0] > alone[1] > alone[2] > alone[3] == 0
        # All drafts of a batch are made together.
        budget = RowBudget(((1, 1.0), (100, 1.0)), 0.2)
        assert budget.share(wish, num_rows=1, num_requests=1)[0] > 0
        assert sum(budget.share(wish * 16, num_rows=16, num_requests=16)) >= 16
        assert sum(budget.share(wish, num_rows=16, num_requests=16)) > 0
        assert (
            budget.share([DraftWish(0.1, 1.0, 15)] * 16, num_rows=16, num_requests=16) == [0] * 16
        )

    @given(
        st.lists(
            st.builds(DraftWish, st.floats(0, 1), st.floats(0, 1), st.integers(0, 20)), max_size=20
        ),
        st.lists(st.tuples(st.integers(1, 60), st.floats(0.001, 5)), max_size=6),
        st.integers(1, 40_000),
    )
    def test_nobody_gets_more_than_wanted_whatever_was_measured(
        self, wishes: list[DraftWish], points: list[tuple[int, float]], num_rows: int
    ) -> None:
        rising = sorted(dict(points).items())
        shares = RowBudget(rising).share(
            wishes, num_rows=num_rows, num_requests=max(1, len(wishes))
        )
        assert all(0 <= share <= wish.max_rows for share, wish in zip(shares, wishes, strict=True))
        assert len(shares) == len(wishes)

    @given(
        st.integers(0, 10),
        st.integers(1, 64),
        st.floats(0, 0.5),
        st.sampled_from([COSTS, ((1, 1.0), (64, 1.0)), ((1, 1.0), (2, 2.0))]),
    )
    def test_who_has_no_hope_alone_gets_no_row_in_any_step(
        self, num_failed: int, num_requests: int, cost: float, points: list[tuple[int, float]]
    ) -> None:
        budget, record = RowBudget(points, cost), DraftRecord()
        for _ in range(num_failed):
            record.note(5, 0)
        wish = DraftWish(record.acceptance, 1.0, 7)
        given = budget.share([wish], num_rows=num_requests, num_requests=num_requests)
        assert record.level > budget.hopeless or given == [0]


class TestDraftRecord:
    def test_drafts_that_fail_are_soon_tried_only_now_and_then(self) -> None:
        record, budget = DraftRecord(), RowBudget(COSTS)
        rows = []
        for step in range(1, 401):
            wish = DraftWish(record.acceptance, record.found, 7)
            (share,) = budget.share([wish], num_rows=1, num_requests=1)
            num = share
            if not share and step % record.trial_interval == 0:
                record.begin_trial()
                num = 1
            rows.append(num)
            if num:
                record.note(num, 0)
        assert rows[0] == 7
        assert [step for step, num in enumerate(rows[24:], 25) if num] == [32, 64, 128, 256]
        assert max(rows[24:]) == 1

    def test_a_draft_that_was_right_is_soon_followed_by_the_next_trial(self) -> None:
        record = DraftRecord()
        for _ in range(20):
            record.begin_trial()
            record.note(1, 0)
        assert record.trial_interval == 1024
        record.note(1, 1)
        assert record.trial_interval == TRIAL_INTERVAL

    def test_a_request_whose_drafts_are_right_again_gets_its_rows_back(self) -> None:
        record = DraftRecord()
        for _ in range(100):
            record.note(7, 0)
        assert record.acceptance < 0.01
        for _ in range(10):
            record.note(1, 1)
        assert record.acceptance > 0.6

    def test_a_step_without_a_draft_says_nothing_of_drafts(self) -> None:
        record = DraftRecord()
        before = record.acceptance
        for _ in range(20):
            record.note(0, 0)
        assert record.acceptance == before
        assert record.found < 0.1


class TestDraftHistory:
    def test_a_request_of_an_engine_whose_drafts_fail_begins_without_rows(self) -> None:
        history, budget = DraftHistory(), RowBudget(COSTS)
        begun = []
        for _ in range(20):
            record = history.begin(has_prediction=False)
            wish = DraftWish(record.acceptance, record.found, 7)
            begun += budget.share([wish], num_rows=1, num_requests=1)
            for _ in range(3):
                history.note(record, 1, 0)
        assert begun[0] == 7
        assert begun[-1] == 0

    def test_what_a_client_predicts_and_what_is_guessed_say_nothing_of_one_another(self) -> None:
        history = DraftHistory()
        for _ in range(100):
            history.note(history.begin(has_prediction=True), 7, 0)
        assert history.begin(has_prediction=False).acceptance == DraftRecord().acceptance
        for _ in range(100):
            history.note(history.begin(has_prediction=False), 7, 0)
        assert history.begin(has_prediction=False).acceptance < 0.1
        assert history.begin(has_prediction=True).acceptance == DraftRecord().acceptance
