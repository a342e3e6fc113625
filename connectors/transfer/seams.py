"""The interfaces that the protocol is built on, and the facts it reports to its engine.

All its dependencies are passed in, and nothing is patched.

A `PeerLink` carries frames to and from another rank. A `Mover` copies bytes:

    submitted -> posted -> settled (all bytes are there, or failed as a value)
        `--- abandoned: never posted, or settled once nothing can land any more

A posted copy cannot be taken back; the end of an abandoned one is reported only when none of it
can land any more, whatever the mover has to do for that.

PeerError
|-- ClosedError             the other end is gone
|   `-- UnreachableError    there never was one
`-- FrameError              it sent what it should not; says which `Fault`
"""

from __future__ import annotations

import enum
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from pdserve.connectors.handover.instructions import PushNews
from pdserve.errors import PeerError
from pdserve.wire.trace import RankSlice
from pdserve.wire.transfer import ConnectorReport

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable

    import msgspec
    import numpy as np
    import numpy.typing as npt

    from pdserve.config.schema import TransferConfig
    from pdserve.connectors.base import ConnectorContext
    from pdserve.connectors.digests import BlockDigests
    from pdserve.connectors.handover.instructions import Registered, Withdrawn
    from pdserve.connectors.transfer.protocol import Process, Region
    from pdserve.observe.clock import Clock
    from pdserve.wire.ids import BlockId
    from pdserve.wire.transfer import Endpoint, Failed, Received, Settled

_NEVER = float("inf")


class Fault(enum.Enum):
    """The fault in a peer's message; a counter's label."""

    MAGIC = "magic"
    OVERSIZE = "oversize"
    UNAUTHENTIC = "unauthentic"
    MALFORMED = "malformed"
    UNEXPECTED = "unexpected"
    SLOW = "slow"


class FrameError(PeerError):
    """A peer sent an invalid message; its link is of no further use."""

    def __init__(self, fault: Fault, detail: str) -> None:
        super().__init__(f"{fault.value}: {detail}")
        self.fault = fault


class ClosedError(PeerError):
    """The peer closed the link, or the network did."""


class UnreachableError(ClosedError):
    """A link was never made."""


class PeerLink(Protocol):
    """Carries frames between two ranks, authenticated and in order, for as long as it lasts."""

    @property
    def peer(self) -> str:
        """The other end, for messages."""
        ...

    @property
    def is_authenticated(self) -> bool:
        """Whether the other end has proven that it belongs to this deployment."""
        ...

    def attach(
        self, on_message: Callable[[Any], None], on_lost: Callable[[PeerError], None]
    ) -> None:
        """Set the callbacks; called once, before anything is sent.

        Args:
            on_message: Takes each message, one of the union that this end may be sent. A
                `PeerError` that it raises ends the link.
            on_lost: Called at most once, when the link has ended and was not closed at this end:
                a `ClosedError`, or a `FrameError` if that is why.
        """

    def send(self, message: msgspec.Struct) -> None:
        """Send. It never raises: what cannot be sent ends the link."""

    def close(self) -> None:
        """End the link without calling `on_lost`; may be repeated."""


class Direction(enum.Enum):
    """Who gets the bytes: this side (READ) or the peer (WRITE)."""

    READ = "read"
    WRITE = "write"


@dataclass(frozen=True, slots=True, eq=False)
class MoverLink:
    """A link to a peer, for messages between this side's mover and the peer's.

    Attributes:
        metadata: The address of the peer's mover.
        say: Sends it a message; does nothing after the link is lost.
        exposed: Returns the blocks of this side that the peer may write now.
    """

    metadata: bytes
    say: Callable[[bytes], object]
    exposed: Callable[[], Collection[BlockId]]


@dataclass(slots=True, eq=False)
class Remote:
    """A peer's memory, once met: how its mover named it, and its pool. Compared by identity.

    Attributes:
        link: The latest to the peer, for warm-ups; the protocol sets it.
    """

    metadata: bytes
    pool: Region
    link: MoverLink | None = None


