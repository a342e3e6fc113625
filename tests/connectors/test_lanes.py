"""Lanes alone: who posts what, what is told of it, and what a fence ends.

NIXL is an agent that does what a test says, except in the last tests.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from pdserve.connectors.nixl.agent import NixlAgent
from pdserve.connectors.transfer.protocol import Region
from pdserve.connectors.transfer.seams import Direction, Job, JobEnd, Remote, WarmUp
from pdserve.errors import InternalError
from tests.connectors.lane_bench import NUM_UNITS, SCRATCH, UNIT_BYTES, Agent, Bench, Maker, World

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def bench(world: World) -> Iterator[Bench]:
    made = Bench(lambda lane: Agent(world, lane))
    yield made
    world.gate.set()
    assert made.lanes.close(5.0)


def test_jobs_settle_with_what_was_done_to_their_bytes(bench: Bench) -> None:
    peer = bench.meet("p")
    job = bench.submit(peer, 8, then=lambda: "digest")
    bench.until(lambda: bench.told)
    settled = bench.told[8]
    assert (settled.failure, settled.value, settled.num_descriptors) == (None, "digest", 1)
    assert settled.posted_s <= settled.moved_s <= settled.settled_s
    assert job.posted_s == settled.posted_s
    assert bench.lanes.abandon(job.tag) == 0


def test_all_lanes_work_on_the_jobs_of_one_peer(bench: Bench, world: World) -> None:
    peer = bench.meet("p")
    both = threading.Barrier(2, timeout=5.0)
    for first in (0, 8):
        bench.submit(peer, first, then=both.wait)  # ends only if two run at once
    bench.until(lambda: len(bench.told) == 2)
    assert {lane for lane, _, _ in world.posted} == {0, 1}


def test_peers_are_served_in_turn(world: World) -> None:
    bench = Bench(lambda lane: Agent(world, lane), num_lanes=1)
    world.gate.clear()
    many, one = bench.meet("many"), bench.meet("one")
    for first in range(0, 80, 8):
        bench.submit(many, first)
    bench.submit(one, 100)
    world.gate.set()
    bench.until(lambda: len(bench.told) == 11)
    assert [peer for _, peer, _ in world.posted].index("one") <= 2
    assert bench.lanes.close(5.0)


def test_a_peer_that_hangs_leaves_every_lane_to_the_others(bench: Bench, world: World) -> None:
    hangs, works = bench.meet("hangs"), bench.meet("works")
    world.stuck.update(range(0, 80, 8))
    for first in range(0, 80, 8):
        bench.submit(hangs, first)
    bench.until(lambda: len(bench.slow) == 4)  # two on each lane, and no more
    bench.submit(works, 100)
    bench.until(lambda: 100 in bench.told)
    assert len(bench.slow) == 4
    assert len(bench.told) == 1
    world.stuck.clear()
    bench.until(lambda: len(bench.told) == 11)


def test_what_was_abandoned_before_it_was_posted_never_is(bench: Bench, world: World) -> None:
    peer = bench.meet("p")
    world.stuck.update({0, 8, 16, 24})
    for first in range(0, 80, 8):
        bench.submit(peer, first, tag="load")
    bench.until(lambda: len(bench.slow) == 4)
    assert bench.lanes.abandon("load") == 4
    world.stuck.clear()
    bench.until(lambda: len(bench.told) == 4)
    assert bench.lanes.abandon("load") == 0
    assert len(world.posted) == 4
    assert not world.closed  # what ends by itself costs no agent


def test_an_abandoned_job_that_is_stuck_is_told_only_once_its_agent_is_gone(
    bench: Bench, world: World
) -> None:
    peer = bench.meet("p")
    world.stuck.add(0)
    bench.submit(peer, 0, tag="load", then=lambda: pytest.fail("nobody wants it"))
    bench.until(lambda: bench.slow)
    bench.lanes.abandon("load")
    began_s = time.monotonic()
    bench.until(lambda: bench.told)
    assert world.closed == [world.posted[0][0]]
    assert time.monotonic() - began_s > 0.4
    assert bench.told[0].failure is not None
    assert "its NIXL agent was destroyed" in bench.told[0].failure
    assert bench.lanes.take_num_resets() == 1


@pytest.mark.slow
@pytest.mark.parametrize("direction", Direction)
def test_an_agent_that_is_destroyed_amid_a_read_parts_gently_with_its_peer(
    bench: Bench, world: World, direction: Direction
) -> None:
    world.stuck.add(0)
    bench.submit(bench.meet("p"), 0, tag="load", direction=direction)
    bench.until(lambda: bench.slow)
    bench.lanes.abandon("load")
    bench.until(lambda: bench.told)
    assert world.parted == (world.closed if direction is Direction.READ else [])


def test_a_fenced_lane_serves_on_with_a_new_agent_and_the_other_one_all_the_time(
    bench: Bench, world: World
) -> None:
    stuck, works = bench.meet("stuck"), bench.meet("works")
    world.stuck.add(0)
    bench.submit(stuck, 0, tag="load")
    bench.until(lambda: bench.slow)
    bench.lanes.abandon("load")
    first = 8
    while 0 not in bench.told:  # the other lane, and this one until a new agent is due
        bench.told.pop(first, None)
        bench.submit(works, first)
        bench.until(lambda n=first: n in bench.told)  # type: ignore[misc]
        assert bench.told[first].failure is None
        first += 8 if first < 800 else -792
    fenced = world.closed[0]
    world.posted.clear()
    both = threading.Barrier(2, timeout=5.0)
    for first in (900, 908):
        bench.submit(stuck, first, then=both.wait)
    bench.until(lambda: 900 in bench.told and 908 in bench.told)
    assert fenced in {lane for lane, _, _ in world.posted}
    assert world.added.count((fenced, "stuck")) == 2  # it knew nobody any more
    assert world.closed == [fenced]


def test_an_agent_that_is_renewed_lets_what_is_in_flight_end_and_takes_nothing_before(
    world: World,
) -> None:
    bench = Bench(lambda lane: Agent(world, lane), num_lanes=1)
    peer = bench.meet("p")
    world.stuck.add(0)
    bench.submit(peer, 0)
    bench.until(lambda: bench.slow)
    bench.lanes.renew("strangers")
    bench.submit(peer, 8)
    bench.until(lambda: world.posted == [(0, "p", 0)])
    world.stuck.clear()
    bench.until(lambda: len(bench.told) == 2)
    assert [settled.failure for settled in bench.told.values()] == [None, None]
    assert world.closed == [0]
    assert world.added == [(0, "p"), (0, "p")]  # it knew nobody any more
    assert bench.lanes.take_num_resets() == 1
    bench.lanes.close(5.0)


def test_all_lanes_drive_their_idle_agents_when_they_are_told_to(
    bench: Bench, world: World
) -> None:
    bench.submit(bench.meet("p"), 0)
    bench.until(lambda: bench.told)
    bench.lanes.tidy()
    bench.until(lambda: sorted(world.progressed) == [0, 1])


@pytest.mark.slow
def test_beside_others_in_flight_a_stuck_job_is_fenced_after_the_quarantine(world: World) -> None:
    bench = Bench(lambda lane: Agent(world, lane), num_lanes=1, quarantine_s=0.8)
    stuck, waits = bench.meet("stuck"), bench.meet("waits")
    world.stuck.update({0, 8})
    bench.submit(stuck, 0, tag="lost")
    bench.submit(waits, 8, tag="wanted")
    bench.until(lambda: len(bench.slow) == 2)
    bench.lanes.abandon("lost")
    began_s = time.monotonic()
    bench.until(lambda: len(bench.told) == 2)
    assert time.monotonic() - began_s > 0.75  # the other one had that long to end
    assert all(settled.failure for settled in bench.told.values())
    world.stuck.clear()
    bench.submit(waits, 16)
    bench.until(lambda: 16 in bench.told)
    assert bench.told[16].failure is None
    assert bench.lanes.close(5.0)


def test_a_failed_post_is_a_value_and_the_peer_is_learned_again(bench: Bench, world: World) -> None:
    peer = bench.meet("p")
    world.broken.add("p")
    bench.submit(peer, 0)
    bench.until(lambda: 0 in bench.told)
    assert bench.told[0].failure == "p is gone"
    world.broken.clear()
    both = threading.Barrier(2, timeout=5.0)
    for first in (8, 16):
        bench.submit(peer, first, then=both.wait)
    bench.until(lambda: len(bench.told) == 3)
    assert bench.told[8].failure is None
    assert len(world.added) == 3  # each lane once, and once more the one that failed


def test_a_peer_that_goes_on_failing_is_not_learned_again_for_each_job(world: World) -> None:
    bench = Bench(lambda lane: Agent(world, lane), num_lanes=1)
    peer = bench.meet("p")
    world.broken.add("p")
    for first in range(0, 400, 8):
        bench.submit(peer, first)
    bench.until(lambda: len(bench.told) == 50)
    assert all(settled.failure == "p is gone" for settled in bench.told.values())
    assert len(world.added) <= 3
    assert bench.lanes.close(5.0)


def test_units_that_a_peer_does_not_have_are_never_posted(bench: Bench, world: World) -> None:
    small = bench.lanes.meet(b"small", Region(0, UNIT_BYTES, 10, "DRAM", 0))
    bench.submit(small, 8)
    bench.until(lambda: bench.told)
    assert "units 8 to 11" in (bench.told[8].failure or "")
    assert not world.posted


def test_units_that_this_side_does_not_have_end_the_engine(world: World) -> None:
    bench = Bench(lambda lane: Agent(world, lane))
    bench.submit(bench.meet("p"), NUM_UNITS - 2)
    with pytest.raises(InternalError, match="lane died"):
        bench.until(lambda: False)
    assert not world.posted
    assert bench.lanes.close(5.0)


def test_without_an_agent_jobs_and_warm_ups_fail_as_values_until_there_is_one(
    world: World,
) -> None:
    make = Maker(world, 0, 1)
    bench = Bench(make)
    peer = bench.meet("p")
    warm: list[str | None] = []
    bench.lanes.warm_up(WarmUp("p", peer, SCRATCH, warm.append))
    for first in range(0, 80, 8):
        bench.submit(peer, first)
    bench.until(lambda: warm and len(bench.told) == 10)
    assert warm == ["no memory is left"]
    assert {settled.failure for settled in bench.told.values()} == {"no memory is left"}
    assert len(make.asked) <= 4  # not for each job
    make.broken.clear()

    def is_served() -> bool:
        bench.told.pop(100, None)
        bench.submit(peer, 100)
        bench.until(lambda: 100 in bench.told)
        return bench.told[100].failure is None

    bench.until(is_served)
    assert bench.lanes.close(5.0)


def test_a_lane_without_an_agent_leaves_the_jobs_to_the_other(world: World) -> None:
    bench = Bench(Maker(world, 0))
    peer = bench.meet("p")
    for first in range(0, 400, 8):
        bench.submit(peer, first)
        bench.until(lambda n=first: n in bench.told)  # type: ignore[misc]
    assert not [settled.failure for settled in bench.told.values() if settled.failure]
    assert {lane for lane, _, _ in world.posted} == {1}
    assert bench.lanes.close(5.0)


@pytest.mark.slow
def test_a_fence_after_which_no_agent_can_be_made_ends_nothing_else(world: World) -> None:
    make = Maker(world)
    bench = Bench(make, num_lanes=1)
    peer = bench.meet("p")
    world.stuck.add(0)
    bench.submit(peer, 0, tag="load")
    bench.until(lambda: bench.slow)
    make.broken.add(0)
    bench.lanes.abandon("load")
    bench.until(lambda: 0 in bench.told)
    bench.submit(peer, 8)
    bench.until(lambda: 8 in bench.told)
    assert bench.told[8].failure == "no memory is left"
    assert world.closed == [0]
    make.broken.clear()
    time.sleep(0.25)  # it rests before it asks again
    bench.submit(peer, 16)
    bench.until(lambda: 16 in bench.told)
    assert bench.told[16].failure is None
    assert bench.lanes.close(5.0)


def test_a_warm_up_is_told_once_for_all_lanes_and_can_be_given_up(
    bench: Bench, world: World
) -> None:
    told: list[str | None] = []
    bench.lanes.warm_up(WarmUp("p", bench.meet("p"), SCRATCH, told.append))
    bench.until(lambda: told)
    assert told == [None]
    assert {lane for lane, _ in world.added} == {0, 1}
    world.broken.add("q")
    bench.lanes.warm_up(WarmUp("q", bench.meet("q"), SCRATCH, told.append))
    bench.until(lambda: len(world.added) == 4)
    time.sleep(0.05)
    bench.lanes.deliver()
    assert told == [None]
    bench.lanes.abandon("q")
    bench.until(lambda: len(told) == 2)
    assert told[1] == "it was given up"
    assert not world.closed


def test_a_peer_that_was_forgotten_can_be_met_again(bench: Bench, world: World) -> None:
    for number in range(3):
        peer = bench.meet("p")
        bench.submit(peer, 8 * number)
        bench.until(lambda n=number: 8 * n in bench.told)  # type: ignore[misc]
        assert bench.told[8 * number].failure is None
        bench.lanes.forget(peer)


def test_lanes_that_nobody_needs_are_no_threads() -> None:
    before = threading.active_count()
    bench = Bench(lambda lane: pytest.fail("no agent"))
    assert threading.active_count() <= before  # those of other tests may end
    assert bench.lanes.close(1.0)


def test_lanes_that_the_system_refuses_a_thread_tell_that_and_can_be_closed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(lambda lane: Agent(world, lane))
    start, places = threading._start_new_thread, [True]  # type: ignore[attr-defined]

    def refused(*arguments: object) -> int:
        if not places:
            raise RuntimeError("can't start new thread")  # CPython's words, where clone() fails
        places.pop()
        return int(start(*arguments))

    monkeypatch.setattr("threading._start_new_thread", refused)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        bench.meet("p")
    assert bench.lanes.close(10.0)


# ---- the real thing ------------------------------------------------------------------------------


def region(memory: torch.Tensor, unit_bytes: int) -> Region:
    return Region(memory.data_ptr(), unit_bytes, memory.numel() // unit_bytes, "DRAM", 0)


class RealBench:
    """Lanes over NIXL, and a target in this process that moves only while it is driven.

    Attributes:
        region: The target's memory.
        told: Ends of jobs, in order.
    """

    def __init__(self, mine: torch.Tensor, theirs: torch.Tensor, *, num_lanes: int = 2) -> None:
        scratch = torch.zeros(4096, dtype=torch.uint8)

        def make_agent(lane: int) -> NixlAgent:
            agent = NixlAgent(f"lane{lane}-{os.urandom(8).hex()}", ["UCX"])
            agent.register(region(mine, 4096))
            agent.register(region(scratch, 4096))
            return agent

        self.region = region(theirs, 4096)
        self.told: list[JobEnd] = []
        self._target = NixlAgent(f"target-{os.urandom(8).hex()}", ["UCX"])
        self._target.register(self.region)
        self._bench = Bench(
            make_agent,
            num_lanes=num_lanes,
            pool=region(mine, 4096),
            scratch=region(scratch, 4096),
        )
        self.lanes = self._bench.lanes

    def meet(self) -> Remote:
        return self.lanes.meet(self._target.metadata(), self.region)

    def submit(
        self,
        peer: Remote,
        direction: Direction,
        units: npt.NDArray[np.int32],
        *,
        unit_bytes: int = 4096,
        on_slow: Callable[[], None] | None = None,
    ) -> None:
        job = Job(0, direction, peer, unit_bytes, units, units, self.told.append, on_slow=on_slow)
        self.lanes.submit(job)

    def until(self, condition: Callable[[], object], *, is_driven: bool = True) -> None:
        ends_s = time.monotonic() + 30.0
        while not condition():
            assert time.monotonic() < ends_s
            if is_driven:
                self._target.progress()
            self.lanes.deliver()
            time.sleep(0.0005)

    def close(self) -> None:
        assert self.lanes.close(5.0)
        self._target.close()


@pytest.mark.parametrize("transports", ["", "tcp"])
@pytest.mark.parametrize("direction", Direction)
def test_bytes_move_both_ways_in_units_of_several_sizes(
    monkeypatch: pytest.MonkeyPatch, direction: Direction, transports: str
) -> None:
    if transports:
        monkeypatch.setenv("UCX_TLS", transports)
    num_bytes = 1 << 20
    mine = torch.zeros(num_bytes, dtype=torch.uint8)
    theirs = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
    if direction is Direction.WRITE:
        mine, theirs = theirs, mine
    bench = RealBench(mine, theirs)
    peer = bench.meet()
    warm: list[str | None] = []
    bench.lanes.warm_up(WarmUp(0, peer, bench.region, warm.append))
    bench.until(lambda: warm)
    assert warm == [None]
    order = np.random.default_rng(0)
    # A quarter of the memory for each size of unit, shuffled among itself.
    for quarter, unit_bytes in enumerate((256, 1024, 4096, 65536)):
        num_units = num_bytes // 4 // unit_bytes
        units = np.arange(quarter * num_units, (quarter + 1) * num_units, dtype=np.int32)
        for part in np.array_split(order.permutation(units), 3):
            bench.submit(peer, direction, part, unit_bytes=unit_bytes)
    bench.until(lambda: len(bench.told) == 12)
    assert [settled.failure for settled in bench.told] == [None] * 12
    assert torch.equal(mine, theirs)
    bench.close()


def test_a_peer_that_was_met_twice_and_forgotten_once_is_read_to_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")  # nothing moves unless the peer is driven
    mine, theirs = torch.zeros(1 << 20, dtype=torch.uint8), torch.ones(1 << 20, dtype=torch.uint8)
    bench = RealBench(mine, theirs, num_lanes=1)
    as_p, as_d = bench.meet(), bench.meet()
    units = np.arange(256, dtype=np.int32)
    bench.submit(as_p, Direction.READ, units[:1])
    bench.until(lambda: bench.told)
    slow: list[bool] = []
    bench.submit(as_d, Direction.READ, units[1:], on_slow=lambda: slow.append(True))
    bench.until(lambda: slow, is_driven=False)
    bench.lanes.forget(as_p)
    time.sleep(0.1)  # by then the lane's thread would have told of a failure
    bench.lanes.deliver()
    assert len(bench.told) == 1  # the other one goes on
    bench.until(lambda: len(bench.told) == 2)
    assert [settled.failure for settled in bench.told] == [None] * 2
    assert torch.equal(mine, theirs)
    bench.close()
