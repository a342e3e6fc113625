"""Request lives with random faults; a short form of `python -m tests.sim`.

`make test` plays a few seeds, chosen so that they get to everything; `make matrix` plays many.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from typing import TYPE_CHECKING

import pytest

from pdserve.observe.clock import ManualClock
from pdserve.proxy.brain.question import REASONS
from tests.faulty import FaultKind
from tests.python import run_python
from tests.sim import virtual_time
from tests.sim.__main__ import Summary, simulate
from tests.sim.scenario import (
    draw,
    with_brain,
    with_drafts,
    with_grammars,
    with_moves,
    with_restarts,
    with_store,
    with_tools,
    without_trouble,
)
from tests.sim.seeds import FAILED_ONCE, FAILED_ONCE_WITH_STORE, LIKE_OTHERS
from tests.sim.world import World, run_seed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.sim.scenario import Scenario


def few_or(night: range, *few: int) -> pytest.MarkDecorator:
    """A few seeds that cost little and get to everything; at night, some hundred lives."""
    many = pytest.param(night, marks=pytest.mark.matrix, id="many")
    return pytest.mark.parametrize("seeds", [pytest.param(few, id="few"), many])


@pytest.mark.slow
@few_or(range(367, 376), 313, 316, 329, 445, 484)
def test_no_token_is_wrong_no_block_is_kept_and_every_request_ends_whatever_happens(
    seeds: Sequence[int],
) -> None:
    assert_it_got_to_what_it_is_for(same_of(seeds))


def assert_it_got_to_what_it_is_for(summary: Summary) -> None:
    reached = {name for name, number in summary.reached.items() if number}
    wanted = {
        "pull received",
        "push received",
        "lease read",
        "lease released",
        "lease expired",
        "lease aborted",
        "load failed: aborted",
        "load failed: digest",
        "load failed: lease_lost",
        "load failed: peer_lost",
        "load failed: timeout",
        "load failed: withdrawn",
        "deaths",
        "cuts",
    }
    for role, stage in itertools.product(
        ("prefill", "decode"), ("prefill", "transfer", "decode")
    ):  # before, during and after the transfer
        wanted.add(f"{role} died during {stage}")
    assert not wanted - reached
    assert summary.rungs["retry"]
    assert summary.rungs["recompute"]
    assert summary.rungs["report"]
    assert not {kind.value for kind in FaultKind} - set(summary.faults)
    assert summary.outcomes["left"]


def same_of(
    seeds: Sequence[int],
    change: Callable[[Scenario], Scenario] = lambda scenario: scenario,
    *,
    ok_share: float = 0.7,
) -> Summary:
    """Nothing of that is broken in changed lives, of which so many are answered."""
    summary = simulate(seeds, max_failing=1, change=change)
    assert not summary.failing
    assert summary.outcomes["ok"] > summary.lives * ok_share
    return summary


@pytest.mark.slow
@few_or(range(367, 372), 377, 391, 396)
def test_the_same_holds_with_a_store_behind_the_engines_that_is_late_and_loses_blocks(
    seeds: Sequence[int],
) -> None:
    summary = same_of(seeds, with_store)
    reached = {name for name, number in summary.reached.items() if number}
    assert reached >= {"store received", "store failed: digest", "push received", "pull received"}
    assert summary.reached["tokens from toystore"] > summary.lives
    assert summary.reached["tokens from memory"] > summary.lives


@pytest.mark.matrix
def test_the_same_holds_where_engines_draft_each_in_its_own_way() -> None:
    same_of(range(367, 374), with_drafts, ok_share=0.6)


@pytest.mark.slow
@few_or(range(367, 376), 373, 396)
def test_the_same_holds_where_outputs_are_bound_by_grammars_that_are_late(
    seeds: Sequence[int],
) -> None:
    summary = same_of(seeds, lambda scenario: with_grammars(with_drafts(scenario)))
    assert summary.reached["decode died during decode"]
    assert summary.reached["sat out"] > summary.lives / 4


@pytest.mark.slow
@few_or(range(367, 372), 355, 382)
def test_the_same_holds_where_chats_call_tools_and_engines_draft(seeds: Sequence[int]) -> None:
    summary = same_of(seeds, lambda scenario: with_tools(with_drafts(scenario)))
    assert summary.reached["calls"] > summary.lives / 10


@pytest.mark.slow
@few_or(range(367, 372), 387, 396, 400)
def test_the_same_holds_where_pairs_of_engines_are_chosen_by_predictions(
    seeds: Sequence[int],
) -> None:
    summary = same_of(seeds, with_brain)
    chosen = {name for name, number in summary.rungs.items() if number}
    assert chosen & {f"disagg_decisions (local, {reason})" for reason in REASONS}


@pytest.mark.slow
@few_or(range(367, 376), 401, 415)
def test_engines_that_are_drained_and_restarted_in_turn_cost_no_request(
    seeds: Sequence[int],
) -> None:
    summary = same_of(seeds, lambda scenario: without_trouble(with_restarts(scenario)))
    assert set(summary.outcomes) <= {"ok", "left"}
    assert summary.reached["drained"] >= 2 * summary.runs - 1
    assert summary.reached["drained: moved"]
    assert summary.reached["drained: finished"]


@pytest.mark.slow
@few_or(range(362, 367), 362)
def test_streams_that_move_with_their_kv_are_whole_wherever_an_engine_dies_meanwhile(
    seeds: Sequence[int],
) -> None:
    summary = same_of(seeds, with_moves, ok_share=0.0)
    assert summary.rungs["migrations (drain, moved)"]
    assert summary.rungs["migrations (drain, replayed)"]


@pytest.mark.slow
@few_or(range(367, 374), 358, 369)
def test_the_same_holds_where_engines_are_drained_amid_faults(seeds: Sequence[int]) -> None:
    assert same_of(seeds, with_restarts, ok_share=0.0).reached["drained: moved"]


def seeds_of(failed_once: dict[int, str]) -> pytest.MarkDecorator:
    marks = {seed: [pytest.mark.matrix] * (seed in LIKE_OTHERS) for seed in sorted(failed_once)}
    return pytest.mark.parametrize("seed", [pytest.param(s, marks=m) for s, m in marks.items()])


@pytest.mark.slow
@seeds_of(FAILED_ONCE)
def test_a_seed_that_failed_once_holds(seed: int) -> None:
    result = run_seed(seed)
    assert not result.violations
    assert not [outcome for outcome in result.outcomes if "deadline" in outcome]


@pytest.mark.slow
@seeds_of(FAILED_ONCE_WITH_STORE)
def test_a_seed_that_failed_once_with_a_store_holds(seed: int) -> None:
    assert not World(with_store(draw(seed))).run().violations


@pytest.mark.slow
def test_a_seed_says_all_there_is_to_know() -> None:
    first, second = run_seed(355), run_seed(355)
    assert first.outcomes == second.outcomes
    assert first.reached == second.reached
    assert first.faults == second.faults
    assert first.virtual_s == second.virtual_s
    assert first.digest == second.digest


@pytest.mark.slow
def test_a_seed_says_it_in_another_process_with_other_hashes() -> None:
    # In this one an engine dies with three legs open: their order of being lost decides much.
    seed = 880054
    say = f"from tests.sim.world import run_seed; print(run_seed({seed}).digest)"
    other = run_python("-c", say, env={**os.environ, "PYTHONHASHSEED": "12345"}, timeout_s=120.0)
    assert other.stdout.strip() == run_seed(seed).digest


def test_waiting_takes_no_time_and_happens_in_order() -> None:
    clock, order = ManualClock(0.0), []

    async def wait(seconds: float) -> None:
        await asyncio.sleep(seconds)
        order.append(seconds)

    async def main() -> None:
        await asyncio.gather(*(wait(seconds) for seconds in (3600.0, 1.0, 60.0)))

    virtual_time.run(clock, main())
    assert order == [1.0, 60.0, 3600.0]
    assert 3600.0 <= clock.monotonic_s() < 3601.0


def test_tasks_that_wait_for_one_another_are_noticed() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(virtual_time.StuckError):
        virtual_time.run(ManualClock(), main())
