"""Writes to ranks of D: whose memory it is, and what is written where.

A `Destination` is one link to one rank of D. What the mover knows of that rank's memory is kept
between pushes, for wiring up takes milliseconds, and outlives the link until nothing is written to
it any more. An `OutgoingPart` is what one push writes to one rank: it turns spans of tokens into
jobs for the mover, a few at a time; layers that come while enough is under way are posted together.
It knows neither messages nor leases.
"""

from __future__ import annotations

import enum
import functools
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdserve.connectors.pieces import pieces
from pdserve.connectors.transfer.protocol import MoverFrame
from pdserve.connectors.transfer.seams import Direction, Job, MoverLink, WarmUp

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    import msgspec

    from pdserve.connectors.pieces import Pieces
    from pdserve.connectors.slicing import Route
    from pdserve.connectors.transfer.protocol import Hello, Register
    from pdserve.connectors.transfer.seams import JobEnd, Mover, Remote, Seams
    from pdserve.wire.ids import BlockId

_MAX_JOBS = 4


@dataclass(slots=True, eq=False)
class Destination:
    """One connection to a rank of D.

    Attributes:
        send: Sends it a message; after the connection is lost it does nothing.
        link: The same for the mover.
    """

    hello: Hello
    send: Callable[[msgspec.Struct], None]
    link: MoverLink = field(init=False)

    def __post_init__(self) -> None:
        self.link = MoverLink(
            self.hello.agent_metadata,
            say=lambda body: self.send(MoverFrame(body)),
            exposed=frozenset,  # a D writes nothing
        )

    @property
    def life(self) -> tuple[str, str, int]:
        """Engine, its incarnation, and rank; equal for all connections of one rank."""
        return self.hello.engine_id, self.hello.incarnation, self.hello.rank


@dataclass(slots=True, eq=False)
class _Memory:
    """The memory of one agent of D.

    Attributes:
        connections: The connections whose pushes may still write to it.
        users: The users that write to it.
        waiting: The users that still wait for the warm-up.
    """

    remote: Remote
    is_warm: bool = False
    is_warming: bool = False
    connections: set[Destination] = field(default_factory=set)
    users: set[Hashable] = field(default_factory=set)
    waiting: dict[Hashable, Callable[[str | None], None]] = field(default_factory=dict)


class Destinations:
    """The known memories of Ds, by agent."""

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self._memories: dict[bytes, _Memory] = {}

    def use(
        self,
        destination: Destination,
        user: Hashable,
        on_ready: Callable[[str | None], None],
    ) -> Remote:
        """Learn the memory of a destination, and have the mover warm up to it.

        Args:
            user: Until it is `let_go`, and `destination` is `lost`, the memory stays known.
            on_ready: Called once, now or later: None, or why it cannot be written. Not called
                for a user that has let go.
        """
        hello = destination.hello
        memory = self._memories.get(hello.agent_metadata)
        if memory is None:
            remote = self._mover.meet(hello.agent_metadata, hello.pool)
            memory = self._memories[hello.agent_metadata] = _Memory(remote)
        memory.connections.add(destination)
        memory.remote.link = destination.link
        memory.users.add(user)
        if memory.is_warm:
            on_ready(None)
            return memory.remote
        memory.waiting[user] = on_ready
        if not memory.is_warming:
            self._warm_up(memory)
        return memory.remote

    def let_go(self, user: Hashable) -> None:
        """Let go of a user that writes nothing more and has nothing in flight. O(memories).

        Its D may by now have another agent, and so another memory.
        """
        memory = next((each for each in self._memories.values() if user in each.users), None)
        if memory is None:
            return
        memory.users.discard(user)
        memory.waiting.pop(user, None)
        self._forget_if_unused(memory)

    def lost(self, destination: Destination) -> None:
        """Forget the memory of a lost connection, now or once it has no users."""
        memory = self._memories.get(destination.hello.agent_metadata)
        if memory is not None:
            memory.connections.discard(destination)
            self._forget_if_unused(memory)

    def _warm_up(self, memory: _Memory) -> None:
        """Read a little of the pool itself: any bytes will do, and none are changed."""
        memory.is_warming = True
        on_settled = functools.partial(self._on_warm, memory)
        self._mover.warm_up(WarmUp(memory, memory.remote, memory.remote.pool, on_settled))

    def _on_warm(self, memory: _Memory, failure: str | None) -> None:
        memory.is_warming = False
        memory.is_warm = failure is None
        waiting, memory.waiting = memory.waiting, {}
        for on_ready in waiting.values():
            on_ready(failure)
        self._forget_if_unused(memory)

    def _forget_if_unused(self, memory: _Memory) -> None:
        key = memory.remote.metadata
        if memory.users or memory.connections or self._memories.get(key) is not memory:
            return
        if memory.is_warming:
            self._mover.abandon(memory)  # it is forgotten when that has been told
            return
        del self._memories[key]
        self._mover.forget(memory.remote)


class OutgoingState(enum.Enum):
    """PARKED -> ACCEPTED -> PUSHED -> TAKEN, or OVER: D was told that it failed."""

    PARKED = "parked"
    ACCEPTED = "accepted"
    PUSHED = "pushed"
    TAKEN = "taken"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens to write, in all of this rank's layers or in some (absolute)."""

    first_token: int
    end_token: int
    layers: range | None


