"""What is written for one rank of D: which tokens of which layers, and how far it has come.

An `OutgoingPart` turns spans of tokens into jobs for the mover, a few at a time: layers that come
while enough is under way are posted together. It knows neither messages nor leases.
"""

from __future__ import annotations

import enum
import functools
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.connectors.pieces import pieces
from pdserve.connectors.transfer.seams import Direction, Job

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.connectors.slicing import Route
    from pdserve.connectors.transfer.destinations import Destination
    from pdserve.connectors.transfer.protocol import Register
    from pdserve.connectors.transfer.seams import JobEnd, Mover, Remote, Seams
    from pdserve.wire.ids import BlockId

_MAX_JOBS = 4


class OutgoingState(enum.Enum):
    """PARKED -> ACCEPTED -> PUSHED -> TAKEN, or OVER: D was told that it failed."""

    PARKED = "parked"
    ACCEPTED = "accepted"
    PUSHED = "pushed"
    TAKEN = "taken"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens to write, of all layers or of some of this rank's (absolute)."""

    first_token: int
    end_token: int
    layers: range | None


@dataclass(slots=True, eq=False)
class _Begun:
    """A span of which `num_jobs` have not settled."""

    span: Span
    num_jobs: int = 0


class OutgoingPart:
    """One rank of D. Compared by identity; it is the tag of its jobs.

    Attributes:
        remote, is_ready: Its memory, and whether the mover has warmed up to it.
        num_jobs: What is submitted and has not settled.
        last_s: When the last byte was written.
        needs_agent: D was told that its agent is needed.
        until_s: When D must have answered.
        num_bytes, num_descriptors: What was written.
        told: What D knows to be written: tokens and layers, as in `Progress`.
    """

    def __init__(self, destination: Destination, register: Register, route: Route) -> None:
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
        self.told = (0, 0)
        self._todo: deque[Span] = deque()
        self._begun: list[_Begun] = []
        self._jobs: dict[int, Job] = {}
        self._num_submitted = 0

    @property
    def is_through(self) -> bool:
        """Whether D needs nothing more of it: it has it, or was told that it failed."""
        return self.state in (OutgoingState.TAKEN, OutgoingState.OVER)

    @property
    def first_unsettled(self) -> Span | None:
        """The first span that is not written yet; what was given before it is."""
        if self._begun:
            return self._begun[0].span
        return self._todo[0] if self._todo else None

    @property
    def is_idle(self) -> bool:
        """Whether all that it was given is written."""
        return not (self._todo or self.num_jobs)

    @property
    def posted_since_s(self) -> float:
        """When the oldest write was posted that has not ended; inf if there is none."""
        return min((job.posted_s for job in self._jobs.values()), default=float("inf"))

    def add(self, span: Span) -> None:
        """Write this after what it was given before."""
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

    def pump(
        self,
        seams: Seams,
        block_ids: Sequence[BlockId],
        on_settled: Callable[[OutgoingPart, JobEnd], None],
        on_slow: Callable[[OutgoingPart], None],
    ) -> None:
        """Submit what waits, unless enough is under way.

        Args:
            on_slow: Called for each write that goes on after its post.

        Raises:
            PeerError: It cannot be written; D's table does not fit.
        """
        while self._todo and self.num_jobs < _MAX_JOBS:
            span, register = self._todo.popleft(), self.register
            if self.remote is not None:
                units = pieces(
                    seams.context.shape,
                    self.destination.hello.shape,
                    self.route,
                    block_ids,
                    register.block_ids,
                    first_token=max(span.first_token, register.first_token),
                    num_tokens=span.end_token,
                    layers=span.layers,
                )
                begun = _Begun(span)
                for piece in units.parts(seams.piece_bytes):
                    if not begun.num_jobs:
                        self._begun.append(begun)
                    begun.num_jobs += 1
                    self.num_jobs += 1
                    self._num_submitted += 1
                    number = self._num_submitted
                    job = self._jobs[number] = Job(
                        tag=self,
                        direction=Direction.WRITE,
                        remote=self.remote,
                        unit_bytes=piece.unit_bytes,
                        local_units=piece.source_units,
                        remote_units=piece.dest_units,
                        on_settled=functools.partial(
                            self._on_settled, seams, begun, number, on_settled
                        ),
                        on_slow=functools.partial(on_slow, self),
                        link=self.destination.link,
                    )
                    seams.mover.submit(job)

    def stop(self, mover: Mover) -> None:
        """Write nothing more; `num_jobs` are still to settle."""
        self._todo.clear()
        self.num_jobs = mover.abandon(self)

    def _on_settled(
        self,
        seams: Seams,
        begun: _Begun,
        number: int,
        on_settled: Callable[[OutgoingPart, JobEnd], None],
        settled: JobEnd,
    ) -> None:
        job = self._jobs.pop(number)
        seams.trace(job.direction, job.num_bytes, self.register.request_id, settled)
        self.num_jobs -= 1
        begun.num_jobs -= 1
        if settled.failure is None:
            if not begun.num_jobs:
                self._begun.remove(begun)
            self.last_s = max(self.last_s, settled.moved_s)
            self.num_bytes += job.num_bytes
            self.num_descriptors += settled.num_descriptors
        on_settled(self, settled)
