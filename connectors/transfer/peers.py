"""The connections of a D rank to ranks of P, and the leases that it keeps alive over them.

One `Peer` per rank of each life of an engine whose KV comes here. This rank talks to the ranks on
its routes (`slicing.routes_to`), in some cases only to end a lease. `loads` pulls over these
connections; messages about pushes are passed to a `PushReceiver`.

It knows no tensors and no threads; whoever runs the loop calls `tick`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.connectors.slicing import routes_to
from pdserve.connectors.transfer.peer import Peer
from pdserve.connectors.transfer.peering import PeerId, PeerState

if TYPE_CHECKING:
    import msgspec

    from pdserve.connectors.handover.instructions import Watch
    from pdserve.connectors.transfer.peering import PushReceiver
    from pdserve.connectors.transfer.seams import Seams
    from pdserve.wire.transfer import EngineRef, LeaseEnd


class Peers:
    """All peers that this rank loads from or that write to it.

    Attributes:
        receiver: The receiver of pushes; set by the owner of this object.
    """

    receiver: PushReceiver

    def __init__(self, seams: Seams) -> None:
        self._seams = seams
        self._peers: dict[PeerId, Peer] = {}

    def meet(self, owner: EngineRef) -> None:
        """Connect ahead of need to the ranks of `owner` on this rank's routes."""
        for peer in self._routed(owner):
            peer.call()

    def watch(self, watch: Watch) -> None:
        """Meet the owner and keep its lease alive."""
        for peer in self._routed(watch.owner):
            peer.watch(watch)

    def unwatch(self, nonce: str) -> None:
        """Stop the heartbeats of a lease that another party keeps alive from now on. O(peers)."""
        for peer in self._peers.values():
            peer.unwatch(nonce)

    def release(self, nonce: str, owner: EngineRef, end: LeaseEnd) -> None:
        """Tell the owner that its lease is not needed any more."""
        for peer in self._routed(owner):
            peer.release(nonce, end)

    def send_to(self, owner: EngineRef, rank: int, message: msgspec.Struct) -> bool:
        """Send a message to a rank if it is READY; return False if it is not."""
        peer = self.find(owner, rank)
        return peer is not None and peer.state is PeerState.READY and peer.send(message)

    def find(self, owner: EngineRef, rank: int) -> Peer | None:
        """Return the peer for a rank; None if it has not been used for a while."""
        return self._peers.get(PeerId(owner, rank))

    def due_s(self) -> float:
        """When `tick` has to be called next. O(peers)."""
        return min((peer.due_s() for peer in self._peers.values()), default=float("inf"))

    def tick(self) -> bool:
        """Do what is due; return whether anything moved. O(peers)."""
        moved = False
        for peer_id, peer in list(self._peers.items()):
            moved |= peer.tick()
            if peer.is_forgettable:
                del self._peers[peer_id]
        return moved

    def drop_all(self, reason: str) -> None:
        """Close every connection: the agent that peers write to has changed."""
        for peer in list(self._peers.values()):
            peer.drop(reason)

    def close(self) -> None:
        """Say goodbye everywhere."""
        for peer in self._peers.values():
            peer.say_bye("closing")

    def _routed(self, owner: EngineRef) -> list[Peer]:
        """The ranks of `owner` on this rank's routes."""
        context = self._seams.context
        routes = routes_to(owner.shape, context.shape, context.rank)
        return [self.of(owner, route.source_rank) for route in routes]

    def of(self, owner: EngineRef, rank: int) -> Peer:
        """Return the peer for a rank, which may be a new one."""
        peer_id = PeerId(owner, rank)
        if peer_id not in self._peers:
            self._peers[peer_id] = Peer(peer_id, self._seams, self.receiver)
        return self._peers[peer_id]
