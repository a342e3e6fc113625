"""Lanes over an agent that does what a test says, and what they told."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from pdserve.connectors.nixl.agent import AgentError, Prepared, Transfer
from pdserve.connectors.nixl.lanes import Lanes
from pdserve.connectors.transfer.protocol import Region
from pdserve.connectors.transfer.seams import Direction, Job, JobEnd, Remote
from pdserve.observe.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

UNIT_BYTES, NUM_UNITS = 64, 1024
POOL = Region(1 << 20, UNIT_BYTES, NUM_UNITS, "DRAM", 0)
SCRATCH = Region(1 << 10, 4096, 1, "DRAM", 0)


class World:
    """What the agents of all lanes do.

    Attributes:
        stuck: First units of transfers that never end.
        broken: Peers whose transfers fail.
        gate: Posts wait for it.
        posted: (lane, peer, first local unit) in order.
        closed: Lanes whose agent was destroyed, in order.
        parted: Those of them that were said to be reading.
        progressed: Lanes whose agent was driven for the sake of others, in order.
    """

    def __init__(self) -> None:
        self.stuck: set[int] = set()
        self.broken: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.posted: list[tuple[int, str, int]] = []
        self.closed: list[int] = []
        self.parted: list[int] = []
        self.progressed: list[int] = []
        self.added: list[tuple[int, str]] = []


class Agent:
    """One lane's."""

    def __init__(self, world: World, lane: int) -> None:
        self._world, self._lane = world, lane
        self._peers: dict[int, str] = {}
        self._is_closed = False

    def add_peer(self, metadata: bytes) -> str:
        name = metadata.decode()
        if name in self._peers.values():
            raise AgentError("known")
        self._world.added.append((self._lane, name))
        return name

    def prepare(self, region: Region, peer: str | None = None) -> Prepared:
        if peer is None:
            return Prepared(0)
        handle = len(self._peers) + 1
        self._peers[handle] = peer
        return Prepared(handle)

    def unprepare(self, prepared: Prepared) -> None:
        del self._peers[prepared]

    def remove_peer(self, peer: str) -> None:
        assert peer not in self._peers.values()

    def read_once(
        self, local: Region, peer: str, remote: Region, num_bytes: int
    ) -> tuple[Transfer, bool]:
        return Transfer(-1), peer not in self._world.broken

    def post(
        self,
        direction: Direction,
        local: Prepared,
        local_units: npt.NDArray[np.int32],
        remote: Prepared,
        remote_units: npt.NDArray[np.int32],
    ) -> tuple[Transfer, bool]:
        world, peer, first = self._world, self._peers[remote], int(local_units[0])
        world.gate.wait(10.0)
        world.posted.append((self._lane, peer, first))
        if peer in world.broken:
            raise AgentError(f"{peer} is gone")
        return Transfer(first), first not in world.stuck

    def poll(self, transfer: Transfer) -> bool:
        assert not self._is_closed
        return transfer not in self._world.stuck and transfer != -1

    def release(self, transfer: Transfer) -> None:
        return None

    def progress(self) -> None:
        self._world.progressed.append(self._lane)

    def close(self, *, is_reading: bool = False) -> None:
        self._is_closed = True
        self._world.closed.append(self._lane)
        if is_reading:
            self._world.parted.append(self._lane)


class Bench:
    """Lanes, and what they told."""

    def __init__(self, make_agent: Callable[[int], Any], **fields: Any) -> None:
        self.news = threading.Event()
        self.told: dict[int, JobEnd] = {}
        self.slow: list[int] = []
        arguments = {"num_lanes": 2, "quarantine_s": 30.0, "pool": POOL, "scratch": SCRATCH}
        self.lanes = Lanes(
            make_agent=make_agent,
            wake=self.news.set,
            clock=SystemClock(),
            **(arguments | fields),
        )

    def meet(self, name: str) -> Remote:
        return self.lanes.meet(name.encode(), POOL)

    def submit(
        self,
        remote: Remote,
        first: int,
        *,
        tag: object = None,
        num_units: int = 4,
        then: Callable[[], object] | None = None,
        direction: Direction = Direction.READ,
    ) -> Job:
        units = np.arange(first, first + num_units, dtype=np.int32)
        job = Job(
            tag=tag,
            direction=direction,
            remote=remote,
            unit_bytes=UNIT_BYTES,
            local_units=units,
            remote_units=units,
            on_settled=lambda settled: self.told.__setitem__(first, settled),
            then=then,
            on_slow=lambda: self.slow.append(first),
        )
        self.lanes.submit(job)
        return job

    def until(self, condition: Callable[[], object], timeout_s: float = 30.0) -> None:
        ends_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < ends_s, f"{self.told} {self.slow}"
            self.news.wait(0.01)
            self.news.clear()
            self.lanes.deliver()


class Maker:
    """Makes agents, but none for the lanes in `broken`."""

    def __init__(self, world: World, *broken: int) -> None:
        self._world = world
        self.broken = set(broken)
        self.asked: list[int] = []

    def __call__(self, lane: int) -> Agent:
        self.asked.append(lane)
        if lane in self.broken:
            raise AgentError("no memory is left")
        return Agent(self._world, lane)
