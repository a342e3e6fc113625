"""torch.compile sees through the collectives: one graph, fakes of the right shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.library

from pdserve.parallel.mesh import MeshShape
from tests.ranks import run_ranks

if TYPE_CHECKING:
    from torch import Tensor

    from pdserve.parallel.group import World

pytestmark = (
    pytest.mark.slow
)  # torch's compiler takes a second or two to import, and as much to run


def _half_block(world: World, x: Tensor) -> Tensor:
    """All collectives, between what a model has between them."""
    tp = world.tp
    y = tp.all_reduce(torch.relu(x))
    y = tp.all_gather(y * 2, -1)
    y = tp.reduce_scatter(y + 1, 1)
    y = tp.all_gather(tp.reduce_scatter(y), 0)
    rows = len(x) // 2
    y = tp.all_to_all(y, [rows, rows], [rows, rows])
    return tp.broadcast(y, 1) - x


def _check_compiled(world: World, backend: str) -> int:
    num_graphs = 0

    def counted(module: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        nonlocal num_graphs
        num_graphs += 1
        return torch._dynamo.lookup_backend(backend)(module, inputs)

    compiled = torch.compile(_half_block, fullgraph=True, backend=counted, dynamic=True)
    for rows in (4, 6, 10):
        x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(world.tp.index))
        torch.testing.assert_close(compiled(world, x), _half_block(world, x), rtol=0, atol=0)
    return num_graphs


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.matrix)])
def test_a_function_with_collectives_is_one_graph_for_all_sizes(backend: str) -> None:
    assert run_ranks(MeshShape(tp=2), _check_compiled, backend) == [1, 1]


def _check_operations(world: World) -> None:
    name, operations = world.tp.name, torch.ops.pdserve
    for x in (torch.randn(6, 4, 2).transpose(0, 1), torch.empty(0, 2)):
        rows = len(x) // 2
        calls = [
            (operations.all_reduce.default, (x, name)),
            (operations.all_gather.default, (x, 1, name)),
            (operations.reduce_scatter.default, (x, 0, name)),
            (operations.all_to_all.default, (x, [rows, rows], [rows, rows], name)),
            (operations.broadcast.default, (x, 0, name)),
        ]
        for operation, arguments in calls:
            torch.library.opcheck(operation, arguments)


@pytest.mark.matrix
def test_the_operations_pass_torchs_own_checks() -> None:
    run_ranks(MeshShape(tp=2), _check_operations)
