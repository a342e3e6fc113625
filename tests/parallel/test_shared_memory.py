"""Segments: tensors in pieces, ranks that end or stall, and what is left behind (nothing)."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from pdserve.errors import InternalError, PeerLostError
from pdserve.parallel import segments, shared_memory
from pdserve.parallel.mesh import MeshShape
from tests.ranks import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from pdserve.parallel.group import World
    from pdserve.parallel.shared_memory import SharedExchange

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def small(world: World) -> Iterator[SharedExchange]:
    """An exchange of all ranks in which nearly everything goes in pieces."""
    assert world.all.host is not None
    shared = shared_memory.share(
        {"small": world.all.ranks},
        world.mesh.rank,
        world.all.host,
        slot_bytes=4096,
        ring_bytes=16384,
    )["small"]
    try:
        yield shared
    finally:
        shared.close()


def parts_of(chance: random.Random, world: World, shape: tuple[int, ...]) -> list[Tensor]:
    seeds = [chance.randrange(1 << 30) for _ in world.all.ranks]
    return [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds]


def lose_patience() -> None:
    """Let every wait return to Python at once, so that calls go on from any place in them."""
    shared_memory._LOOK_NS = shared_memory._LOOK_CROWDED_NS = 0
    shared_memory._SLEEP_NS = 0


def _many_calls_in_pieces(world: World, seed: int, is_impatient: bool) -> None:
    if is_impatient:
        lose_patience()
    chance = random.Random(seed)  # the same on all ranks
    size, me = world.all.size, world.all.index
    with small(world) as shared:
        for _ in range(200 if is_impatient else 60):
            rows, columns = chance.randrange(0, 40), chance.choice([1, 17, 64, 300])
            parts = parts_of(chance, world, (rows, size * columns))
            total = parts[0].clone()
            for part in parts[1:]:
                total += part
            match chance.choice(["reduce", "gather", "scatter", "broadcast", "all_to_all"]):
                case "reduce":
                    assert torch.equal(shared.all_reduce(parts[me]), total)
                case "gather":
                    dim = chance.randrange(2)
                    assert torch.equal(shared.all_gather(parts[me], dim), torch.cat(parts, dim))
                case "scatter":
                    mine = total[:, me * columns : (me + 1) * columns]
                    assert torch.equal(shared.reduce_scatter(parts[me], 1), mine)
                case "broadcast":
                    source = chance.randrange(size)
                    assert torch.equal(shared.broadcast(parts[me], source), parts[source])
                case "all_to_all":
                    sent = []
                    for _ in range(size):
                        cuts = sorted(chance.randrange(rows + 1) for _ in range(size - 1))
                        ends = [0, *cuts, rows]
                        sent.append([b - a for a, b in itertools.pairwise(ends)])
                    wanted = torch.cat([parts[r].split(sent[r])[me] for r in range(size)])
                    received = [row[me] for row in sent]
                    assert torch.equal(shared.all_to_all(parts[me], received, sent[me]), wanted)


@pytest.mark.parametrize(
    ("num_ranks", "is_impatient"),
    [
        *((2, False), (3, True)),
        *(
            pytest.param(*each, marks=pytest.mark.matrix)
            for each in ((2, True), (3, False), (5, False), (5, True))
        ),
    ],
)
def test_any_series_of_calls_in_pieces_gives_what_arithmetic_gives(
    num_ranks: int, is_impatient: bool
) -> None:
    run_ranks(MeshShape(tp=num_ranks), _many_calls_in_pieces, num_ranks, is_impatient)


def _call_with_threads(world: World) -> None:
    torch.set_num_threads(2)
    for shape in ((300, 521), (7, 4096)):
        parts = parts_of(random.Random(1), world, shape)
        total = parts[0] + parts[1] + parts[2]
        mine = parts[world.tp.index]
        assert torch.equal(world.tp.all_reduce(mine), total)
        assert torch.equal(world.tp.all_gather(mine), torch.cat(parts))
        assert torch.equal(world.tp.broadcast(mine, 2), parts[2])


def test_threads_change_no_bit() -> None:
    run_ranks(MeshShape(tp=3), _call_with_threads)


def _random_stream(world: World, seed: int, is_impatient: bool) -> None:
    if is_impatient:
        lose_patience()
    chance = random.Random(seed)
    sizes = [chance.choice([0, 1, 100, 1024, 3000, 20_000]) for _ in range(200)]
    naps = [chance.random() < 0.05 for _ in sizes]
    with small(world) as shared:
        for number, size in enumerate(sizes):
            if naps[number] and world.all.index == number % 2:
                time.sleep(0.002)
            if world.all.index == 0:
                shared.send_next(torch.full((size,), float(number)))
            else:
                got = torch.empty(size)
                shared.recv_prev(got)
                assert torch.equal(got, torch.full((size,), float(number)))


@pytest.mark.parametrize("is_impatient", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_a_full_ring_neither_loses_nor_reorders(seed: int, is_impatient: bool) -> None:
    run_ranks(MeshShape(pp=2), _random_stream, seed, is_impatient)


def _be_late(world: World) -> int:
    shared = world.all.shared
    assert shared is not None
    world.all.barrier()
    num_returns = 0
    reduce = shared._all_reduce

    def counted(call: bytes) -> int:
        nonlocal num_returns
        num_returns += 1
        return reduce(call)

    shared._all_reduce = counted
    if world.all.index == 1:
        time.sleep(1.0)
    world.all.all_reduce(torch.ones(3))
    return num_returns


def test_a_wait_comes_back_to_python_again_and_again() -> None:
    waited, late = run_ranks(MeshShape(tp=2), _be_late)
    assert waited > 2
    assert late == 1


def _wait_for_the_dead(world: World, call: str) -> float | None:
    world.all.barrier()
    if world.all.index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    shared = world.all.shared
    assert shared is not None
    started = time.monotonic()
    with pytest.raises(PeerLostError, match=r"rank 1 \(process \d+\) has ended"):
        match call:
            case "all_reduce":
                world.all.all_reduce(torch.ones(3))
            case "gather_ints":
                world.all.gather_ints([1])
            case "recv":
                shared.recv_prev(torch.empty(3))
    return time.monotonic() - started


@pytest.mark.parametrize("call", ["all_reduce", "gather_ints", "recv"])
def test_who_waits_for_a_dead_rank_is_told_soon(call: str) -> None:
    waited, _ = run_ranks(MeshShape(tp=2), _wait_for_the_dead, call, may_die=[1])
    assert waited < 10.0


def _hear_last_words(world: World) -> float | None:
    if world.all.index == 1:
        # As if the other rank had not looked for a while.
        world.all.all_reduce(torch.ones(3))
        os.kill(os.getpid(), signal.SIGKILL)
    shared = world.all.shared
    assert shared is not None
    first = world.all.all_reduce(torch.ones(3))
    with pytest.raises(PeerLostError):
        world.all.all_reduce(torch.ones(3))
    return float(first.sum())


def test_what_a_rank_said_before_it_died_still_counts() -> None:
    assert run_ranks(MeshShape(tp=2), _hear_last_words, may_die=[1]) == [6.0, None]


def _wait_asleep(world: World) -> float:
    world.all.barrier()
    if world.all.index == 1:
        time.sleep(1.0)  # the other ranks wait for this one, and measure what that costs
    before = time.process_time()
    world.all.all_reduce(torch.ones(3))
    return time.process_time() - before


def test_a_rank_that_waits_long_leaves_the_core_to_others() -> None:
    used, _ = run_ranks(MeshShape(tp=2), _wait_asleep)
    assert used < 0.1


def _be_interrupted(world: World, interrupted: Path) -> None:
    if world.all.index == 1:
        while not interrupted.exists():
            time.sleep(0.01)
        return

    def alarm(number: int, frame: object) -> None:
        raise TimeoutError("enough")

    signal.signal(signal.SIGALRM, alarm)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    with pytest.raises(TimeoutError, match="enough"):
        world.all.all_reduce(torch.ones(3))
    interrupted.touch()


def test_signal_handlers_run_while_a_rank_waits(tmp_path: Path) -> None:
    run_ranks(MeshShape(tp=2), _be_interrupted, tmp_path / "interrupted")


def _ask_for_other_sizes(world: World) -> None:
    world.all.all_reduce(torch.ones(3 + world.all.index))


def _go_on_after_a_failure(world: World) -> None:
    with contextlib.suppress(InternalError):
        world.all.all_reduce(torch.ones(3 + world.all.index))
    world.all.all_reduce(torch.ones(3))


def test_a_group_is_not_used_again_after_a_failure() -> None:
    with pytest.raises(Exception, match="left half done"):
        run_ranks(MeshShape(tp=2), _go_on_after_a_failure)


def _make_other_calls(world: World) -> None:
    if world.all.index:
        world.all.all_reduce(torch.ones(3))
    else:
        world.all.all_gather(torch.ones(3))


def _expect_other_rows(world: World) -> None:
    world.all.all_to_all(torch.ones(2, 4), [1, 1 + world.all.index], [1, 1])


def _send_other_shapes(world: World) -> None:
    shared = world.all.shared
    assert shared is not None
    if world.all.index:
        shared.recv_prev(torch.empty(4))
    else:
        shared.send_next(torch.ones(3))


@pytest.mark.parametrize(
    "wrong", [_ask_for_other_sizes, _make_other_calls, _expect_other_rows, _send_other_shapes]
)
def test_ranks_that_disagree_are_told_so(wrong: Callable[..., None]) -> None:
    with pytest.raises(Exception, match="does not make the same call") as caught:
        run_ranks(MeshShape(tp=2), wrong)
    assert isinstance(caught.value.__cause__, InternalError)


def _segments() -> tuple[list[str], list[str]]:
    """Descriptors and mappings of segments that this process has."""
    name = "memfd:pdserve-exchange"
    folder = Path("/proc/self/fd")
    links = []
    for entry in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the listing
            links.append(os.readlink(entry))
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [link for link in links if name in link], [line for line in maps if name in line]


def _look_for_segments(world: World) -> tuple[int, int, int, int]:
    world.all.barrier()
    fds, maps = _segments()
    world.all.close()
    fds_after, maps_after = _segments()
    return len(fds), len(maps), len(fds_after), len(maps_after)


def test_nothing_is_left_of_a_segment_when_its_group_is_closed() -> None:
    # Python's mmap keeps a descriptor of its own.
    assert run_ranks(MeshShape(tp=2), _look_for_segments) == [(1, 1, 0, 0)] * 2


def _is_shared(world: World) -> bool:
    return world.all.shared is not None


def test_ranks_of_one_host_share_memory() -> None:
    assert run_ranks(MeshShape(tp=2), _is_shared) == [True, True]


def _pretend_another_host(world: World) -> tuple[list[str], int]:
    """Ranks 0 and 1 on one host, 2 on another; groups of all and of the first two."""
    segments.place = lambda: "there" if world.mesh.rank == 2 else "here"
    groups = {"all": (0, 1, 2)}
    if world.mesh.rank < 2:
        groups["pair"] = (0, 1)
    assert world.all.host is not None
    opened = shared_memory.share(groups, world.mesh.rank, world.all.host)
    total = opened["pair"].all_reduce(torch.ones(1)) if "pair" in opened else torch.zeros(1)
    return sorted(opened), int(total)


def test_groups_over_hosts_keep_their_sockets_and_others_do_not() -> None:
    found = run_ranks(MeshShape(tp=3), _pretend_another_host)
    assert found == [(["pair"], 2), (["pair"], 2), ([], 0)]


def _pretend_closed_door(world: World) -> list[str]:
    if world.mesh.rank == 1:
        segments.open_segment = lambda pid, segment: None
    assert world.all.host is not None
    return list(shared_memory.share({"all": (0, 1)}, world.mesh.rank, world.all.host))


def test_a_group_shares_with_all_its_ranks_or_not_at_all() -> None:
    assert run_ranks(MeshShape(tp=2), _pretend_closed_door) == [[], []]


def _pretend_no_compiler(world: World) -> list[str]:
    if world.mesh.rank == 0:
        shared_memory._load = lambda: None
    assert world.all.host is not None
    return list(shared_memory.share({"all": (0, 1)}, world.mesh.rank, world.all.host))


def test_without_a_compiler_ranks_stay_with_gloo() -> None:
    assert run_ranks(MeshShape(tp=2), _pretend_no_compiler) == [[], []]
