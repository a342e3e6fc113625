"""Tensors from stage to stage, on real ranks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from pdserve.parallel.mesh import MeshShape
from pdserve.parallel.pipeline import StageLink
from tests.ranks import run_ranks

if TYPE_CHECKING:
    from torch import Tensor

    from pdserve.parallel.group import World

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
NUM_STEPS = 20


@pytest.fixture(params=[True, False], ids=["shared memory", "gloo"])
def use_shared_memory(request: pytest.FixtureRequest) -> bool:
    return request.param


def hidden_of(step: int) -> Tensor:
    return torch.full((step % 5 + 1, 7), float(step), dtype=torch.bfloat16)


def _relay(world: World) -> list[Tensor]:
    """Each stage adds one to what comes; the first starts all steps before any is taken."""
    link = StageLink(world.pp, CPU, torch.bfloat16)
    results: list[Tensor] = []
    if not world.pp.is_first:
        time.sleep(0.05)
    for step in range(NUM_STEPS):
        hidden = hidden_of(step)
        if not world.pp.is_first:
            hidden = link.recv(*hidden.shape) + 1
        if not world.pp.is_last:
            link.send(hidden)
        else:
            results.append(hidden)
    world.all.barrier()
    return results


@pytest.mark.parametrize("num_stages", [2, 3])
def test_steps_arrive_whole_and_in_order(num_stages: int, use_shared_memory: bool) -> None:
    shape = MeshShape(pp=num_stages)
    *_, results = run_ranks(shape, _relay, use_shared_memory=use_shared_memory)
    for step, hidden in enumerate(results):
        assert torch.equal(hidden, hidden_of(step) + num_stages - 1)


def _take_when_all_is_sent(world: World, sent: Path) -> None:
    link = StageLink(world.pp, CPU, torch.float32)
    if world.pp.is_first:
        for _ in range(4):
            link.send(torch.ones(64, 576))
        sent.touch()
    else:
        while not sent.exists():
            time.sleep(0.01)
        for _ in range(4):
            link.recv(64, 576)
    world.all.barrier()


def test_a_stage_does_not_wait_for_the_next_to_take(
    use_shared_memory: bool, tmp_path: Path
) -> None:
    run_ranks(
        MeshShape(pp=2),
        _take_when_all_is_sent,
        tmp_path / "sent",
        use_shared_memory=use_shared_memory,
    )


def _send_a_view(world: World) -> float:
    link = StageLink(world.pp, CPU, torch.float32)
    if world.pp.is_first:
        hidden = torch.arange(40.0).view(5, 8)[:, ::2]
        link.send(hidden)
        world.all.barrier()
        return 0.0
    received = link.recv(5, 4)
    world.all.barrier()
    return float((received - torch.arange(40.0).view(5, 8)[:, ::2]).abs().max())


def test_what_is_sent_may_have_any_strides(use_shared_memory: bool) -> None:
    shape = MeshShape(pp=2)
    assert run_ranks(shape, _send_a_view, use_shared_memory=use_shared_memory)[1] == 0


def _send_no_tokens(world: World) -> tuple[int, ...]:
    link = StageLink(world.pp, CPU, torch.float32)
    shape = (0, 8)
    if world.pp.is_first:
        link.send(torch.empty(shape))
    else:
        shape = tuple(link.recv(*shape).shape)
    world.all.barrier()
    return shape


def test_a_step_without_tokens_passes(use_shared_memory: bool) -> None:
    shape = MeshShape(pp=2)
    assert run_ranks(shape, _send_no_tokens, use_shared_memory=use_shared_memory)[1] == (0, 8)


def _grids(world: World) -> float:
    """TP ranks of a stage pass to their own counterpart of the next."""
    link = StageLink(world.pp, CPU, torch.float32)
    if world.pp.is_first:
        link.send(torch.full((3, 4), float(world.mesh.rank)))
        return -1.0
    return float(link.recv(3, 4).mean())


def test_each_tensor_parallel_rank_has_a_link_of_its_own() -> None:
    assert run_ranks(MeshShape(pp=2, tp=2), _grids) == [-1, -1, 0, 1]
