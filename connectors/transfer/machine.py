"""The transfer machine: both sides of the protocol at one rank.

Its owner passes in instructions, steps and links made by others, lets the links and the mover call
back, and calls `tick` after each of these and at `due_s`. Everything belongs to one thread, or
happens under one lock.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pdserve.connectors.transfer.loads import Loads
from pdserve.connectors.transfer.peers import Peers
from pdserve.connectors.transfer.receiving import Receiving
from pdserve.connectors.transfer.seams import Facts
from pdserve.connectors.transfer.serving import Server
from pdserve.observe.log import log_event

if TYPE_CHECKING:
    from pdserve.connectors.handover.instructions import Instructions
    from pdserve.connectors.transfer.seams import Seams
    from pdserve.wire.transfer import ConnectorReport

_log = logging.getLogger(__name__)


class TransferMachine:
    """One rank's side of the transfer protocol, as P and as D.

    Attributes:
        server: The P side: it takes new connections, and what steps have computed.
        peers, loads, receiving: The D side: its connections, KV that it reads, and KV that is
            written to it.
    """

    def __init__(self, seams: Seams) -> None:
        self._mover = seams.mover
        self._rank = seams.context.rank
        self._clock = seams.clock
        self.facts = Facts()
        self.peers = Peers(seams)
        self.loads = Loads(seams, self.facts, self.peers)
        self.server = Server(seams, self.facts)
        self.receiving = self.peers.receiver = Receiving(
            seams, self.facts, peers=self.peers, fence=self.fence, is_alone=self._is_alone
        )

    @property
    def needs_progress(self) -> bool:
        """Whether some peer's transport waits for this side to be driven."""
        return self.server.needs_progress or self.receiving.needs_progress

    @property
    def num_open(self) -> int:
        """Number of transfers that are not over, leases excepted."""
        return len(self.loads) + len(self.receiving.open) + self.server.pushing.num_live

    def apply(self, todo: Instructions) -> None:
        """Carry out the scheduler half's instructions."""
        server, peers, receiving = self.server, self.peers, self.receiving
        for expect in todo.expects:
            server.pushing.expect(expect)
        for grant in todo.grants:
            server.grant(grant)
        for watch in todo.watches:
            peers.watch(watch)
        for reserve in todo.reserves:
            receiving.reserve(reserve)
        for load in todo.loads:
            self.loads.begin(load)
        for nonce in todo.unwatches:
            peers.unwatch(nonce)
        for release in todo.releases:
            peers.release(release.nonce, release.owner, release.end)
        for request_id in todo.aborts:
            self.loads.abort(request_id)
            receiving.abort(request_id)
        for stop in todo.stops:
            server.pushing.stop(stop)
        now_s = self._clock.monotonic_s()
        for nonce in todo.ends:
            server.leases.release(nonce, now_s)
        server.leases.heartbeat(todo.keeps, now_s)

    def due_s(self) -> float:
        """When `tick` has to be called next (monotonic seconds); inf = never by the clock."""
        d_side_s = min(self.loads.due_s(), self.peers.due_s(), self.receiving.due_s())
        return min(d_side_s, self.server.due_s())

    def tick(self) -> bool:
        """Do what is due; return whether there may be more to do at once."""
        self.server.tick()
        moved = self.loads.tick()
        moved |= self.peers.tick()
        self.receiving.tick()
        return moved

    def fence(self, reason: str) -> None:
        """Cut this memory off from all peers, which then have to connect to this rank again."""
        log_event(_log, "kv target reset", level=logging.WARNING, reason=reason)
        self.facts.faults["agent_reset"] += 1
        self.server.drop_all(reason)
        self.peers.drop_all(reason)
        self._mover.fence()

    def end_all(self, reason: str) -> None:
        """Begin to end all writes, incoming and outgoing; loads go on."""
        self.receiving.abort_all(reason)
        self.server.pushing.end_all(reason)

    def close(self) -> None:
        """Say goodbye everywhere."""
        self.peers.close()
        self.server.drop_all("closing")

    @property
    def has_news(self) -> bool:
        """Whether `take_report` would have anything to report."""
        return bool(self.facts) or self.server.leases.has_settled

    def take_report(self) -> ConnectorReport:
        """Return the facts since the last call."""
        return self.facts.take(self._rank, self.server.take_settled())

    def _is_alone(self) -> bool:
        """Whether a fence would affect nothing but reservations."""
        return not (len(self.loads) or self.server.pushing.num_live)
