"""Identity of a peer, and what takes part in what is exchanged with one."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from pdserve.connectors.transfer.protocol import Accept, Confirm, Fail, Progress, Pushed
    from pdserve.wire.ids import BlockId
    from pdserve.wire.transfer import EngineRef, LoadFailure


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
