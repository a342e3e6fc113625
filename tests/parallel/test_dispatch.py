"""Every way of bringing tokens to experts, on real ranks, against one rank that has them all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch

from pdserve.config.schema import EplbConfig, ParallelConfig
from pdserve.errors import InternalError
from pdserve.parallel.dispatch import Routing, SlicedExperts
from pdserve.parallel.group import World
from pdserve.parallel.mesh import MeshShape
from pdserve.parallel.placed import GatheredTokens, RoutedTokens, make
from tests.parallel.toy_experts import ToyExperts, expected, make_weights, route
from tests.ranks import run_ranks

if TYPE_CHECKING:
    from torch import Tensor

_WIDTH = 6
_LAYER = 3
_BACKENDS = ("all_gather", "all_to_all")
_KINDS = {"all_gather": GatheredTokens, "all_to_all": RoutedTokens}


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a layer on all ranks.

    Attributes:
        num_tokens: Of each DP rank.
        rows: Tokens of each DP rank that are really there; None: all.
    """

    backend: str
    num_tokens: tuple[int, ...]
    num_experts: int = 8
    num_redundant: int = 0
    strategy: str = "linear"
    top_k: int = 3
    is_double: bool = True
    has_shared: bool = False
    rows: tuple[int, ...] | None = None

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.is_double else torch.float32

    def parallel(self, shape: MeshShape) -> ParallelConfig:
        return ParallelConfig(
            tensor_parallel_size=shape.tp,
            data_parallel_size=shape.dp,
            enable_expert_parallel=True,
            enable_eplb=True,
            all2all_backend=self.backend,
            expert_placement_strategy=self.strategy,
            eplb=EplbConfig(num_redundant_experts=self.num_redundant),
        )

    def inputs(self, dp_rank: int) -> tuple[Tensor, Routing]:
        generator = torch.Generator().manual_seed(7 + dp_rank)
        num_tokens = self.num_tokens[dp_rank]
        x = torch.randn((num_tokens, _WIDTH), generator=generator, dtype=torch.float64)
        routing = route(num_tokens, self.num_experts, self.top_k, seed=dp_rank)
        keep = slice(None) if self.rows is None else slice(0, self.rows[dp_rank])
        routing = Routing(routing.expert_ids[keep], routing.weights[keep])
        return x.to(self.dtype)[keep], routing

    def shared(self) -> Tensor | None:
        if not self.has_shared:
            return None
        return make_weights(99, 1, _WIDTH, self.dtype)[0]

    def expected(self, dp_rank: int) -> Tensor:
        x, routing = self.inputs(dp_rank)
        weights = make_weights(_LAYER, self.num_experts, _WIDTH, self.dtype)
        return expected(x, routing, weights, self.shared())


def _run(world: World, scenarios: list[Scenario]) -> list[Any]:
    found = []
    for scenario in scenarios:
        experts = make([_LAYER], scenario.num_experts, scenario.parallel(world.mesh.shape), world)
        assert type(experts) is _KINDS[scenario.backend]
        weights = make_weights(_LAYER, scenario.num_experts, _WIDTH, scenario.dtype)
        local = ToyExperts(weights, experts.local_experts(_LAYER))
        x, routing = scenario.inputs(world.dp.index)
        partial = None
        if (shared := scenario.shared()) is not None:
            # Cut over the TP group, as the shared experts are.
            inner = torch.arange(_WIDTH) % world.tp.size == world.tp.index
            partial = (x * inner) @ shared
        before = None if partial is None else partial.clone()
        experts.begin_step(scenario.rows or scenario.num_tokens)
        found.append(experts(_LAYER, x, routing, local, partial))
        experts.end_step()
        assert partial is before is None or torch.equal(partial, before)  # only read
    return found


