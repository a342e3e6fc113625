"""The seam between the protocol and whatever copies bytes from rank to rank.

    submitted -> posted -> settled (all bytes are there, or failed as a value)
        `--- abandoned: never posted, or settled once nothing can land any more

A posted copy cannot be taken back; an abandoned one is told to its owner only when nothing of it
can land any more, whatever the mover has to do for that.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol

from pdserve.connectors.transfer.link import Fault, FrameError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable

    import numpy as np
    import numpy.typing as npt

    from pdserve.connectors.transfer.protocol import Region
    from pdserve.wire.ids import BlockId

_NEVER = float("inf")


class Direction(enum.Enum):
    """Who gets the bytes: this side (READ) or the peer (WRITE)."""

    READ = "read"
    WRITE = "write"


@dataclass(frozen=True, slots=True, eq=False)
class MoverLink:
    """A link to a peer, for what this side's mover and the peer's have to say to one another.

    Attributes:
        metadata: How the peer's mover is found.
        say: Says something to it; after the link is lost it does nothing.
        exposed: Returns the blocks of this side that the peer may write now.
    """

    metadata: bytes
    say: Callable[[bytes], object]
    exposed: Callable[[], Collection[BlockId]]


class Remote:
    """A peer's memory, once met: how its mover named it, and its pool. Compared by identity.

    Attributes:
        link: The latest to the peer, for warm-ups; the protocol sets it.
    """

    __slots__ = ("link", "metadata", "pool")

    def __init__(self, metadata: bytes, pool: Region) -> None:
        self.metadata = metadata
        self.pool = pool
        self.link: MoverLink | None = None


@dataclass(frozen=True, slots=True)
class ExposedMemory:
    """This side's memory, for peers.

    Attributes:
        metadata: How a peer's mover finds it; another one after each fence.
        pool: All KV blocks, one unit each.
        scratch: For warm-up transfers.
    """

    metadata: bytes
    pool: Region
    scratch: Region


@dataclass(frozen=True, slots=True)
class JobEnd:
    """How a job ended; nothing of it is in flight any more.

    Attributes:
        failure: None = all bytes are there. Else what went wrong; part of them may be there.
        value: What the job's `then` returned; None after a failure.
        posted_s: When it was handed to the transport.
        moved_s: When that had moved all; `settled_s` is after `then`.
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
    """One copy. Used once; `remote`'s memory and this side's are those of the two pools.

    Attributes:
        tag: What `Mover.abandon` names it by; several may share one.
        unit_bytes: Both pools are seen as rows of units of this size; it divides both.
        local_units, remote_units: int32, as long as one another: unit by unit.
        on_settled: Called once, in the protocol's thread. Not called for a job that was abandoned
            before it was posted.
        then: Called by the mover, in any thread, once all bytes are there and before `on_settled`,
            unless the job was abandoned. It must let go of the interpreter lock while it works, and
            not raise.
        on_slow: Called at most once, like `on_settled`, if the post did not complete at once:
            the peer's side may have to be driven.
        request_id: Whose it is, for traces.
        link: The link that it belongs to; no other may serve for it.
        posted_s: Written by the mover; inf before. Anybody may read it.
    """

    tag: Hashable
    direction: Direction
    remote: Remote
    unit_bytes: int
    local_units: npt.NDArray[np.int32]
    remote_units: npt.NDArray[np.int32]
    on_settled: Callable[[JobEnd], None]
    then: Callable[[], object] | None = None
    on_slow: Callable[[], None] | None = None
    request_id: str = ""
    link: MoverLink | None = None
    posted_s: float = field(default=_NEVER, init=False)
    abandoned_s: float = field(default=_NEVER, init=False)

    @property
    def num_bytes(self) -> int:
        """Bytes it moves."""
        return len(self.local_units) * self.unit_bytes


class Mover(Protocol):
    """Copies between this side's KV memory and that of peers. It calls back in one thread."""

    @property
    def num_lanes(self) -> int:
        """How many jobs can be at work at once."""
        ...

    @property
    def target(self) -> ExposedMemory | None:
        """What peers reach this memory by; None while there is nothing."""
        ...

    def meet(self, metadata: bytes, pool: Region) -> Remote:
        """Learn a peer's memory. Nothing is sent.

        The same one may be met again once it was forgotten.
        """
        ...

    def forget(self, remote: Remote) -> None:
        """Drop a peer's memory, whose jobs have all settled."""

    def warm_up(
        self,
        remote: Remote,
        source: Region,
        *,
        tag: Hashable,
        on_settled: Callable[[str | None], None],
    ) -> None:
        """Read a little of `source` (the peer's), so that no request pays for the connection.

        `on_settled` is called once: with None, or with what went wrong. The peer's side has to be
        driven until then.
        """

    def submit(self, job: Job) -> None:
        """Post it as soon as may be; jobs of one peer in their order."""

    def abandon(self, tag: Hashable) -> int:
        """Nobody wants the jobs of this tag any more.

        Those that were not posted never are, and are forgotten. Those in flight are told to
        their `on_settled` once nothing of them can land any more. A warm-up ends at once.

        Returns:
            How many jobs will still be told to their `on_settled`.
        """
        ...

    def hear(self, link: MoverLink, body: bytes) -> None:
        """Take what the peer's mover says.

        Raises:
            FrameError: It says what it should not.
        """

    def hang_up(self, link: MoverLink) -> None:
        """Nothing is heard over this link any more."""

    def fence(self) -> None:
        """Cut this memory off from peers, and give it another `target`, now or later.

        On return, nothing that a peer posted to this side moves any more, but for what it copies
        behind the mover's back (`Processes.writes_directly`).
        """

    @property
    def outlives_links(self) -> bool:
        """Whether what a peer writes may land after `hang_up`, until a fence."""
        ...


class OneSided:
    """What is common to movers that need nothing of the peer's: they have nothing to say."""

    outlives_links: ClassVar[bool] = True

    def hear(self, link: MoverLink, body: bytes) -> None:
        """See `Mover`."""
        raise FrameError(Fault.UNEXPECTED, "a word to a mover that needs none")

    def hang_up(self, link: MoverLink) -> None:
        """See `Mover`."""
