"""Whole models whose experts are placed on ranks, moved or not: the tokens of one rank."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch

from pdserve.config.schema import EplbConfig, ParallelConfig
from pdserve.parallel.mesh import MeshShape
from tests.models.decoding import greedy, load
from tests.ranks import run_ranks
from tests.tiny_models import VOCAB_SIZE, write_tiny_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pdserve.models.registry import LoadedModel
    from pdserve.parallel.group import World

pytestmark = pytest.mark.slow

NUM_STEPS = 12
_GENERATOR = torch.Generator().manual_seed(3)
PROMPTS = [torch.randint(VOCAB_SIZE, (n,), generator=_GENERATOR).tolist() for n in (5, 1, 40, 18)]
FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "minimax_m2", "ernie4_5_moe")
_BALANCED = {
    "enable_eplb": True,
    "eplb": EplbConfig(num_redundant_experts=2, window_size=2, step_interval=4),
}


class Way(msgspec.Struct, frozen=True):
    """How experts are shared; it says so in the test's name."""

    name: str
    fields: dict[str, Any]

    def parallel(self, shape: MeshShape) -> ParallelConfig:
        return ParallelConfig(
            tensor_parallel_size=shape.tp,
            pipeline_parallel_size=shape.pp,
            data_parallel_size=shape.dp,
            enable_expert_parallel=True,
            enable_sequence_parallel=shape.tp > 1 and "round_robin" in self.name,
            **self.fields,
        )


WAYS = [
    Way("all_gather", {"all2all_backend": "all_gather"}),
    Way(
        "all_to_all", {"all2all_backend": "all_to_all", "expert_placement_strategy": "round_robin"}
    ),
    Way("all_gather-balanced", {"all2all_backend": "all_gather", **_BALANCED}),
    Way("all_to_all-balanced", {"all2all_backend": "all_to_all", **_BALANCED}),
]
MESHES = {
    "tp2": MeshShape(tp=2),
    "dp2": MeshShape(dp=2),
    "tp4": MeshShape(tp=4),
    "dp2-tp2": MeshShape(dp=2, tp=2),
    "pp2-tp2": MeshShape(pp=2, tp=2),
}


class _Steps:
    """Begins and ends steps around a model, as the model runner does."""

    def __init__(self, loaded: LoadedModel, world: World, counts: list[list[int]]) -> None:
        assert loaded.experts is not None
        self._experts, self._last = loaded.experts, len(loaded.layers) - 1
        self._counts = iter(counts)

    def wait_for_layer_load(self, layer: int) -> None:
        if layer == 0:
            self._experts.begin_step(next(self._counts))

    def save_kv_layer(self, layer: int) -> None:
        if layer == self._last:
            self._experts.end_step()


def _share(dp_rank: int, num_dp: int) -> list[list[int]]:
    """The prompts of a DP rank: the first has one, the last has the rest."""
    return PROMPTS if num_dp == 1 else (PROMPTS[:1], PROMPTS[1:])[dp_rank]


def _decode(
    world: World, directories: dict[str, Path], ways: list[Way]
) -> dict[tuple[str, str], tuple[list[list[int]], int]]:
    """Tokens of this DP rank's prompts, and how many experts were moved meanwhile."""
    num_dp = world.dp.size
    shares = [_share(dp_rank, num_dp) for dp_rank in range(num_dp)]
    counts = [[sum(map(len, share)) for share in shares]] + [[len(share) for share in shares]] * (
        NUM_STEPS - 1
    )
    found = {}
    for family, directory in directories.items():
        for way in ways:
            loaded = load(directory, world, parallel=way.parallel(world.mesh.shape))
            assert loaded.experts is not None
            steps = _Steps(loaded, world, counts)
            tokens, _ = greedy(loaded, shares[world.dp.index], NUM_STEPS, world=world, hooks=steps)
            balance = loaded.experts.balance
            found[family, way.name] = tokens, 0 if balance is None else balance.num_moved
    return found


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: write_tiny_model(root / family, family) for family in FAMILIES}


@pytest.fixture(scope="module")
def on_one_rank(directories: dict[str, Path]) -> Callable[[str], list[list[int]]]:
    return functools.cache(lambda family: greedy(load(directories[family]), PROMPTS, NUM_STEPS)[0])


@pytest.fixture(scope="module")
def decoded(directories: dict[str, Path]) -> Callable[[str], list[Any]]:
    """What every rank of a mesh found; each mesh runs once."""
    return functools.cache(lambda mesh: run_ranks(MESHES[mesh], _decode, directories, WAYS))


@pytest.mark.parametrize("way", [way.name for way in WAYS])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "mesh", [pytest.param(mesh, marks=[pytest.mark.matrix] * (mesh[2:] != "2")) for mesh in MESHES]
)
def test_tokens_are_those_of_one_rank(
    decoded: Callable[[str], list[Any]],
    on_one_rank: Callable[[str], list[list[int]]],
    mesh: str,
    family: str,
    way: str,
) -> None:
    wanted, shape = on_one_rank(family), MESHES[mesh]
    assert len({token for row in wanted for token in row}) > 20, "tokens do not vary"
    moved = []
    for rank, found in enumerate(decoded(mesh)):
        first = rank // (shape.pp * shape.tp)
        tokens, num_moved = found[family, way]
        assert tokens == wanted[first : first + len(tokens)]
        moved.append(num_moved)
    # A stage may have been balanced from the start.
    assert any(moved) == ("balanced" in way)