def _scenarios(shape: MeshShape) -> list[Scenario]:
    counts = {
        1: [(13,), (1,), (0,)],
        2: [(9, 4), (5, 0), (0, 1), (0, 0)],
    }[shape.dp]
    found = []
    for backend in _BACKENDS:
        usual = counts[0]
        found += [
            *(Scenario(backend=backend, num_tokens=num_tokens) for num_tokens in counts),
            Scenario(backend=backend, num_tokens=usual, is_double=False),
            Scenario(backend=backend, num_tokens=usual, has_shared=True),
            Scenario(backend=backend, num_tokens=counts[1], has_shared=True),
            Scenario(backend=backend, num_tokens=usual, num_experts=7, strategy="round_robin"),
            Scenario(backend=backend, num_tokens=usual, num_experts=9, num_redundant=5),
            Scenario(backend=backend, num_tokens=counts[1], num_experts=9, num_redundant=5),
            Scenario(
                backend=backend,
                num_tokens=usual,
                num_experts=5,
                num_redundant=5 * (shape.tp * shape.dp - 1),
                has_shared=True,
                is_double=False,
            ),
            Scenario(backend=backend, num_tokens=usual, num_experts=4, top_k=1),
        ]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [MeshShape(tp=2), MeshShape(tp=4), MeshShape(dp=2), MeshShape(dp=2, tp=2)],
    ids=["tp2", "tp4", "dp2", "dp2-tp2"],
)
def test_every_way_of_dispatch_gives_what_one_rank_gives(shape: MeshShape) -> None:
    scenarios = _scenarios(shape)
    found = run_ranks(shape, _run, scenarios)
    for index, scenario in enumerate(scenarios):
        tolerance = 1e-12 if scenario.is_double else 2e-5
        for dp_rank in range(shape.dp):
            ranks = [found[dp_rank * shape.tp + tp][index] for tp in range(shape.tp)]
            wanted = scenario.expected(dp_rank)
            torch.testing.assert_close(ranks[0], wanted, atol=tolerance, rtol=0, msg=str(scenario))
            assert all(torch.equal(ranks[0], other) for other in ranks), scenario


@pytest.mark.slow
@pytest.mark.parametrize("shape", [MeshShape(tp=4), MeshShape(dp=2, tp=2)], ids=["tp4", "dp2-tp2"])
def test_a_token_gets_the_same_bits_whoever_its_neighbours_are(shape: MeshShape) -> None:
    num_tokens = (12,) * shape.dp
    full, fewer = (
        [
            Scenario(
                backend=backend, num_tokens=num_tokens, num_redundant=4, is_double=False, rows=rows
            )
            for backend in _BACKENDS
        ]
        for rows in (None, (5, 1)[: shape.dp])
    )
    for of_rank in run_ranks(shape, _run, full + fewer):
        for whole, part in zip(of_rank[: len(full)], of_rank[len(full) :], strict=True):
            assert torch.equal(whole[: len(part)], part)


def _served(world: World, backend: str) -> int:
    num_tokens, num_experts = 600, 2
    scenario = Scenario(
        backend=backend,
        num_tokens=(num_tokens,),
        num_experts=num_experts,
        num_redundant=num_experts * (world.ep.size - 1),
        top_k=1,
    )
    experts = make([_LAYER], num_experts, scenario.parallel(world.mesh.shape), world)
    weights = make_weights(_LAYER, num_experts, _WIDTH, scenario.dtype)
    local = ToyExperts(weights, experts.local_experts(_LAYER))
    x, _ = scenario.inputs(0)
    ids = torch.zeros((num_tokens, 1), dtype=torch.int64)
    experts(_LAYER, x, Routing(ids, torch.ones(num_tokens, 1)), local, None)
    return local.num_choices


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_copies_of_an_expert_share_its_tokens_evenly(num_ranks: int) -> None:
    for backend in _BACKENDS:
        served = run_ranks(MeshShape(tp=num_ranks), _served, backend)
        assert sum(served) == 600
        # Five standard deviations.
        share = 600 / num_ranks
        assert all(abs(number - share) < 5 * share**0.5 for number in served)


def _step_with_other_counts(world: World) -> str:
    scenario = Scenario(backend="all_gather", num_tokens=(3, 3))
    experts = make([_LAYER], 8, scenario.parallel(world.mesh.shape), world)
    x, routing = scenario.inputs(world.dp.index)
    experts.begin_step([3, 4])
    weights = make_weights(_LAYER, 8, _WIDTH, scenario.dtype)
    local = ToyExperts(weights, experts.local_experts(_LAYER))
    if world.dp.index == 0:
        return ""
    with pytest.raises(InternalError) as caught:
        experts(_LAYER, x, routing, local, None)
    return str(caught.value)


def test_a_step_that_began_with_other_counts_is_our_mistake() -> None:
    assert "has 3 tokens" in run_ranks(MeshShape(dp=2), _step_with_other_counts)[1]


def test_without_expert_parallelism_experts_are_sliced() -> None:
    assert make([0], 4, ParallelConfig(), World.alone()).slices_experts


def test_on_one_rank_expert_parallelism_has_nothing_to_send() -> None:
    experts = make([0], 4, ParallelConfig(enable_expert_parallel=True), World.alone())
    assert isinstance(experts, SlicedExperts)
