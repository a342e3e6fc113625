"""The P side of a rank: serves the Ds that are connected to it.

It answers handshakes, keeps the lease table from the Ds' messages, and reports for each read
whether the lease was still valid after the last byte, and the digests. P moves no bytes for a
read; at most it drives its side of a transport while a D's transport needs it
(`needs_progress`). Ds' messages about pushes go to `pushing`.

Digests are taken beside this thread, with the steps of a prompt, and from the grant on those that
are left; a `Done` that comes before they are waits for them. Whoever may be reading from a leased
block, the digests too, holds off its lease's end.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdserve.connectors.handover.lease import LeaseTable, ReadVerdict
from pdserve.connectors.slicing import route_between
from pdserve.connectors.transfer.greeting import NumericsWatch, refusal_of
from pdserve.connectors.transfer.protocol import (
    Abort,
    Assist,
    Begin,
    Bye,
    Confirm,
    Done,
    EndRead,
    Heartbeat,
    Hello,
    LeaseRelease,
    MoverFrame,
    Ready,
    Register,
    Taken,
    ToServer,
    Welcome,
)
from pdserve.connectors.transfer.pushing import Pushing
from pdserve.connectors.transfer.seams import Fault, FrameError
from pdserve.connectors.transfer.writing import Destination
from pdserve.errors import PeerError
from pdserve.observe.log import log_event

if TYPE_CHECKING:
    import msgspec

    from pdserve.connectors.handover.instructions import Chunk, Grant
    from pdserve.connectors.transfer.pushes import ChunkStep
    from pdserve.connectors.transfer.seams import Facts, PeerLink, Seams
    from pdserve.wire.transfer import Settled

_log = logging.getLogger(__name__)

_MAX_UNAUTHENTICATED = 64
# Of one D, begun and not over: more than it can have blocks for.
_MAX_READS = 1 << 14
# A grant reaches this thread no later than the end of the concurrent step. Once its lease would
# have expired, it is no longer waited for.
_GRANT_GRACE_S = 5.0


@dataclass(slots=True, eq=False)
class _Client:
    """One D, by its link.

    Attributes:
        destination: Its identity, once it has been welcomed.
        is_wiring: True from Welcome to Ready, while its warm-up needs our progress.
        reads: Nonces by read id, from Begin until the read is over.
        assisting: Those of `reads` whose transport needs our progress, and until when.
    """

    link: PeerLink
    since_s: float
    destination: Destination | None = None
    is_wiring: bool = False
    reads: dict[int, str] = field(default_factory=dict)
    assisting: dict[int, float] = field(default_factory=dict)
    greeted: bool = False


class Server:
    """All connected Ds, all leases, and the pushes to Ds."""

    def __init__(self, seams: Seams, facts: Facts) -> None:
        self._seams = seams
        self._facts = facts
        self._context = seams.context
        self._numerics = NumericsWatch(seams.context)
        self._transfer = seams.transfer
        self._clock = seams.clock
        # In order of arrival: a set would be iterated by memory address.
        self._clients: dict[_Client, None] = {}
        # `Done`s that wait for their grant or for the digests, by read id, and until when.
        self._parked: dict[tuple[_Client, int], tuple[Done, float]] = {}
        self.leases = LeaseTable(self._transfer.lease_s)
        self._grants: dict[str, Grant] = {}
        self._undigested: set[str] = set()
        self.pushing = Pushing(seams, self.leases, facts)

    @property
    def needs_progress(self) -> bool:
        """Whether some D's transport needs this side to be driven. O(clients)."""
        now_s = self._clock.monotonic_s()
        return any(
            client.is_wiring or any(until_s > now_s for until_s in client.assisting.values())
            for client in self._clients
        )

    def due_s(self) -> float:
        """When `tick` has to be called next. O(clients + parked + pushes)."""
        return min(
            self.leases.due_s,
            self.pushing.due_s(),
            *(until_s for _, until_s in self._parked.values()),
            *(self._patience_ends_s(client) for client in self._clients),
        )

    def accept(self, link: PeerLink) -> None:
        """Take a new connection, which may not be from a D."""
        unknown = [c for c in self._clients if not c.link.is_authenticated]
        if len(unknown) >= _MAX_UNAUTHENTICATED:
            self._drop(
                min(unknown, key=lambda c: c.since_s),
                Fault.SLOW,
                "too many have not said who they are",
            )
        client = _Client(link, self._clock.monotonic_s())
        self._clients[client] = None
        link.attach(
            lambda message: self._on_message(client, message),
            lambda error: self._on_lost(client, error),
        )

    def grant(self, grant: Grant) -> None:
        """Start a lease and take those of its digests that are not known yet.

        A repeated grant is counted and ignored.
        """
        now_s, num_reused = self._clock.monotonic_s(), self.leases.num_reused
        is_first = self.leases.grant(
            grant.nonce,
            grant.request_id,
            now_s,
            block_ids=grant.block_ids,
            generations=grant.generations,
        )
        if self.leases.num_reused > num_reused:
            self._facts.faults["block_reused"] += self.leases.num_reused - num_reused
            log_event(
                _log,
                "kv block leased twice",
                level=logging.ERROR,
                request=grant.request_id,
                num_leases_lost=self.leases.num_reused - num_reused,
            )
        if not is_first:
            self._facts.faults["grant_repeated"] += 1
            return
        self.pushing.grant(grant)
        self._grants[grant.nonce] = grant
        self._undigested.add(grant.nonce)
        # Taking digests holds the blocks, like a reader that never hangs.
        self.leases.begin_read(grant.nonce, self, now_s, until_s=float("inf"))
        # Reads that began before the grant, which travels separately, hold the blocks, too.
        for client in self._clients:
            for read_id, nonce in client.reads.items():
                if nonce == grant.nonce:
                    self._begin_read(client, read_id, nonce)
        self._take_digests(grant)
        self._look_at_parked(grant.nonce)

    def add_step(self, step: ChunkStep) -> None:
        """Take a chunk that is complete in memory, or part of one; if pushed, it is written.

        For a prompt that will be pulled, digests are taken, so that all but those of its last chunk
        are known when its lease begins. That holds no block: a block handed out meanwhile is of
        another generation, and the digests of the previous one are never asked for again.
        """
        if step.chunk.nonce:
            self.pushing.on_step(step)
        elif step.is_over:
            self._take_digests_of(step.chunk)

    def tick(self) -> None:
        """Do what is due by the clock. O(clients + leases + parked + pushes)."""
        now_s = self._clock.monotonic_s()
        self.pushing.tick()
        self.leases.expire(now_s)
        for key, (done, until_s) in list(self._parked.items()):
            if until_s <= now_s:
                del self._parked[key]
                self._refuse(key[0], done)
        for client in [c for c in self._clients if self._patience_ends_s(c) <= now_s]:
            self._drop(client, Fault.SLOW, "no complete handshake in time")

    def take_settled(self) -> list[Settled]:
        """Leases, and stopped pushes, that settled since the last call."""
        settled = self.leases.take_settled()
        for lease in settled:
            self._grants.pop(lease.nonce, None)
        return settled

    def drop_all(self, reason: str) -> None:
        """Close every connection; leases go on."""
        for client in list(self._clients):
            client.link.send(Bye(reason))
            client.link.close()
            self._forget(client)

    def _on_message(self, client: _Client, message: ToServer) -> None:
        destination = client.destination
        if isinstance(message, Hello):
            self._greet(client, message)
        elif isinstance(message, Bye):
            client.link.close()
            self._forget(client)
        elif destination is None:
            raise FrameError(Fault.UNEXPECTED, f"{client.link.peer}: {message} came before Welcome")
        else:
            self._serve(client, destination, message)

    def _serve(self, client: _Client, destination: Destination, message: ToServer) -> None:
        """Take a message of a D that was welcomed."""
        now_s = self._clock.monotonic_s()
        match message:
            case Ready():
                client.is_wiring = False
            case Heartbeat():
                self.leases.heartbeat(message.nonces, now_s)
                self.pushing.heard(destination, message.nonces)
            case Begin():
                if message.read_id in client.reads or len(client.reads) >= _MAX_READS:
                    raise FrameError(Fault.UNEXPECTED, f"{client.link.peer}: {message}")
                client.reads[message.read_id] = message.nonce
                self._begin_read(client, message.read_id, message.nonce)
            case Assist():
                if message.read_id in client.reads:
                    client.assisting[message.read_id] = now_s + self._transfer.transfer_timeout_s
            case Done():
                is_open = client.reads.get(message.read_id) == message.nonce
                if not is_open or (client, message.read_id) in self._parked:
                    raise FrameError(Fault.UNEXPECTED, f"{client.link.peer}: {message}")
                client.assisting.pop(message.read_id, None)
                self._answer(client, message)
            case EndRead():
                self._end_read(client, message.read_id, message.nonce)
            case LeaseRelease():
                if not self.pushing.released(message.nonce, message.end):
                    self.leases.release(message.nonce, now_s, message.end)
            case Register():
                self.pushing.register(destination, message)
            case Taken():
                self.pushing.taken(destination, message)
            case Abort():
                self.pushing.abort(destination, message)
            case MoverFrame():
                self._seams.mover.hear(destination.link, message.body)
            case _:
                raise FrameError(Fault.UNEXPECTED, f"{client.link.peer}: {message}")

    def _greet(self, client: _Client, hello: Hello) -> None:
        if client.greeted:
            raise FrameError(Fault.UNEXPECTED, f"{client.link.peer}: a second Hello")
        client.greeted = True
        refusal = refusal_of(self._context, hello)
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
            client.link.send(refusal)
            return
        target = self._seams.mover.target
        if target is None:
            client.link.send(Bye("it has no NIXL agent now"))
            client.link.close()
            self._forget(client)
            return
        client.is_wiring = True
        client.destination = Destination(hello, lambda message: self._send(client, message))
        self._numerics.look_at(hello)
        client.link.send(
            Welcome(
                agent_metadata=target.metadata,
                pool=target.pool,
                scratch=target.scratch,
                shape=self._context.shape,
                process=self._seams.processes.this,
            )
        )

    def _take_digests_of(self, chunk: Chunk) -> None:
        """Take digests of a chunk's whole blocks; a partial last block may still be written to."""
        size = self._context.shape.block_size
        first_token = chunk.start_token - chunk.start_token % size
        end_token = chunk.end_token - chunk.end_token % size
        self._seams.take_digests(
            (chunk.block_ids, chunk.generations),
            end_token,
            chunk.request_id,
            lambda: None,  # no read waits for them
            first_token=first_token,
        )

    def _take_digests(self, grant: Grant) -> None:
        def done() -> None:
            self._undigested.discard(grant.nonce)
            self._look_at_parked(grant.nonce)
            self.leases.end_read(grant.nonce, self)

        table = (grant.block_ids, grant.generations)
        self._seams.take_digests(table, grant.num_tokens, grant.request_id, done)

    def _look_at_parked(self, nonce: str) -> None:
        for key, (done, _) in list(self._parked.items()):
            if done.nonce == nonce:
                del self._parked[key]
                self._answer(key[0], done)

    def _answer(self, client: _Client, done: Done) -> None:
        """Confirm a read, refuse it, or let it wait for its grant or for the digests."""
        now_s = self._clock.monotonic_s()
        if done.nonce in self._undigested:
            # It stays a reader, because the digests must be of the blocks it has read.
            until_s = now_s + self._transfer.transfer_timeout_s
            self._parked[client, done.read_id] = done, until_s
            return
        match self.leases.confirm(done.nonce, (client, done.read_id), now_s):
            case ReadVerdict.VALID:
                client.reads.pop(done.read_id, None)
                self._confirm(client, done)
            case ReadVerdict.LOST:
                self._refuse(client, done)
            case ReadVerdict.UNKNOWN:
                grace_s = min(_GRANT_GRACE_S, self._transfer.lease_s)
                self._parked[client, done.read_id] = done, now_s + grace_s

    def _confirm(self, client: _Client, done: Done) -> None:
        """Confirm that the lease is valid, and send the digests."""
        assert client.destination is not None
        grant, hello = self._grants[done.nonce], client.destination.hello
        route = route_between(self._context.shape, hello.shape, self._context.rank, hello.rank)
        digests = self._seams.digests.of(
            grant.block_ids,
            grant.generations,
            grant.num_tokens,
            route,
            first_token=done.first_token,
        )
        self._send(client, Confirm(done.read_id, valid=True, digests=digests))

    def _refuse(self, client: _Client, done: Done) -> None:
        self._end_read(client, done.read_id, done.nonce)
        self._send(client, Confirm(done.read_id, valid=False))

    def _send(self, client: _Client, message: msgspec.Struct) -> None:
        if client in self._clients:
            client.link.send(message)

    def _begin_read(self, client: _Client, read_id: int, nonce: str) -> None:
        now_s = self._clock.monotonic_s()
        until_s = now_s + self._transfer.transfer_timeout_s
        self.leases.begin_read(nonce, (client, read_id), now_s, until_s=until_s)

    def _end_read(self, client: _Client, read_id: int, nonce: str) -> None:
        client.reads.pop(read_id, None)
        client.assisting.pop(read_id, None)
        self.leases.end_read(nonce, (client, read_id))

    def _patience_ends_s(self, client: _Client) -> float:
        """Return when a D is dropped whose handshake has not completed."""
        if client.greeted and not client.is_wiring:
            return float("inf")
        return client.since_s + 2 * self._transfer.handshake_timeout_s

    def _on_lost(self, client: _Client, error: PeerError) -> None:
        if isinstance(error, FrameError):
            self._facts.faults[f"frame_{error.fault.value}"] += 1
            log_event(_log, "kv side channel frame refused", level=logging.WARNING, reason=error)
        self._forget(client)

    def _drop(self, client: _Client, fault: Fault, detail: str) -> None:
        client.link.close()
        self._on_lost(client, FrameError(fault, f"{client.link.peer}: {detail}"))

    def _forget(self, client: _Client) -> None:
        self._clients.pop(client, None)
        for read_id, nonce in client.reads.items():
            self._parked.pop((client, read_id), None)
            self.leases.end_read(nonce, (client, read_id))
        client.reads.clear()
        client.assisting.clear()
        if client.destination is not None:
            self.pushing.lost(client.destination)
            self._seams.mover.hang_up(client.destination.link)
