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
        """Number of its unsettled jobs with this peer, which is not forgotten until this is 0."""
        ...

    def on_ready(self) -> None:
        """Called when the peer can be sent messages and read from."""

    def on_confirm(self, confirm: Confirm) -> None:
        """Called with the peer's answer about this user's read."""

    def on_lost(self, reason: LoadFailure, detail: str) -> None:
        """Called when the connection has ended; it is tried again, perhaps after a while."""

    def on_hopeless(self, reason: LoadFailure, detail: str) -> None:
        """Called when the peer cannot be reached, now or ever."""


class PushReceiver(Protocol):
    """Handles at D the messages of a P about pushes. Called in the transfer thread."""

    def on_ready(self, peer: PeerId) -> None:
        """Called when the peer is connected (again): waiting messages can be sent."""

    def on_accept(self, peer: PeerId, message: Accept) -> None:
        """See `Accept`."""

    def on_progress(self, peer: PeerId, message: Progress) -> None:
        """See `Progress`."""

    def on_pushed(self, peer: PeerId, message: Pushed) -> None:
        """See `Pushed`."""

    def on_fail(self, peer: PeerId, message: Fail) -> None:
        """See `Fail`."""

    def on_lost(self, peer: PeerId, reason: LoadFailure, detail: str) -> None:
        """Called when the connection has ended or could not be made: P cannot be asked now."""

    def exposed_to(self, peer: PeerId) -> set[BlockId]:
        """Return the blocks that the peer may write now."""
        ...


class Heartbeats:
    """The leases that D keeps alive at one rank of P, and when the next heartbeat is due. Pure.

    All of them share one clock: that of the shortest lease.

    Attributes:
        due_s: When `messages` must be sent next (monotonic seconds); inf = never.
    """

    def __init__(self) -> None:
        self.due_s = _NEVER
        self._watches: dict[str, Watch] = {}

    def __bool__(self) -> bool:
        """Whether there is any lease."""
        return bool(self._watches)

    def add(self, watch: Watch, now_s: float) -> None:
        """Add a lease to keep alive. The caller sends its first heartbeat."""
        self._watches[watch.nonce] = watch
        self.due_s = min(self.due_s, now_s + watch.lease_s / _PER_LEASE)

    def remove(self, nonce: str) -> None:
        """Stop the heartbeats of a lease; unknown nonces are ignored."""
        self._watches.pop(nonce, None)
        if not self._watches:
            self.due_s = _NEVER

    def clear(self) -> None:
        """Stop the heartbeats of all leases."""
        self._watches.clear()
        self.due_s = _NEVER

    def messages(self) -> Iterator[Heartbeat]:
        """Yield heartbeats that renew all leases, each small enough for a frame."""
        nonces = list(self._watches)
        for start in range(0, len(nonces), _NONCES_PER_MESSAGE):
            yield Heartbeat(nonces[start : start + _NONCES_PER_MESSAGE])

    def plan(self, now_s: float) -> None:
        """Set the next heartbeat for a sixth of the shortest lease from now."""
        lease_s = min((watch.lease_s for watch in self._watches.values()), default=_NEVER)
        self.due_s = now_s + lease_s / _PER_LEASE


class BackOff:
    """The pause before an unreachable peer is tried again, doubled after each failure. Pure.

    Attributes:
        until_s: Time before which the peer is not tried (monotonic seconds).
    """

    def __init__(self) -> None:
        self.until_s = 0.0
        self._rest_s = 0.0
        self._why = (LoadFailure.PEER_LOST, "")

    def begin(self, reason: LoadFailure, detail: str, now_s: float) -> None:
        """Begin a pause, during which users are turned away for this reason."""
        self._why = (reason, detail)
        self._rest_s = min(MAX_REST_S, max(MIN_REST_S, 2 * self._rest_s))
        self.until_s = now_s + self._rest_s

    def why(self, now_s: float) -> tuple[LoadFailure, str] | None:
        """Return why there is a pause now, and for how long; None = there is none."""
        wait_s = self.until_s - now_s
        reason, detail = self._why
        return (reason, f"{detail}; next try in {wait_s:.1f} s") if wait_s > 0 else None

    def reset(self) -> None:
        """Start again from the shortest pause, since the peer was reached."""
        self._rest_s = 0.0