@dataclass(slots=True, eq=False)
class _Begun:
    """A span of which `num_jobs` have not settled."""

    span: Span
    num_jobs: int = 0


class OutgoingPart:
    """The writes of a push to one rank of D. Compared by identity; it is the tag of its jobs.

    Args:
        on_settled: Called when a write has ended, after this object is up to date.
        on_slow: Called for each write that goes on after its post.

    Attributes:
        remote, is_ready: D's memory, and whether the mover has warmed up to it.
        num_jobs: Number of jobs submitted and not settled.
        last_s: When the last byte was written.
        needs_agent: Whether D was told that its agent is needed.
        until_s: Deadline for D's answer.
        num_bytes, num_descriptors: Totals written.
        reported: Tokens and layers that D knows to be written, as in `Progress`.
    """

    def __init__(
        self,
        seams: Seams,
        destination: Destination,
        register: Register,
        route: Route,
        *,
        on_settled: Callable[[OutgoingPart, JobEnd], None],
        on_slow: Callable[[OutgoingPart], None],
    ) -> None:
        self.destination = destination
        self.register = register
        self.route = route
        self.remote: Remote | None = None
        self.is_ready = False
        self.state = OutgoingState.PARKED
        self.num_jobs = 0
        self.last_s = 0.0
        self.until_s = float("inf")
        self.needs_agent = False
        self.was_rewritten = False
        self.num_bytes = 0
        self.num_descriptors = 0
        self.reported = (0, 0)
        self._seams = seams
        self._on_settled = on_settled
        self._on_slow = on_slow
        self._todo: deque[Span] = deque()
        self._begun: list[_Begun] = []
        self._jobs: set[Job] = set()

    @property
    def is_through(self) -> bool:
        """Whether D needs nothing more: it has the KV, or was told of the failure."""
        return self.state in (OutgoingState.TAKEN, OutgoingState.OVER)

    @property
    def first_unsettled(self) -> Span | None:
        """The first span that is not written yet; all spans added before it are."""
        if self._begun:
            return self._begun[0].span
        return self._todo[0] if self._todo else None

    @property
    def is_idle(self) -> bool:
        """Whether all added spans are written."""
        return not (self._todo or self.num_jobs)

    @property
    def posted_since_s(self) -> float:
        """When the oldest unfinished write was posted; inf if there is none."""
        return min((job.posted_s for job in self._jobs), default=float("inf"))

    def add(self, span: Span) -> None:
        """Add a span, to be written after those added before."""
        last = self._todo[-1] if self._todo else None
        if (
            last is not None
            and last.layers is not None
            and span.layers is not None
            and (last.first_token, last.end_token) == (span.first_token, span.end_token)
        ):
            layers = range(last.layers.start, span.layers.stop)
            self._todo[-1] = Span(span.first_token, span.end_token, layers)
            return
        self._todo.append(span)

    def pump(self, block_ids: Sequence[BlockId]) -> None:
        """Submit waiting spans, unless enough is under way.

        Args:
            block_ids: P's table, at least up to the end of the waiting spans.

        Raises:
            PeerError: A span cannot be written; D's table does not fit.
        """
        while self._todo and self.num_jobs < _MAX_JOBS:
            span, register = self._todo.popleft(), self.register
            if self.remote is None:
                continue
            units = pieces(
                self._seams.context.shape,
                self.destination.hello.shape,
                self.route,
                block_ids,
                register.block_ids,
                first_token=max(span.first_token, register.first_token),
                num_tokens=span.end_token,
                layers=span.layers,
            )
            begun = _Begun(span)
            for piece in units.parts(self._seams.piece_bytes):
                if not begun.num_jobs:
                    self._begun.append(begun)
                self._submit(begun, piece, self.remote)

    def stop(self) -> None:
        """Stop writing; `num_jobs` jobs still have to settle."""
        self._todo.clear()
        self.num_jobs = self._seams.mover.abandon(self)

    def _submit(self, begun: _Begun, piece: Pieces, remote: Remote) -> None:
        job = Job(
            tag=self,
            direction=Direction.WRITE,
            remote=remote,
            unit_bytes=piece.unit_bytes,
            local_units=piece.source_units,
            remote_units=piece.dest_units,
            on_settled=lambda settled: self._settled(begun, job, settled),
            on_slow=functools.partial(self._on_slow, self),
            link=self.destination.link,
        )
        self._jobs.add(job)
        begun.num_jobs += 1
        self.num_jobs += 1
        self._seams.mover.submit(job)

    def _settled(self, begun: _Begun, job: Job, settled: JobEnd) -> None:
        self._jobs.discard(job)
        self._seams.trace(Direction.WRITE, job.num_bytes, self.register.request_id, settled)
        self.num_jobs -= 1
        begun.num_jobs -= 1
        if settled.failure is None:
            if not begun.num_jobs:
                self._begun.remove(begun)
            self.last_s = max(self.last_s, settled.moved_s)
            self.num_bytes += job.num_bytes
            self.num_descriptors += settled.num_descriptors
        self._on_settled(self, settled)
