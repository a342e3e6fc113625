"""Thousands of request lives with random faults; a short form of `python -m tests.sim`."""

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
from tests.sim.seeds import FAILED_ONCE, FAILED_ONCE_WITH_STORE
from tests.sim.world import World, run_seed

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.sim.scenario import Scenario

# Seeds that get to everything in few lives.
FIRST_SEED, NUM_LIVES = 367, 200
# Of those, most streams that are to move are over by then; here two do move.
FIRST_SEED_OF_MOVES = 362


@pytest.mark.slow
def test_no_token_is_wrong_no_block_is_kept_and_every_request_ends_whatever_happens() -> None:
    summary = simulate(NUM_LIVES, seed=FIRST_SEED, max_failing=1)
    assert not summary.failing
    assert summary.lives >= NUM_LIVES
    assert summary.outcomes["ok"] > NUM_LIVES * 0.7
    assert_it_got_to_what_it_is_for(summary)


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
    num_lives: int, change: Callable[[Scenario], Scenario], *, ok_share: float = 0.7
) -> Summary:
    """The same of changed lives, of which so many are answered."""
    summary = simulate(num_lives, seed=FIRST_SEED, max_failing=1, change=change)
    assert not summary.failing
    assert summary.outcomes["ok"] > num_lives * ok_share
    return summary


@pytest.mark.slow
def test_the_same_holds_with_a_store_behind_the_engines_that_is_late_and_loses_blocks() -> None:
    num_lives = 120
    summary = same_of(num_lives, with_store)
    reached = {name for name, number in summary.reached.items() if number}
    assert reached >= {"store received", "store failed: digest", "push received", "pull received"}
    assert summary.reached["tokens from toystore"] > num_lives
    assert summary.reached["tokens from memory"] > num_lives


@pytest.mark.matrix
def test_the_same_holds_where_engines_draft_each_in_its_own_way() -> None:
    same_of(150, with_drafts, ok_share=0.6)


@pytest.mark.slow
def test_the_same_holds_where_outputs_are_bound_by_grammars_that_are_late() -> None:
    num_lives = 200
    summary = same_of(num_lives, lambda scenario: with_grammars(with_drafts(scenario)))
    assert summary.reached["decode died during decode"]
    assert summary.reached["sat out"] > num_lives / 4


@pytest.mark.slow
def test_the_same_holds_where_chats_call_tools_and_engines_draft() -> None:
    num_lives = 100
    summary = same_of(num_lives, lambda scenario: with_tools(with_drafts(scenario)))
    assert summary.reached["calls"] > num_lives / 10


@pytest.mark.slow
def test_the_same_holds_where_pairs_of_engines_are_chosen_by_predictions() -> None:
    summary = same_of(100, with_brain)
    chosen = {name for name, number in summary.rungs.items() if number}
    assert chosen & {f"disagg_decisions (local, {reason})" for reason in REASONS}


@pytest.mark.slow
def test_engines_that_are_drained_and_restarted_in_turn_cost_no_request() -> None:
    num_lives = 200
    summary = simulate(
        num_lives,
        seed=FIRST_SEED,
        max_failing=1,
        change=lambda scenario: without_trouble(with_restarts(scenario)),
    )
    assert not summary.failing
    assert set(summary.outcomes) <= {"ok", "left"}
    assert summary.reached["drained"] >= 15
    assert summary.reached["drained: moved"]
    assert summary.reached["drained: finished"]


@pytest.mark.slow
def test_streams_that_move_with_their_kv_are_whole_wherever_an_engine_dies_meanwhile() -> None:
    summary = simulate(110, seed=FIRST_SEED_OF_MOVES, max_failing=1, change=with_moves)
    assert not summary.failing
    assert summary.rungs["migrations (drain, moved)"]
    assert summary.rungs["migrations (drain, replayed)"]


@pytest.mark.slow
def test_the_same_holds_where_engines_are_drained_amid_faults() -> None:
    summary = simulate(150, seed=FIRST_SEED, max_failing=1, change=with_restarts)
    assert not summary.failing
    assert summary.reached["drained: moved"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", sorted(FAILED_ONCE))
def test_a_seed_that_failed_once_holds(seed: int) -> None:
    result = run_seed(seed)
    assert not result.violations
    assert not [outcome for outcome in result.outcomes if "deadline" in outcome]


@pytest.mark.slow
@pytest.mark.parametrize("seed", sorted(FAILED_ONCE_WITH_STORE))
def test_a_seed_that_failed_once_with_a_store_holds(seed: int) -> None:
    assert not World(with_store(draw(seed))).run().violations


@pytest.mark.slow
def test_a_seed_says_all_there_is_to_know() -> None:
    first, second = run_seed(7), run_seed(7)
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