@dataclass(frozen=True, slots=True)
class ExposedMemory:
    """This side's memory, for peers.

    Attributes:
        metadata: The address by which a peer's mover finds it; changes with each fence.
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
        failure: None = all bytes are there. Otherwise the error; some bytes may be there.
        value: What the job's `then` returned; None after a failure.
        posted_s: When the job was handed to the transport.
        moved_s: When the transport had moved all bytes; `settled_s` is after `then`.
        num_descriptors: Number of descriptors after merging neighbours.
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
        tag: The key for `Mover.abandon`; several jobs may share one.
        unit_bytes: Unit size; both pools are seen as rows of such units, and it divides both.
        local_units, remote_units: int32, of equal length, paired unit by unit.
        on_settled: Called once, in the protocol's thread. Not called for a job that was abandoned
            before it was posted.
        then: Called by the mover, in any thread, once all bytes are there and before `on_settled`,
            unless the job was abandoned. It must let go of the interpreter lock while it works, and
            not raise.
        on_slow: Called at most once, like `on_settled`, if the post did not complete at once:
            the peer's side may have to be driven.
        link: The link that the job belongs to; no other may be used for it.
        posted_s: When it was posted; set by the mover, inf before. Any thread may read it.
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
    link: MoverLink | None = None
    posted_s: float = field(default=_NEVER, init=False)
    abandoned_s: float = field(default=_NEVER, init=False)

    @property
    def num_bytes(self) -> int:
        """Bytes it moves."""
        return len(self.local_units) * self.unit_bytes

    def ended(self, failure: str | None, now_s: Callable[[], float], num_runs: int) -> JobEnd:
        """End it in `num_runs` descriptors: call `then` if it succeeded and is still wanted."""
        value, moved_s = None, now_s()
        settled_s = moved_s
        if failure is None and self.then is not None and self.abandoned_s == _NEVER:
            value, settled_s = self.then(), now_s()
        return JobEnd(failure, value, min(self.posted_s, moved_s), moved_s, settled_s, num_runs)


@dataclass(slots=True, eq=False)
class WarmUp:
    """A small read, so that no request pays for the connection to a peer. Used once.

    Attributes:
        tag: The key for `Mover.abandon`.
        source: The peer's memory of which a little is read.
        on_settled: Called once: with None, or with what went wrong. The peer's side has to be
            driven until then.
    """

    tag: Hashable
    remote: Remote
    source: Region
    on_settled: Callable[[str | None], None]
    is_abandoned: bool = False


class Mover(Protocol):
    """Copies between this side's KV memory and that of peers. It calls back in one thread."""

    @property
    def num_lanes(self) -> int:
        """Number of jobs that can be at work at once."""
        ...

    @property
    def target(self) -> ExposedMemory | None:
        """The memory that peers can reach; None while there is none."""
        ...

    def meet(self, metadata: bytes, pool: Region) -> Remote:
        """Learn a peer's memory. Nothing is sent.

        A memory that was forgotten may be met again.
        """
        ...

    def forget(self, remote: Remote) -> None:
        """Drop a peer's memory, whose jobs have all settled."""

    def warm_up(self, warm_up: WarmUp) -> None:
        """Read what it says as soon as possible."""

    def submit(self, job: Job) -> None:
        """Post a job as soon as possible; jobs of one peer are posted in order."""

    def abandon(self, tag: Hashable) -> int:
        """Abandon the jobs of this tag.

        Jobs not posted yet are forgotten. For jobs in flight, `on_settled` is called once
        none of their bytes can land any more. A warm-up ends at once.

        Returns:
            Number of jobs whose `on_settled` will still be called.
        """
        ...

    def hear(self, link: MoverLink, body: bytes) -> None:
        """Take a message from the peer's mover.

        Raises:
            FrameError: The message is invalid.
        """

    def hang_up(self, link: MoverLink) -> None:
        """Take note that no more messages will come over this link."""

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
    """Base of movers that need no help from the peer's mover, and send it no messages."""

    outlives_links: ClassVar[bool] = True

    def hear(self, link: MoverLink, body: bytes) -> None:
        """See `Mover`."""
        raise FrameError(Fault.UNEXPECTED, "a message for a mover that takes none")

    def hang_up(self, link: MoverLink) -> None:
        """See `Mover`."""


