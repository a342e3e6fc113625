"""The harness that other tests trust: failures on ranks are failures of the test."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from pdserve.parallel.mesh import MeshShape
from tests.ranks import RankError, run_ranks

if TYPE_CHECKING:
    from pdserve.parallel.group import World

pytestmark = pytest.mark.slow


def _where(world: World, offset: int) -> tuple[int, int, int]:
    return world.mesh.rank + offset, os.getpid(), torch.get_num_threads()


def _raise_on_one(world: World) -> None:
    print(f"hello from {world.mesh.rank}", flush=True)
    if world.mesh.rank == 1:
        raise KeyError("a reason")
    time.sleep(60)


def _hang(world: World) -> None:
    time.sleep(60)


def _kill_one(world: World) -> int:
    if world.mesh.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return world.mesh.rank


def test_results_come_in_rank_order_from_processes_of_one_thread() -> None:
    results = run_ranks(MeshShape(tp=3), _where, 10)
    assert [rank for rank, _, _ in results] == [10, 11, 12]
    assert len({pid for _, pid, _ in results}) == 3
    assert {threads for _, _, threads in results} == {1}


def test_an_exception_on_a_rank_is_raised_with_its_traceback_and_output() -> None:
    with pytest.raises(RankError, match=r"rank 1 raised:[\s\S]*_raise_on_one") as caught:
        run_ranks(MeshShape(tp=2), _raise_on_one)
    assert "hello from 1" in str(caught.value)
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_hang_is_ended_and_says_where_it_was() -> None:
    with pytest.raises(RankError, match=r"rank 0 did not finish in 4\.0 s[\s\S]*in _hang"):
        run_ranks(MeshShape(tp=2), _hang, timeout_s=4.0)


def test_a_rank_that_dies_is_told_with_its_signal() -> None:
    with pytest.raises(RankError, match="rank 1 ended with -9"):
        run_ranks(MeshShape(tp=2), _kill_one)


def test_a_rank_that_may_die_returns_nothing() -> None:
    assert run_ranks(MeshShape(tp=2), _kill_one, may_die=[1]) == [0, None]


def test_no_rank_is_left_after_a_call() -> None:
    pids = [pid for _, pid, _ in run_ranks(MeshShape(tp=2), _where, 0)]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
