"""Experts move between ranks while a skewed stream is served, and no token notices."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pdserve.config.schema import EplbConfig, ParallelConfig
from pdserve.parallel.mesh import MeshShape
from pdserve.parallel.placed import PlacedExperts, make
from tests.parallel.toy_experts import ToyExperts, expected, make_weights, route
from tests.ranks import run_ranks

if TYPE_CHECKING:
    from torch import Tensor

    from pdserve.parallel.group import World

pytestmark = pytest.mark.slow

_WIDTH = 4
_LAYERS = (1, 2, 5)
_NUM_EXPERTS = 16
_INTERVAL = 4
_NUM_STEPS = 3 * _INTERVAL
_TOKENS_PER_STEP = 120


def _popularity(layer: int, other: bool) -> Tensor:
    """Zipf, in another order in each layer."""
    generator = torch.Generator().manual_seed(layer + 100 * other)
    return 1.0 / (1.0 + torch.randperm(_NUM_EXPERTS, generator=generator))


def _parallel(shape: MeshShape, backend: str, window: int) -> ParallelConfig:
    return ParallelConfig(
        tensor_parallel_size=shape.tp,
        data_parallel_size=shape.dp,
        enable_expert_parallel=True,
        all2all_backend=backend,
        enable_eplb=True,
        eplb=EplbConfig(num_redundant_experts=4, window_size=window, step_interval=_INTERVAL),
    )


class _Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _serve(world: World, backend: str, window: int, changes: bool = False) -> dict[str, Any]:
    """Serve a stream; returns what this rank saw of it.

    Args:
        changes: The last step of each interval likes other experts than the steps before.
    """
    log = _Log()
    logging.getLogger("pdserve").addHandler(log)
    logging.getLogger("pdserve").setLevel(logging.INFO)
    shape = world.mesh.shape
    experts = make(_LAYERS, _NUM_EXPERTS, _parallel(shape, backend, window), world)
    assert isinstance(experts, PlacedExperts)
    weights = {layer: make_weights(layer, _NUM_EXPERTS, _WIDTH, torch.float64) for layer in _LAYERS}
    local = {layer: ToyExperts(weights[layer], experts.local_experts(layer)) for layer in _LAYERS}
    # DP ranks have other numbers of tokens in each step, and the last one idles in some.
    worst, served, num_changed = 0.0, [], []
    for step in range(_NUM_STEPS):
        counts = [_TOKENS_PER_STEP * (1 + 5 * changes) // shape.dp] * shape.dp
        if shape.dp > 1:
            counts[0] += 7 * (step % 3)
            counts[-1] *= step % 4 != 1
        experts.begin_step(counts)
        for layer in _LAYERS:
            num_tokens = counts[world.dp.index]
            generator = torch.Generator().manual_seed(step * 10 + world.dp.index)
            x = torch.randn((num_tokens, _WIDTH), generator=generator, dtype=torch.float64)
            popularity = _popularity(layer, changes and step % _INTERVAL == _INTERVAL - 1)
            routing = route(num_tokens, _NUM_EXPERTS, 2, seed=step, popularity=popularity)
            with torch.inference_mode():
                y = experts(layer, x, routing, local[layer], None)
            wanted = expected(x, routing, weights[layer], None)
            if num_tokens:
                worst = max(worst, float((y - wanted).abs().max()))
        before = [experts.local_experts(layer) for layer in _LAYERS]
        experts.end_step()
        num_changed.append(
            sum(held != experts.local_experts(i) for held, i in zip(before, _LAYERS, strict=True))
        )
        served.append(sum(toy.num_choices for toy in local.values()))
        for toy in local.values():
            toy.num_choices = 0
    lies_right = all(
        torch.equal(local[layer].weights, weights[layer][list(experts.local_experts(layer))])
        for layer in _LAYERS
    )
    assert experts.balance is not None
    return {
        "worst": worst,
        "served": served,
        "num_changed": num_changed,
        "lies_right": lies_right,
        "stats": experts.balance,
        "log": log.lines,
    }


def _measured(ranks: list[dict[str, Any]], steps: slice) -> float:
    """Max over mean of the choices that the ranks served in these steps."""
    served = [sum(rank["served"][steps]) for rank in ranks]
    return max(served) / (sum(served) / len(served))


@pytest.mark.parametrize(
    ("shape", "backend"),
    [
        (MeshShape(tp=2), "all_gather"),
        (MeshShape(dp=2), "all_to_all"),
        (MeshShape(dp=2, tp=2), "all_to_all"),
        *(
            pytest.param(shape, backend, marks=pytest.mark.matrix)
            for shape, backend in [
                (MeshShape(tp=2), "all_to_all"),
                (MeshShape(tp=4), "all_gather"),
                (MeshShape(tp=4), "all_to_all"),
                (MeshShape(dp=2), "all_gather"),
                (MeshShape(dp=2, tp=2), "all_gather"),
            ]
        ),
    ],
    ids=str,
)
def test_a_skewed_stream_is_balanced_and_every_token_stays_right(
    shape: MeshShape, backend: str
) -> None:
    ranks = run_ranks(shape, _serve, backend, _INTERVAL)
    assert max(rank["worst"] for rank in ranks) < 1e-12
    assert all(rank["lies_right"] for rank in ranks)
    before = _measured(ranks, slice(0, _INTERVAL))
    # From the step after the last layer has moved.
    after = _measured(ranks, slice(_INTERVAL + len(_LAYERS), None))
    stats = ranks[0]["stats"]
    print(
        f"{shape.dp} x {shape.tp} ranks, {backend}: max/mean of what ranks served {before:.3f} -> "
        f"{after:.3f}; planned {stats.balance_ratio:.3f}, {stats.num_moved} experts moved, "
        f"longest step {stats.longest_s * 1e3:.1f} ms"
    )
    assert before > 1.1
    assert after <= 1.1


def test_a_rebalancing_moves_one_layer_per_step_and_says_so_once() -> None:
    ranks = run_ranks(MeshShape(tp=2), _serve, "all_gather", _INTERVAL)
    first_sweep = ranks[0]["num_changed"][: 2 * _INTERVAL - 1]
    assert first_sweep == [0, 0, 0, 1, 1, 1, 0]
    assert [len(rank["log"]) for rank in ranks] == [ranks[0]["stats"].num_rebalancings, 0]
    assert ranks[0]["log"][0].startswith("experts rebalanced layers=3 ratio_before=")


def test_the_window_may_be_shorter_or_longer_than_the_interval() -> None:
    for window in (1, 3 * _INTERVAL):
        ranks = run_ranks(MeshShape(tp=2), _serve, "all_to_all", window)
        assert max(rank["worst"] for rank in ranks) < 1e-12
        assert ranks[0]["stats"].balance_ratio <= 1.1


def test_steps_before_the_window_do_not_count() -> None:
    ranks = run_ranks(MeshShape(tp=4), _serve, "all_gather", 1, True)
    last_of_interval = slice(_INTERVAL - 1, None, _INTERVAL)
    first, *later = zip(*(rank["served"][last_of_interval] for rank in ranks), strict=True)
    before, *after = (max(served) / (sum(served) / len(served)) for served in (first, *later))
    assert before > 1.2
    assert max(after) < 1.1


def test_all_ranks_of_a_group_report_the_same_balance() -> None:
    ranks = run_ranks(MeshShape(dp=2), _serve, "all_gather", _INTERVAL)
    first, second = (rank["stats"] for rank in ranks)
    assert first.num_moved == second.num_moved > 0
    assert (first.balance_ratio, first.moved_bytes) == (second.balance_ratio, second.moved_bytes)
