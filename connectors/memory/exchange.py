"""The wire between ranks of one process: addresses, delivery, and injected faults.

Nothing moves on its own: `turn` delivers frames, lets every rank do what is due, and repeats this
until nothing is left to do. So every call of any engine advances the protocols of all ranks, as
transfer threads would, in an order that only the calls determine.
"""

from __future__ import annotations

import enum
import itertools
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

import msgspec

from pdserve.connectors.transfer.protocol import ToClient, ToServer
from pdserve.connectors.transfer.seams import ClosedError, UnreachableError
from pdserve.errors import PeerError
from pdserve.wire.transfer import Endpoint

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from pdserve.connectors.base import ConnectorContext
    from pdserve.connectors.transfer.machine import TransferMachine
    from pdserve.connectors.transfer.protocol import Process
    from pdserve.observe.clock import Clock

_HOST = "memory"
# A link across a cut is lost after this time, as with TCP.
SILENCE_S: Final = 5.0


class Spoil(enum.Enum):
    """Damage to bytes in transit."""

    CORRUPT = "corrupt"
    TRUNCATE = "truncate"


class Trouble:
    """Faults on the wire of one rank, queried at each opportunity; this base class has none."""

    def frame_polls(self) -> int:
        """Return after how many more polls of this rank a frame reaches it."""
        return 0

    def loses_link(self) -> bool:
        """Whether a link breaks, with everything in flight on it, when this rank sends."""
        return False

    def copy_polls(self) -> int:
        """Return how many more polls a copy of this rank takes."""
        return 0

    def spoils(self) -> Spoil | None:
        """Return how a copy into this rank's memory is damaged; None = not at all."""
        return None


class ExchangeMember(Protocol):
    """A rank, as seen by the wire and by other ranks.

    Attributes:
        machine: Its side of the protocol.
        process: Identity of the process that it stands for.
        num_polls: How often its engine has asked for news, which measures time on the wire.
        num_fences: How often its memory was cut off from peers.
        has_heard: Whether anything has arrived since it last did what was due.
        trouble: Faults on its wire.
    """

    context: ConnectorContext
    clock: Clock
    machine: TransferMachine
    endpoint: Endpoint
    process: Process
    kv: torch.Tensor
    num_polls: int
    num_fences: int
    has_heard: bool
    trouble: Trouble

    def turn(self) -> bool:
        """Do what is due; return whether there may be more to do."""
        ...

    def tell(self) -> None:
        """Wake its engine, if there is news."""


class Exchange:
    """Ranks by endpoint, and the links between them.

    Args:
        is_direct: Whether copies need no help from the other side, and continue after a fence.
        is_driven: Whether a copy moves only while the other side is driven for it.

    Attributes:
        lock: Guards the exchange and everything reached through it.
    """

    def __init__(self, *, is_direct: bool = False, is_driven: bool = False) -> None:
        self.lock = threading.RLock()
        self.is_direct = is_direct
        self.is_driven = is_driven
        self._ports = itertools.count(1)
        self._ranks: dict[Endpoint, ExchangeMember] = {}
        self._links: list[MemoryLink] = []

    def join(self, rank: ExchangeMember) -> Endpoint:
        """Add a rank under an endpoint that was never used before."""
        endpoint = self.place_of(rank)
        self._ranks[endpoint] = rank
        return endpoint

    def place_of(self, rank: ExchangeMember) -> Endpoint:
        """Return an unused endpoint for a rank that joins."""
        return Endpoint(host=_HOST, port=next(self._ports))

    def leave(self, rank: ExchangeMember) -> None:
        """Remove a rank, as if its process had ended; ignore one that has left."""
        if self.find(rank.endpoint) is rank:
            del self._ranks[rank.endpoint]
        for link in self._links:
            if link.owner is rank:
                link.close()
        self.turn()

    def find(self, endpoint: Endpoint) -> ExchangeMember | None:
        """Return the rank at an endpoint, if there is one."""
        return self._ranks.get(endpoint)

    def find_process(self, process: Process) -> ExchangeMember | None:
        """Return the rank that runs as this process; None if it has ended."""
        rank = self.find(Endpoint(host=process.host, port=process.pid))
        return rank if rank is not None and rank.process == process else None

    def is_waiting(self, rank: ExchangeMember) -> bool:
        """Whether a frame is in flight to a rank."""
        return any(link.is_waiting for link in self._links if link.owner is rank)

    def is_cut(self, one: ExchangeMember, other: ExchangeMember) -> bool:
        """Whether two ranks cannot reach each other now."""
        return False

    def connect(self, caller: ExchangeMember, endpoint: Endpoint, peer: str) -> MemoryLink:
        """Begin to connect.

        Raises:
            UnreachableError: No rank is at the endpoint.
        """
        called = self.find(endpoint)
        if called is None:
            raise UnreachableError(f"{peer}: nobody listens there")
        near, far = (
            MemoryLink(self, caller, peer, ToClient),
            MemoryLink(self, called, f"{caller.context.engine_id} in memory", ToServer),
        )
        near.other, far.other = far, near
        far.is_accepted = False
        self._links += (near, far)
        return near

    def turn(self) -> None:
        """Run until nothing is left to do."""
        has_moved = True
        while has_moved:
            has_moved = False
            for link in list(self._links):
                if link.deliver():
                    link.owner.has_heard = has_moved = True
            self._links = [link for link in self._links if not link.is_closed]
            for rank in list(self._ranks.values()):
                has_moved |= rank.turn()
        for rank in list(self._ranks.values()):
            rank.tell()


