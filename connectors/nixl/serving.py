"""The serving side of a transfer thread: what P does for the Ds that read from it.

It answers handshakes, keeps the lease table by what the Ds say, and says of each read
whether the lease was still valid after its last byte. P moves no bytes itself; at most it
drives its NIXL agent while a D's transport needs it (`needs_progress`).
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, assert_never

import msgspec

from pdserve.connectors.nixl.channel import Connection
from pdserve.connectors.nixl.frames import Fault, FrameError
from pdserve.connectors.nixl.protocol import (
    Assist,
    Begin,
    Bye,
    Confirm,
    Done,
    Heartbeat,
    Hello,
    Ready,
    Refuse,
    RefuseReason,
    Release,
    ToServer,
    Welcome,
)
from pdserve.connectors.pull.lease import LeaseTable, Verdict
from pdserve.observe.log import log_event

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from pdserve.connectors.base import ConnectorContext
    from pdserve.connectors.nixl.reactor import Reactor
    from pdserve.connectors.pull.instructions import Grant
    from pdserve.errors import PeerError
    from pdserve.observe.clock import Clock
    from pdserve.wire.transfer import LeaseEnd, Settled

_log = logging.getLogger(__name__)

_MAX_STRANGERS = 64
# A grant reaches this thread at the latest when the step that runs beside it has ended.
_GRANT_GRACE_S = 5.0


@dataclass(slots=True, eq=False)
class _Client:
    """One D, by its connection.

    Attributes:
        is_wiring: From Welcome to Ready: its warm-up needs our progress.
        reads: Nonces by read id, from Begin until the read is over.
        assisting: Those of `reads` whose transport needs our progress, and until when.
    """

    connection: Connection[ToServer]
    since_s: float
    greeted: bool = False
    is_wiring: bool = False
    reads: dict[int, str] = field(default_factory=dict)
    assisting: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Parked:
    client: _Client
    done: Done
    until_s: float


class Server:
    """All connected Ds and all leases.

    Args:
        welcome: What a compatible D is told; asked for at each handshake.

    Attributes:
        faults: What peers sent that they should not have, by kind, since whoever reports
            it last emptied this.
    """

    def __init__(
        self,
        context: ConnectorContext,
        *,
        secret: bytes,
        reactor: Reactor,
        clock: Clock,
        welcome: Callable[[], Welcome],
    ) -> None:
        self._context = context
        self._transfer = context.config.transfer
        self._secret = secret
        self._reactor = reactor
        self._clock = clock
        self._welcome = welcome
        self._decoder = msgspec.msgpack.Decoder(ToServer)
        self._clients: set[_Client] = set()
        self._parked: list[_Parked] = []
        self._leases = LeaseTable(self._transfer.lease_s)
        self.faults: Counter[str] = Counter()

    @property
    def needs_progress(self) -> bool:
        """Whether some D's transport waits for this side's NIXL agent. O(clients)."""
        now_s = self._clock.monotonic_s()
        return any(
            client.is_wiring or any(until_s > now_s for until_s in client.assisting.values())
            for client in self._clients
        )

    @property
    def num_leases(self) -> int:
        """Leases that have not settled."""
        return len(self._leases)

    def due_s(self) -> float:
        """When `tick` has to be called next. O(clients + parked)."""
        return min(
            self._leases.due_s,
            min((parked.until_s for parked in self._parked), default=float("inf")),
            min(
                (self._patience_ends_s(client) for client in self._clients),
                default=float("inf"),
            ),
        )

    def accept(self, sock: socket.socket, peer: str) -> None:
        """A D, or anybody, has connected."""
        strangers = [c for c in self._clients if not c.connection.is_authenticated]
        if len(strangers) >= _MAX_STRANGERS:
            self._drop(min(strangers, key=lambda c: c.since_s), Fault.SLOW, "too many strangers")
        connection = Connection(sock, self._secret, self._decoder, is_client=False, peer=peer)
        client = _Client(connection, self._clock.monotonic_s())
        self._clients.add(client)
        self._reactor.attach(
            connection,
            lambda message: self._on_message(client, message),
            lambda error: self._on_lost(client, error),
        )

    def grant(self, grant: Grant) -> None:
        """Start a lease; reads that ended before it became known are answered now."""
        self._leases.grant(grant.nonce, grant.request_id, self._clock.monotonic_s())
        parked, self._parked = self._parked, []
        for entry in parked:
            if entry.done.nonce == grant.nonce:
                self._answer(entry.client, entry.done)
            else:
                self._parked.append(entry)

    def end(self, nonce: str, end: LeaseEnd) -> None:
        """End a lease from this side."""
        self._leases.release(nonce, end)

    def tick(self) -> None:
        """Do what is due by the clock. O(clients + leases + parked)."""
        now_s = self._clock.monotonic_s()
        self._leases.expire(now_s)
        overdue = [entry for entry in self._parked if entry.until_s <= now_s]
        if overdue:
            self._parked = [entry for entry in self._parked if entry.until_s > now_s]
            for entry in overdue:
                self._confirm(entry.client, entry.done, valid=False)
        for client in [c for c in self._clients if self._patience_ends_s(c) <= now_s]:
            self._drop(client, Fault.SLOW, "no complete handshake in time")

    def take_settled(self) -> list[Settled]:
        """Leases that settled since the last call."""
        return self._leases.take_settled()

    def drop_all(self, reason: str) -> None:
        """Close every connection; leases go on."""
        for client in list(self._clients):
            self._reactor.send(client.connection, Bye(reason))
            self._reactor.detach(client.connection)
            self._forget(client)

    def _on_message(self, client: _Client, message: ToServer) -> None:
        now_s = self._clock.monotonic_s()
        if not client.greeted and not isinstance(message, Hello | Bye):
            raise FrameError(Fault.UNEXPECTED, f"{client.connection.peer}: {message} before Hello")
        match message:
            case Hello():
                self._greet(client, message)
            case Ready():
                client.is_wiring = False
            case Heartbeat():
                self._leases.heartbeat(message.nonces, now_s)
            case Begin():
                client.reads[message.read_id] = message.nonce
                self._leases.begin_read(
                    message.nonce,
                    (client, message.read_id),
                    now_s,
                    until_s=now_s + self._transfer.transfer_timeout_s,
                )
            case Assist():
                if message.read_id in client.reads:
                    client.assisting[message.read_id] = now_s + self._transfer.transfer_timeout_s
            case Done():
                self._end_read(client, message.read_id)
                self._answer(client, message)
            case Release():
                self._end_read(client, message.read_id)
                self._leases.end_read(message.nonce, (client, message.read_id))
                self._leases.release(message.nonce)
            case Bye():
                self._reactor.detach(client.connection)
                self._forget(client)
            case _:
                assert_never(message)

    def _greet(self, client: _Client, hello: Hello) -> None:
        if client.greeted:
            raise FrameError(Fault.UNEXPECTED, f"{client.connection.peer}: a second Hello")
        client.greeted = True
        refusal = self._refusal(hello)
        if refusal is not None:
            log_event(
                _log,
                "kv peer refused",
                level=logging.WARNING,
                peer=hello.engine_id,
                rank=hello.rank,
                reason=refusal.reason.value,
                detail=refusal.detail,
            )
            self._reactor.send(client.connection, refusal)
            return
        client.is_wiring = True
        self._reactor.send(client.connection, self._welcome())

    def _refusal(self, hello: Hello) -> Refuse | None:
        mine = self._context
        if (hello.wants_engine_id, hello.wants_incarnation) != (mine.engine_id, mine.incarnation):
            return Refuse(
                RefuseReason.STALE,
                f"the handoff is of {hello.wants_engine_id} incarnation "
                f"{hello.wants_incarnation}, this is {mine.engine_id} incarnation "
                f"{mine.incarnation}",
            )
        if hello.wants_rank != mine.rank:
            return Refuse(
                RefuseReason.INCOMPATIBLE,
                f"rank {hello.rank} of {hello.engine_id} wants rank {hello.wants_rank} of "
                f"{mine.engine_id}, this is its rank {mine.rank}",
            )
        if hello.layout_digest != mine.layout_digest:
            names = sorted({*hello.layout_fields, *mine.layout_fields})
            differ = [
                f"{name} is {mine.layout_fields.get(name)} at {mine.engine_id} and "
                f"{hello.layout_fields.get(name)} at {hello.engine_id}"
                for name in names
                if mine.layout_fields.get(name) != hello.layout_fields.get(name)
            ] or [f"digest is {mine.layout_digest} and {hello.layout_digest}"]
            return Refuse(RefuseReason.INCOMPATIBLE, "KV layouts differ: " + ", ".join(differ))
        return None

    def _answer(self, client: _Client, done: Done) -> None:
        now_s = self._clock.monotonic_s()
        match self._leases.confirm(done.nonce, (client, done.read_id), now_s):
            case Verdict.VALID:
                self._confirm(client, done, valid=True)
            case Verdict.LOST:
                self._confirm(client, done, valid=False)
            case Verdict.UNKNOWN:
                self._parked.append(_Parked(client, done, now_s + _GRANT_GRACE_S))

    def _confirm(self, client: _Client, done: Done, *, valid: bool) -> None:
        if client in self._clients:
            self._reactor.send(client.connection, Confirm(done.read_id, valid))

    def _end_read(self, client: _Client, read_id: int) -> None:
        client.reads.pop(read_id, None)
        client.assisting.pop(read_id, None)

    def _patience_ends_s(self, client: _Client) -> float:
        """When a D that has not come through its handshake is dropped."""
        if client.greeted and not client.is_wiring:
            return float("inf")
        return client.since_s + 2 * self._transfer.handshake_timeout_s

    def _on_lost(self, client: _Client, error: PeerError) -> None:
        if isinstance(error, FrameError):
            self.faults[f"frame_{error.fault.value}"] += 1
            log_event(_log, "kv side channel frame refused", level=logging.WARNING, reason=error)
        self._forget(client)

    def _drop(self, client: _Client, fault: Fault, detail: str) -> None:
        self._reactor.detach(client.connection)
        self._on_lost(client, FrameError(fault, f"{client.connection.peer}: {detail}"))

    def _forget(self, client: _Client) -> None:
        self._clients.discard(client)
        self._parked = [entry for entry in self._parked if entry.client is not client]
        for read_id, nonce in client.reads.items():
            self._leases.end_read(nonce, (client, read_id))
        client.reads.clear()
        client.assisting.clear()