class Background(Protocol):
    """Does heavy work beside the protocol, in its order."""

    def submit(self, work: Callable[[], Callable[[], None]], request_id: str) -> None:
        """Do `work` for a request; later call its return value in the protocol's thread."""


class Processes(Protocol):
    """Peers' processes, as far as this one can see them."""

    @property
    def this(self) -> Process:
        """This process's identity."""
        ...

    def writes_directly(self, process: Process) -> bool:
        """Whether it may write here regardless of this side's mover, even after a fence."""
        ...

    def is_alive(self, process: Process) -> bool:
        """Whether it still runs, in any of its threads, or this cannot be determined."""
        ...


@dataclass(frozen=True, slots=True)
class Seams:
    """See the module.

    Attributes:
        connect: Begins to connect to an endpoint, without blocking; messages sent meanwhile wait.
            Its second argument names the other end in messages. Raises `UnreachableError` if it is
            known at once that the endpoint cannot be reached.
        piece_bytes: Approximate bytes per job into which transfers are cut.
        slices: The latest work of jobs, for traces; the reporter removes it, from any thread.
    """

    context: ConnectorContext
    clock: Clock
    connect: Callable[[Endpoint, str], PeerLink]
    mover: Mover
    digests: BlockDigests
    background: Background
    processes: Processes
    piece_bytes: int
    slices: deque[RankSlice]

    @property
    def transfer(self) -> TransferConfig:
        """The settings of transfers."""
        return self.context.config.transfer

    def take_digests(
        self,
        table: tuple[list[BlockId], list[int]],
        end_token: int,
        request_id: str,
        then: Callable[[], None],
        *,
        first_token: int = 0,
        num_layers: int | None = None,
    ) -> None:
        """Have P's digests taken in the background, as `BlockDigests.take` does; then call `then`.

        Args:
            table: Blocks and their generations.
        """

        def work() -> Callable[[], None]:
            self.digests.take(*table, end_token, first_token=first_token, num_layers=num_layers)
            return then

        self.background.submit(work, request_id)

    def trace(self, direction: Direction, num_bytes: int, request_id: str, end: JobEnd) -> None:
        """Record, for traces, the work that a settled job did for a request."""
        facts: dict[str, int | float | str] = {
            "request": request_id,
            "bytes": num_bytes,
            "descriptors": end.num_descriptors,
        }
        if end.failure is not None:
            facts["failure"] = end.failure
        moved_s, track = end.moved_s, "KV lanes"
        self.slices.append(RankSlice(end.posted_s, moved_s, track, direction.value, facts))
        if end.settled_s > moved_s:
            facts = {"request": request_id}
            self.slices.append(RankSlice(moved_s, end.settled_s, track, "digest", facts))


@dataclass(slots=True, eq=False)
class Facts:
    """The facts to report, each once.

    Attributes:
        received, failed: Ends of loads and reservations here.
        registered, withdrawn: Facts about pushes from here.
        faults: Counts of events that should stay rare, by name.
    """

    received: list[Received] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)
    registered: list[Registered] = field(default_factory=list)
    withdrawn: list[Withdrawn] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(
            self.received or self.failed or self.registered or self.withdrawn or self.faults
        )

    def take(self, rank: int, settled: list[Settled]) -> ConnectorReport:
        """Return them as the report of a rank, with the leases that have settled there."""
        news = PushNews(rank=rank, registered=self.registered, withdrawn=self.withdrawn)
        report = ConnectorReport(
            settled=settled,
            received=self.received,
            failed=self.failed,
            faults=self.faults,
            payloads=news.to_payloads(),
        )
        self.received, self.failed, self.registered, self.withdrawn = [], [], [], []
        self.faults = Counter()
        return report
