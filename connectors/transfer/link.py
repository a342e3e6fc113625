"""The seam between the protocol and whatever carries its frames from rank to rank.

PeerError
|-- ClosedError             the other end is gone
|   `-- UnreachableError    there never was one
`-- FrameError              it sent what it should not; says which `Fault`
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, Protocol

from pdserve.errors import PeerError

if TYPE_CHECKING:
    from collections.abc import Callable

    import msgspec

    from pdserve.wire.transfer import Endpoint


class Fault(enum.Enum):
    """What is wrong with what a peer sent; a counter's label."""

    MAGIC = "magic"
    OVERSIZE = "oversize"
    UNAUTHENTIC = "unauthentic"
    MALFORMED = "malformed"
    UNEXPECTED = "unexpected"
    SLOW = "slow"


class FrameError(PeerError):
    """A peer sent what it should not; its link is of no further use."""

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
        """Say who takes what comes; called once, before anything is sent.

        Args:
            on_message: Takes each message, one of the union that this end may be sent. A
                `PeerError` that it raises ends the link.
            on_lost: Called at most once, when the link has ended and was not closed at this end:
                a `ClosedError`, or a `FrameError` if that is why.
        """

    def send(self, message: msgspec.Struct) -> None:
        """Send. It never raises: what cannot be sent ends the link."""

    def close(self) -> None:
        """End it, without a call of `on_lost`; may be repeated."""


class Dialer(Protocol):
    """Makes links to other ranks."""

    def connect(self, endpoint: Endpoint, peer: str) -> PeerLink:
        """Begin to connect; what is sent meanwhile waits. Never blocks.

        Args:
            peer: The other end, for messages.

        Raises:
            UnreachableError: It is known at once that nobody can be reached there.
        """
        ...
