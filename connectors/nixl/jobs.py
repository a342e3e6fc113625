"""What lanes are given to do, and what they say of it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdserve.wire.trace import RankSlice

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

    import numpy as np
    import numpy.typing as npt

    from pdserve.connectors.nixl.protocol import Region

# Small enough for the last-level cache, where a digest finds it, and for all lanes to work on
# one load; large enough to hide the 50 us of a post.
PIECE_BYTES = 8 << 20

_NEVER = float("inf")

MAX_SLICES = 4096
"""Kept for the next report by each kind of thread: some seconds of pieces, about 1 MB."""


class Direction(enum.Enum):
    """Who gets the bytes: this side (READ) or the peer (WRITE)."""

    READ = "read"
    WRITE = "write"


class Remote:
    """A peer's agent and its pool, once met. Compared by identity."""

    __slots__ = ("metadata", "pool")

    def __init__(self, metadata: bytes, pool: Region) -> None:
        self.metadata = metadata
        self.pool = pool


@dataclass(frozen=True, slots=True)
class Settled:
    """How a job ended; nothing of it is in flight any more.

    Attributes:
        failure: None = all bytes are there. Else what went wrong; part of them may be there.
        value: What the job's `then` returned; None after a failure.
        posted_s: When it was handed to NIXL.
        moved_s: When NIXL had moved all; `settled_s` is after `then`.
        num_descriptors: After merging neighbours.
    """

    failure: str | None
    value: object
    posted_s: float
    moved_s: float
    settled_s: float
    num_descriptors: int


@dataclass(slots=True, eq=False)
class Job:
    """One transfer. Used once; `remote`'s memory and this side's are those of the two pools.

    Attributes:
        tag: What `Lanes.abandon` names it by; several may share one.
        unit_bytes: Both pools are seen as rows of units of this size; it divides both.
        local_units, remote_units: int32, as long as one another: unit by unit.
        on_settled: Called once, in the thread that calls `Lanes.deliver`. Not called for a job
            that was abandoned before it was posted.
        then: Called in the lane once all bytes are there and before `on_settled`, unless the
            job was abandoned. It must let go of the interpreter lock while it works, and not
            raise.
        on_slow: Called at most once, like `on_settled`, if the post did not complete at once:
            the peer's agent may have to be driven.
        request_id: Whose it is, for traces.
        posted_s: Written by the lane; inf before. Anybody may read it.
    """

    tag: Hashable
    direction: Direction
    remote: Remote
    unit_bytes: int
    local_units: npt.NDArray[np.int32]
    remote_units: npt.NDArray[np.int32]
    on_settled: Callable[[Settled], None]
    then: Callable[[], object] | None = None
    on_slow: Callable[[], None] | None = None
    request_id: str = ""
    posted_s: float = field(default=_NEVER, init=False)
    abandoned_s: float = field(default=_NEVER, init=False)

    @property
    def num_bytes(self) -> int:
        """Bytes it moves."""
        return len(self.local_units) * self.unit_bytes


def slices_of(job: Job, settled: Settled) -> Iterator[RankSlice]:
    """What a lane did for a job, for traces: it moved bytes, and worked on them."""
    facts: dict[str, int | float | str] = {
        "request": job.request_id,
        "bytes": job.num_bytes,
        "descriptors": settled.num_descriptors,
    }
    if settled.failure is not None:
        facts["failure"] = settled.failure
    yield RankSlice(settled.posted_s, settled.moved_s, "KV lanes", job.direction.value, facts)
    if settled.settled_s > settled.moved_s:
        yield RankSlice(
            settled.moved_s, settled.settled_s, "KV lanes", "digest", {"request": job.request_id}
        )


@dataclass(slots=True, eq=False)
class WarmUp:
    """One small READ on each lane.

    Attributes:
        num_left: Lanes that have not said how theirs ended.
    """

    tag: Hashable
    remote: Remote
    source: Region
    on_settled: Callable[[str | None], None]
    num_left: int
    failure: str | None = None
    is_abandoned: bool = False
