"""What a group does to tensors, on real ranks, against plain arithmetic in this process.

Every case runs through shared memory and through gloo; results are compared to the last bit.
"""

from __future__ import annotations

import itertools
import pickle
import socket
import time
from typing import TYPE_CHECKING, NoReturn

import psutil
import pytest
import torch
import torch.distributed as dist

from pdserve.errors import InternalError
from pdserve.parallel.group import Group, interface_towards, join
from pdserve.parallel.mesh import Axis, Mesh, MeshShape
from pdserve.parallel.rendezvous import Rendezvous, listen
from tests.ranks import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from torch import Tensor

    from pdserve.parallel.group import World

pytestmark = pytest.mark.slow

SUMMED = (torch.float32, torch.bfloat16, torch.float16, torch.int64)
MOVED = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
# Rows, columns: nothing, less than a vector, odd, several pieces of the segment.
SHAPES = ((0, 8), (1,), (1, 3), (5, 37), (16, 576), (257, 521))
CARRIERS = ("shared memory", "gloo")


def given(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What `rank` brings: values whose sum depends on the order of addition."""
    generator = torch.Generator().manual_seed(1000 * rank + len(shape))
    if not dtype.is_floating_point:
        return torch.randint(-50, 50, shape, generator=generator).to(dtype)
    exponents = torch.randint(-6, 7, shape, generator=generator)
    return (torch.randn(shape, generator=generator) * 2.0**exponents).to(dtype)


def added(parts: list[Tensor]) -> Tensor:
    wide = [p.float() if p.dtype in {torch.bfloat16, torch.float16} else p for p in parts]
    total = wide[0]
    for part in wide[1:]:
        total = total + part
    return total.to(parts[0].dtype)


def assert_same(found: Tensor, wanted: Tensor) -> None:
    assert found.dtype == wanted.dtype
    assert found.is_contiguous()
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.fixture(params=CARRIERS)
def ranks(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    def run(num_ranks: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
        shape = MeshShape(tp=num_ranks)
        return run_ranks(shape, fn, *args, use_shared_memory=request.param == "shared memory")

    return run


def _check_all_reduce(world: World) -> None:
    tp = world.tp
    for dtype, shape in itertools.product(SUMMED, SHAPES):
        parts = [given(rank, shape, dtype) for rank in range(tp.size)]
        assert_same(tp.all_reduce(parts[tp.index]), added(parts))


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_all_reduce_adds_in_rank_order(ranks: Callable[..., list[Any]], num_ranks: int) -> None:
    ranks(num_ranks, _check_all_reduce)


def _row_by_row(world: World) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        # Above the size at which both ways change how they add.
        x = given(world.tp.index, (32, 1100), dtype)
        together = world.tp.all_reduce(x)
        assert_same(torch.cat([world.tp.all_reduce(row) for row in x.split(1)]), together)
        assert_same(world.tp.all_gather(world.tp.reduce_scatter(x)), together)


def test_a_rows_sum_does_not_depend_on_the_other_rows(ranks: Callable[..., list[Any]]) -> None:
    ranks(4, _row_by_row)


def _check_strides(world: World) -> None:
    tp = world.tp
    parts = [given(r, (12, 5, 8), torch.float32).transpose(0, 2)[::2] for r in range(2)]
    x = parts[tp.index]  # [4, 5, 12]
    assert not x.is_contiguous()
    assert_same(tp.all_reduce(x), added(parts).contiguous())
    assert_same(tp.all_gather(x, 1), torch.cat(parts, 1).contiguous())
    assert_same(tp.reduce_scatter(x, 2), added(parts).chunk(2, 2)[tp.index].contiguous())
    assert_same(tp.broadcast(x, 1), parts[1].contiguous())
    arrived = torch.cat([part[2 * tp.index : 2 * tp.index + 2] for part in parts])
    assert_same(tp.all_to_all(x, [2, 2], [2, 2]), arrived.contiguous())
    assert torch.equal(x, given(tp.index, (12, 5, 8), torch.float32).transpose(0, 2)[::2])


def test_inputs_may_have_any_strides_and_stay_as_they_are(
    ranks: Callable[..., list[Any]],
) -> None:
    ranks(2, _check_strides)


def _check_all_gather(world: World) -> None:
    tp = world.tp
    for dtype, shape in itertools.product(MOVED, ((3,), (0, 4), (2, 0), (2, 3, 5))):
        parts = [given(rank, shape, dtype) for rank in range(tp.size)]
        for dim in range(-len(shape), len(shape)):
            assert_same(tp.all_gather(parts[tp.index], dim), torch.cat(parts, dim))


def test_all_gather_joins_along_any_dim_in_rank_order(ranks: Callable[..., list[Any]]) -> None:
    ranks(3, _check_all_gather)


def _check_reduce_scatter(world: World) -> None:
    tp = world.tp
    for dtype, shape in itertools.product(SUMMED, ((6,), (0, 3), (3, 0), (6, 3, 9))):
        parts = [given(rank, shape, dtype) for rank in range(tp.size)]
        total = added(parts)
        for dim in range(-len(shape), len(shape)):
            if shape[dim] % tp.size == 0:
                size = shape[dim] // tp.size
                mine = total.narrow(dim, tp.index * size, size).contiguous()
                assert_same(tp.reduce_scatter(parts[tp.index], dim), mine)


def test_reduce_scatter_gives_each_rank_its_part_of_the_sum(
    ranks: Callable[..., list[Any]],
) -> None:
    ranks(3, _check_reduce_scatter)


# rows[i][j]: how many go from rank i to rank j.
ROUTES = (
    ((1, 2, 3), (4, 0, 1), (0, 2, 0)),
    ((0, 0, 0), (0, 0, 0), (0, 0, 0)),
    ((0, 0, 0), (0, 0, 0), (5, 0, 0)),
    ((370, 1, 0), (90, 0, 400), (3, 1, 1)),
)


def _check_all_to_all(world: World) -> None:
    me = world.tp.index
    for dtype, rows in itertools.product(MOVED, ROUTES):
        given_rows = [given(rank, (sum(rows[rank]), 130), dtype) for rank in range(3)]
        wanted = torch.cat([given_rows[rank].split(rows[rank])[me] for rank in range(3)])
        assert_same(
            world.tp.all_to_all(given_rows[me], [row[me] for row in rows], rows[me]), wanted
        )


def test_all_to_all_takes_uneven_rows_where_they_belong(
    ranks: Callable[..., list[Any]],
) -> None:
    ranks(3, _check_all_to_all)


def _check_broadcast(world: World) -> None:
    tp = world.tp
    for dtype, shape, source in itertools.product(MOVED, SHAPES, range(tp.size)):
        assert_same(
            tp.broadcast(given(tp.index, shape, dtype), source), given(source, shape, dtype)
        )


def test_broadcast_gives_all_what_the_source_has(ranks: Callable[..., list[Any]]) -> None:
    ranks(3, _check_broadcast)


def _gather_ints(world: World) -> list[list[list[int]]]:
    me = world.tp.index
    return [world.tp.gather_ints(values) for values in ([me, -me, 1 << 60], [], [7])]


def test_gather_ints_gives_every_ranks_values(ranks: Callable[..., list[Any]]) -> None:
    wanted = [[[0, 0, 1 << 60], [1, -1, 1 << 60]], [[], []], [[7], [7]]]
    assert ranks(2, _gather_ints) == [wanted, wanted]


def _late(world: World) -> tuple[float, float]:
    if world.tp.index == 1:
        time.sleep(0.2)
    came = time.monotonic()
    world.tp.barrier()
    return came, time.monotonic()


def test_a_barrier_lets_nobody_go_before_the_last_has_come(
    ranks: Callable[..., list[Any]],
) -> None:
    times = ranks(3, _late)
    assert min(went for _, went in times) >= max(came for came, _ in times)


def _not_divisible(world: World) -> None:
    world.tp.reduce_scatter(torch.ones(4, 3), 1)


def _lost_rows(world: World) -> None:
    world.tp.all_to_all(torch.ones(3, 2), [1, 1], [1, 1])


@pytest.mark.parametrize(
    ("wrong", "told"), [(_not_divisible, "cannot be cut for 2"), (_lost_rows, "3 rows cannot go")]
)
def test_sizes_that_do_not_fit_are_refused(
    ranks: Callable[..., list[Any]], wrong: Callable[..., None], told: str
) -> None:
    with pytest.raises(Exception, match=told) as caught:
        ranks(2, wrong)
    assert isinstance(caught.value.__cause__, InternalError)


def _sum_along_every_axis(world: World) -> dict[Axis, list[float]]:
    mine = torch.tensor([2.0**world.mesh.rank])
    return {axis: world.groups[axis].all_reduce(mine).tolist() for axis in Axis}


def test_the_groups_of_a_world_do_not_hear_one_another() -> None:
    shape = MeshShape(dp=2, tp=2)
    for rank, found in enumerate(run_ranks(shape, _sum_along_every_axis)):
        for axis, total in found.items():
            assert total == [sum(2.0**r for r in Mesh(shape, rank).group(axis))]


def test_a_group_of_one_returns_what_it_is_given() -> None:
    [same] = run_ranks(MeshShape(), _alone)
    assert same


def _alone(world: World) -> bool:
    x = torch.ones(3, 2)
    tp = world.tp
    results = [
        tp.all_reduce(x),
        tp.all_gather(x, 1),
        tp.reduce_scatter(x),
        tp.all_to_all(x, [3], [3]),
        tp.broadcast(x),
    ]
    tp.barrier()
    return all(result is x for result in results) and tp.gather_ints([5]) == [[5]]


def test_a_group_knows_its_neighbours_by_their_rank_in_the_world() -> None:
    group = Group((1, 3, 5), 3)
    assert (group.first, group.prev, group.index, group.next, group.last) == (1, 1, 1, 5, 5)
    assert (group.is_first, group.is_last) == (False, False)


def test_the_last_of_a_group_is_followed_by_the_first() -> None:
    first, last = Group((1, 3, 5), 1), Group((1, 3, 5), 5)
    assert (first.prev, last.next) == (5, 1)
    assert (first.is_first, last.is_last) == (True, True)


def test_ranks_of_several_hosts_listen_where_the_others_reach_them() -> None:
    """Not where the host's name leads, which is a loopback address on many machines."""
    assert interface_towards("127.0.0.1") == "lo"
    own = {
        address.address: name
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses[:1]
        if address.family == socket.AF_INET
    }
    for address, name in own.items():
        assert interface_towards(address) == name
    assert interface_towards("2001:db8::1") is None


def _join_without_unpickling(world: World) -> list[list[int]]:
    def refuse(*args: object, **named: object) -> NoReturn:
        raise AssertionError("something from the network is unpickled")

    pickle.loads = pickle.load = dist.distributed_c10d._unpickler = refuse
    listener, mine = listen("127.0.0.1") if world.all.is_first else (None, None)
    [port], _ = world.all.gather_ints([mine.port if mine is not None else 0])
    world.close()
    rendezvous = mine or Rendezvous(host="127.0.0.1", port=port)
    again = join(world.mesh, rendezvous, torch.device("cpu"))
    if listener is not None:
        listener.detach()  # the store's now
    assert again.all.shared is not None
    found = again.all.gather_ints([world.mesh.rank])
    again.close()
    return found


def test_a_world_is_joined_without_unpickling_anything() -> None:
    assert run_ranks(MeshShape(tp=2), _join_without_unpickling) == [[[0], [1]]] * 2