class MemoryLink:
    """One end of a connection. See `PeerLink`.

    Attributes:
        is_accepted: Whether the rank has accepted it, so that frames can be delivered.
        is_broken: Whether it is lost, which may not have been noticed yet.
    """

    is_authenticated: ClassVar[bool] = True
    other: MemoryLink

    def __init__(self, exchange: Exchange, owner: ExchangeMember, peer: str, receives: Any) -> None:
        self.peer = peer
        self.owner = owner
        self.is_accepted = True
        self.is_closed = False
        self.is_broken = False
        self._exchange = exchange
        self._decoder = msgspec.msgpack.Decoder(receives)
        self._inbox: deque[tuple[int, bytes]] = deque()
        self._cut_since_s = float("inf")

    @property
    def is_waiting(self) -> bool:
        """Whether a frame is in flight to this end."""
        return bool(self._inbox)

    def attach(
        self, on_message: Callable[[Any], None], on_lost: Callable[[PeerError], None]
    ) -> None:
        """See `PeerLink`."""
        self._on_message, self._on_lost = on_message, on_lost

    def send(self, message: msgspec.Struct) -> None:
        """See `PeerLink`."""
        if self.is_closed or self.is_broken or self.other.is_closed:
            return
        if self.owner.trouble.loses_link():
            self.is_broken = self.other.is_broken = True
        else:
            self.other.carry(msgspec.msgpack.encode(message))

    def carry(self, frame: bytes) -> None:
        """Put a frame in flight to this end."""
        due = self.owner.num_polls + self.owner.trouble.frame_polls()
        self._inbox.append((due, frame))

    def close(self) -> None:
        """See `PeerLink`."""
        self.is_closed = True

    def deliver(self) -> bool:
        """Deliver what has arrived; return whether there was anything."""
        if self.is_closed or self._is_cut():
            return False
        if not self.is_accepted:
            self.is_accepted = True
            self.owner.machine.server.accept(self)
        try:
            return self._take()
        except PeerError as error:
            self.lose(error)
            return True

    def lose(self, error: PeerError) -> None:
        """End the link at this side without a request of its owner."""
        self.close()
        if self.is_accepted:
            self._on_lost(error)

    def _take(self) -> bool:
        has_moved = False
        if self.is_broken:
            raise ClosedError(f"{self.peer}: reset the connection")
        while self._inbox and self._inbox[0][0] <= self.owner.num_polls and not self.is_closed:
            has_moved = True
            self._on_message(self._decoder.decode(self._inbox.popleft()[1]))
        if self.other.is_closed and not self._inbox and not self.is_closed:
            raise ClosedError(f"{self.peer}: closed the connection")
        return has_moved

    def _is_cut(self) -> bool:
        """Whether the link is cut; lose it after `SILENCE_S` of that."""
        if not self._exchange.is_cut(self.owner, self.other.owner):
            self._cut_since_s = float("inf")
            return False
        now_s = self.owner.clock.monotonic_s()
        self._cut_since_s = min(self._cut_since_s, now_s)
        if now_s - self._cut_since_s >= SILENCE_S:
            self.lose(ClosedError(f"{self.peer}: no message for {SILENCE_S} s"))
        return True
