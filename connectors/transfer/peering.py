"""The identity of a peer, when to contact it, and the parties of an exchange."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from pdserve.connectors.transfer.protocol import Heartbeat
from pdserve.wire.transfer import LoadFailure

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.connectors.handover.instructions import Watch
    from pdserve.connectors.transfer.protocol import Accept, Confirm, Fail, Progress, Pushed
    from pdserve.wire.ids import BlockId
    from pdserve.wire.transfer import EngineRef


MIN_REST_S, MAX_REST_S = 1.0, 60.0
_PER_LEASE = 6
_NONCES_PER_MESSAGE = 4096  # a frame has at most 1 MiB
_NEVER = float("inf")


class PeerState(enum.Enum):
    """See the docstring of `peer`."""

    IDLE = "idle"
    CONNECTING = "connecting"
    WIRING = "wiring"
    READY = "ready"
    DRAINING = "draining"
    REFUSED = "refused"


class PeerId(NamedTuple):
    """One rank of one life of an engine."""

    owner: EngineRef
    rank: int

    def __str__(self) -> str:
        if self.owner.shape.num_ranks == 1:
            return self.owner.engine_id
        return f"rank {self.rank} of {self.owner.engine_id}"


class PeerUser(Protocol):
    """Uses a peer, which stays connected until it leaves."""

    @property
    def num_unsettled(self) -> int:
        """Its jobs with this peer that have not settled; until 0 the peer is not forgotten."""
        ...

    def on_ready(self) -> None:
        """The peer can be talked to and read from."""

    def on_confirm(self, confirm: Confirm) -> None:
        """What the peer says of this user's read."""

    def on_lost(self, reason: LoadFailure, detail: str) -> None:
        """The connection has ended; the peer is tried again, perhaps after a while."""

    def on_hopeless(self, reason: LoadFailure, detail: str) -> None:
        """The peer cannot be met, now or ever."""


class PushReceiver(Protocol):
    """What D does with what a P says of pushes. Called in the transfer thread."""

    def on_ready(self, peer: PeerId) -> None:
        """It is connected (again): what waits to be said to it can be."""

    def on_accept(self, peer: PeerId, message: Accept) -> None:
        """See `Accept`."""

    def on_progress(self, peer: PeerId, message: Progress) -> None:
        """See `Progress`."""

    def on_pushed(self, peer: PeerId, message: Pushed) -> None:
        """See `Pushed`."""

    def on_fail(self, peer: PeerId, message: Fail) -> None:
        """See `Fail`."""

    def on_lost(self, peer: PeerId, reason: LoadFailure, detail: str) -> None:
        """The connection has ended, or none could be made: nothing can be asked of it now."""

    def exposed_to(self, peer: PeerId) -> set[BlockId]:
        """The blocks that it may write now."""
        ...


class Heartbeats:
    """The leases that D keeps alive at one rank of P: which, and when it says so next. Pure.

    There is one clock for all of them: that of the shortest.

    Attributes:
        due_s: When `messages` are to be said next (monotonic seconds); inf = never.
    """

    def __init__(self) -> None:
        self.due_s = _NEVER
        self._watches: dict[str, Watch] = {}

    def __bool__(self) -> bool:
        """Whether there is any lease."""
        return bool(self._watches)

    def add(self, watch: Watch, now_s: float) -> None:
        """Keep this lease alive, too. That it begins now is said by whoever adds it."""
        self._watches[watch.nonce] = watch
        self.due_s = min(self.due_s, now_s + watch.lease_s / _PER_LEASE)

    def remove(self, nonce: str) -> None:
        """Let a lease live on without heartbeats; unknown nonces are ignored."""
        self._watches.pop(nonce, None)
        if not self._watches:
            self.due_s = _NEVER

    def clear(self) -> None:
        """Let all of them."""
        self._watches.clear()
        self.due_s = _NEVER

    def messages(self) -> Iterator[Heartbeat]:
        """What renews all leases, in messages that fit into a frame."""
        nonces = list(self._watches)
        for start in range(0, len(nonces), _NONCES_PER_MESSAGE):
            yield Heartbeat(nonces[start : start + _NONCES_PER_MESSAGE])

    def plan(self, now_s: float) -> None:
        """They were said, or could not be: say them again after a sixth of the shortest lease."""
        lease_s = min((watch.lease_s for watch in self._watches.values()), default=_NEVER)
        self.due_s = now_s + lease_s / _PER_LEASE


class BackOff:
    """How long a peer that could not be met is left alone: twice as long each time. Pure.

    Attributes:
        until_s: It is not tried before this time (monotonic seconds).
    """

    def __init__(self) -> None:
        self.until_s = 0.0
        self._rest_s = 0.0
        self._why = (LoadFailure.PEER_LOST, "")

    def begin(self, reason: LoadFailure, detail: str, now_s: float) -> None:
        """Leave it alone; who comes meanwhile is turned away for this reason."""
        self._why = (reason, detail)
        self._rest_s = min(MAX_REST_S, max(MIN_REST_S, 2 * self._rest_s))
        self.until_s = now_s + self._rest_s

    def why(self, now_s: float) -> tuple[LoadFailure, str] | None:
        """Why it is left alone now, and for how long; None = it is not."""
        wait_s = self.until_s - now_s
        reason, detail = self._why
        return (reason, f"{detail}; next try in {wait_s:.1f} s") if wait_s > 0 else None

    def reset(self) -> None:
        """It was met: the next time it rests for the shortest time again."""
        self._rest_s = 0.0
