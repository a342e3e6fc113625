"""What stands in for all that P's writer and D's reservations stand on: time, lanes, digests.

It decides nothing: `push_world` says what lands, what fails, and when either side is told.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from pdserve.connectors.conformance.values import make_shape
from pdserve.connectors.transfer.mover import Job, JobEnd, Remote
from pdserve.connectors.transfer.peering import PeerId
from pdserve.connectors.transfer.protocol import Region
from pdserve.wire.ids import BlockId, EngineId, Incarnation, RequestId
from pdserve.wire.transfer import EngineRef, KVHandoff

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

LEASE_S = 6.0
SHAPE = make_shape(num_layers=2, num_kv_heads=1, num_blocks=64)
N = 40
EDGES = (0, 20, N)
POOL = Region(address=0, stride_bytes=2 * 2 * 16 * 8 * 4, num_units=64, memory="DRAM", device=0)
NONCES = ("n1", "n2", "n3")
P = EngineRef(engine_id=EngineId("P"), incarnation=Incarnation("p"), endpoints=(), shape=SHAPE)
D = EngineRef(engine_id=EngineId("D"), incarnation=Incarnation("d"), endpoints=(), shape=SHAPE)
PEER = PeerId(P, 0)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic_s(self) -> float:
        return self.now_s


class Nic:
    """In the place of the lanes: jobs wait, are posted, land or fail, and are told."""

    def __init__(self) -> None:
        self.waiting: list[Job] = []
        self.posted: list[Job] = []
        self.told: deque[Callable[[], None]] = deque()
        self.untold: Counter[Hashable] = Counter()
        self.agent = b"agent 0"
        self.known: set[bytes] = set()
        self.is_fence = True

    def can_land(self, job: Job) -> bool:
        """Whether the agent that it is written to still is, or is not needed."""
        return job.remote.metadata == self.agent or not self.is_fence

    def meet(self, metadata: bytes, pool: Region) -> Remote:
        self.known.add(metadata)
        return Remote(metadata, pool)

    def forget(self, remote: Remote) -> None:
        assert not any(job.remote is remote for job in self.posted + self.waiting)
        self.known.remove(remote.metadata)

    def warm_up(
        self, remote: Remote, source: Region, *, tag: Hashable, on_settled: Callable[[Any], None]
    ) -> None:
        self.told.append(lambda: on_settled(None))

    def submit(self, job: Job) -> None:
        self.waiting.append(job)

    def abandon(self, tag: Hashable) -> int:
        self.waiting = [job for job in self.waiting if job.tag is not tag]
        return sum(job.tag is tag for job in self.posted) + self.untold[tag]

    def end(self, job: Job, failure: str | None) -> None:
        self.posted.remove(job)
        self.untold[job.tag] += 1

        def tell() -> None:
            self.untold[job.tag] -= 1
            job.on_settled(
                JobEnd(
                    failure=failure,
                    value=None,
                    posted_s=0.0,
                    moved_s=0.0,
                    settled_s=0.0,
                    num_descriptors=1,
                )
            )

        self.told.append(tell)


class Later:
    """In the place of the thread for digests."""

    def __init__(self) -> None:
        self.todo: deque[Callable[[], Callable[[], None]]] = deque()

    def submit(self, work: Callable[[], Callable[[], None]], request_id: str) -> None:
        self.todo.append(work)

    def run(self) -> None:
        if self.todo:
            self.todo.popleft()()()


def words(num_blocks: int, value: int) -> bytes:
    """Digests: of bytes that came as they were, the number of layers in the sum."""
    return np.full(num_blocks, value, dtype="<u8").tobytes()


class PDigests:
    """P's."""

    def take(self, *_: Any, **__: Any) -> None:
        pass

    def of(self, *_: Any, **__: Any) -> bytes:
        return words(3, SHAPE.num_layers)


def places_of(units: Iterable[int], unit_bytes: int) -> set[tuple[int, int, int]]:
    """The (block, layer, token) whose bytes such units of a pool hold."""
    vector_bytes = SHAPE.head_dim * SHAPE.dtype_bytes
    bounds = [(u * unit_bytes // vector_bytes, (u + 1) * unit_bytes // vector_bytes) for u in units]
    dims = (SHAPE.num_blocks, SHAPE.num_layers, SHAPE.num_planes, SHAPE.block_size)
    places = (np.unravel_index(v, dims) for first, end in bounds for v in range(first, end))
    return {(int(block), int(layer), int(token)) for block, layer, _, token in places}


@dataclass
class Request:
    """One nonce on both sides."""

    nonce: str
    number: int
    is_expected: bool = False
    is_registered: bool = False
    is_withdrawn: bool = False
    num_steps: int = 0
    is_in_step: bool = False
    is_granted: bool = False
    is_stopped: bool = False
    is_settled: bool = False
    load_id: int = 0
    reports: list[Any] = field(default_factory=list)

    @property
    def request_id(self) -> RequestId:
        return RequestId(f"p-{self.nonce}")

    @property
    def p_blocks(self) -> list[BlockId]:
        return [BlockId(self.number * 10 + i) for i in range(3)]

    @property
    def d_blocks(self) -> list[BlockId]:
        return [BlockId(self.number * 10 + 5 + i) for i in range(3)]

    @property
    def handoff(self) -> KVHandoff:
        return KVHandoff(
            engine_id=P.engine_id,
            incarnation=P.incarnation,
            nonce=self.nonce,
            request_id=self.request_id,
            endpoints=[],
            block_ids=self.p_blocks,
            shape=SHAPE,
            num_tokens=N,
            layout_digest="",
            lease_s=LEASE_S,
            prompt_digest="",
        )
