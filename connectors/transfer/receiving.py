"""The receiving side of pushes: D manages the blocks that Ps write into.

    part:  WAITING (for the connection) -> SENT -> ACCEPTED -> CHECKING -> GOOD
                                             ^         ^----------'  once, if the digests differ
                                             |
           on trouble: `Fail` from P --------+------------------------> OVER
                       P is lost ------------+--> LOST --(fenced)-----> OVER

There is one part for each rank of P that has KV for this rank. From SENT on, P may write to the
blocks; they are this engine's again when the part is GOOD or OVER. A reservation ends, in one
report, when all its parts have.

Tokens that P reports as written are checked in the background while P goes on; when P sends its
digests (`Pushed`), only the rest is left. A second writing is checked from the start.

A LOST part may still be written to: by writes in flight, or by a P that only hung. A fence ends
that for certain, unless P writes to this memory behind the mover's back, as transports within one
host do (`Processes`). Such a P must answer or end first: it is asked again over another
connection, until it answers `Fail` or its process has ended.

It knows no sockets and no threads; whoever runs the loop calls `tick`.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING

from pdserve.connectors import digests
from pdserve.connectors.slicing import routes_to
from pdserve.connectors.transfer.protocol import Abort, Taken
from pdserve.connectors.transfer.reservations import (
    CHECKED,
    EXPOSED,
    IncomingPart,
    IncomingState,
    Reservation,
    Reservations,
)
from pdserve.observe.log import log_event
from pdserve.wire.transfer import LoadFailure

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.connectors.handover.instructions import Reserve
    from pdserve.connectors.transfer.peering import PeerId
    from pdserve.connectors.transfer.peers import Peers
    from pdserve.connectors.transfer.protocol import Accept, Fail, Progress, Pushed
    from pdserve.connectors.transfer.reservations import Piece
    from pdserve.connectors.transfer.seams import Facts, Seams
    from pdserve.wire.ids import BlockId, RequestId

_log = logging.getLogger(__name__)


class Receiving:
    """All reservations of one rank of D, and the handlers of P's messages (see `PushReceiver`).

    Args:
        fence: Cuts this memory off from Ps, and closes every link.
        is_alone: Whether a fence would affect nothing but reservations; if not, a LOST part waits
            for the other transfers, but no longer than the quarantine.
    """

    def __init__(
        self,
        seams: Seams,
        facts: Facts,
        *,
        peers: Peers,
        fence: Callable[[str], None],
        is_alone: Callable[[], bool],
    ) -> None:
        self._seams = seams
        self._shape, self._rank = seams.context.shape, seams.context.rank
        self._transfer = seams.transfer
        self._facts = facts
        self._peers = peers
        self._fence = fence
        self._is_alone = is_alone
        self._is_fencing = False
        self._clock = seams.clock
        self._open = Reservations()

    @property
    def open(self) -> list[Reserve]:
        """Return the reservations that are not reported yet."""
        return [reservation.reserve for reservation in self._open.values()]

    @property
    def needs_progress(self) -> bool:
        """Whether some P's transport may need this side's progress, to wire up or to write."""
        return any(
            part.needs_agent or part.state is IncomingState.SENT
            for part in self._open.parts(IncomingState.SENT, IncomingState.ACCEPTED)
        )

    def due_s(self) -> float:
        """When `tick` has to be called next. O(reservations x ranks of P)."""
        parts = self._open.parts()
        return min((part.due_s(self._transfer) for part in parts), default=float("inf"))

    def tick(self) -> None:
        """Do what is due by the clock. O(reservations x ranks of P)."""
        now_s = self._now_s()
        for part in self._open.parts():
            if part.due_s(self._transfer) <= now_s:
                self._on_due(part, now_s)
        self._fence_if_due(now_s)

    # ---- what this engine wants --------------------------------------------------------

    def reserve(self, reserve: Reserve) -> None:
        """Let P write into these blocks from now on."""
        if reserve.load_id in self._open:
            self._facts.faults["reserve_repeated"] += 1
            return
        reservation = self._open[reserve.load_id] = Reservation(reserve, self._now_s())
        reservation.parts = {
            route.source_rank: IncomingPart(
                reservation, route, reservation.new_check(route, self._seams.digests)
            )
            for route in routes_to(reserve.owner.shape, self._shape, self._rank)
        }
        self._peers.meet(reserve.owner)
        for part in list(reservation.parts.values()):
            self._register(part)

    def abort(self, request_id: RequestId) -> None:
        """Abort the request's reservation, if there is one that is not over."""
        for reservation in list(self._open.values()):
            if reservation.reserve.request_id == request_id:
                self._give_up(reservation, LoadFailure.ABORTED, "the request was aborted")

    def abort_all(self, detail: str) -> None:
        """Abort all reservations because this engine closes."""
        for reservation in list(self._open.values()):
            self._give_up(reservation, LoadFailure.ABORTED, detail)

    # ---- messages from Ps --------------------------------------------------------------

    def on_ready(self, peer: PeerId) -> None:
        """Register the parts that wait for this rank of P; ask it to end the lost ones."""
        for part in self._open.of(peer):
            if part.state is IncomingState.WAITING:
                self._register(part)
            elif part.state is IncomingState.LOST:
                self._ask_to_end(part)

    def on_accept(self, peer: PeerId, message: Accept) -> None:
        """Note that P has accepted a registration."""
        part = self._find(peer, message.load_id, IncomingState.SENT)
        if part is not None:
            part.state = IncomingState.ACCEPTED

    def on_progress(self, peer: PeerId, message: Progress) -> None:
        """Note a sign of life from P, and what it has written."""
        part = self._part(peer, message.load_id)
        if part is None:
            return  # it was under way when the reservation ended
        reservation = part.reservation
        part.alive_s = self._now_s()
        part.needs_agent |= message.needs_agent
        if message.num_tokens > 0:
            reservation.began_s = min(reservation.began_s, part.alive_s)
        if part.state in (IncomingState.SENT, IncomingState.ACCEPTED) and not part.was_rewritten:
            part.check.settle(message.num_settled, message.layers_end)
            self._go_on_checking(part)

    def on_pushed(self, peer: PeerId, message: Pushed) -> None:
        """Check the rest, since P has written everything."""
        part = self._find(peer, message.load_id, IncomingState.SENT, IncomingState.ACCEPTED)
        if part is None:
            return
        reservation = part.reservation
        part.pushed, part.pushed_s = message, self._now_s()
        part.state = IncomingState.CHECKING
        if reservation.failure is not None:
            part.state = IncomingState.OVER  # it was asked to end, and nothing is in flight
            self._finish_if_over(reservation)
            return
        why = reservation.why_wrong(message.handoff)
        if why is not None:
            self._give_up(reservation, LoadFailure.LEASE_LOST, why)
            return
        part.check.settle_all()
        self._go_on_checking(part)

    def on_fail(self, peer: PeerId, message: Fail) -> None:
        """End a part to which P writes nothing more."""
        if message.load_id not in self._open:
            return  # it answers an abort; a `Pushed` that was under way has ended the reservation
        is_over = IncomingState.OVER  # likewise, and another rank of P has still to answer
        part = self._find(peer, message.load_id, *EXPOSED, IncomingState.CHECKING, is_over)
        if part is None:
            return
        part.state = IncomingState.OVER
        why = LoadFailure.ABORTED if message.aborted else LoadFailure.WITHDRAWN
        self._give_up(part.reservation, why, f"{peer} says: {message.reason}")

    def on_lost(self, peer: PeerId, reason: LoadFailure, detail: str) -> None:
        """Handle the loss of a rank of P. KV that it reported as fully written is still good."""
        now_s = self._now_s()
        for part in self._open.of(peer):
            match part.state:
                case IncomingState.WAITING:
                    if not self._is_fencing:
                        part.state = IncomingState.OVER
                        self._give_up(part.reservation, reason, detail)
                case IncomingState.SENT | IncomingState.ACCEPTED:
                    part.lose(now_s, self._seams.mover)
                    self._give_up(part.reservation, LoadFailure.PEER_LOST, detail)
                case _:
                    pass

    def exposed_to(self, peer: PeerId) -> set[BlockId]:
        """See `PushReceiver`."""
        writable = (IncomingState.SENT, IncomingState.ACCEPTED)
        reserves = [
            part.reservation.reserve for part in self._open.of(peer) if part.state in writable
        ]
        return {
            block_id
            for reserve in reserves
            for block_id in reserve.local_block_ids[reserve.first_token // self._shape.block_size :]
        }

    # ---- parts -------------------------------------------------------------------------

    def _register(self, part: IncomingPart) -> None:
        """Register a part that waits, if its rank of P is connected."""
        owner = part.reservation.reserve.owner
        if self._peers.send_to(owner, part.rank, part.reservation.registration):
            part.state, part.alive_s = IncomingState.SENT, self._now_s()
            part.process = self._peers.of(owner, part.rank).process

    def _go_on_checking(self, part: IncomingPart) -> None:
        """Take digests of written tokens; once all are taken and P's are here, compare."""
        if part.is_taking or part.state not in CHECKED or part.reservation.failure is not None:
            return
        check = part.check
        piece = check.next_piece()
        if piece is None:
            if part.state is IncomingState.CHECKING and part.pushed is not None:
                self._on_checked(part, part.pushed)
            return

        def work() -> Callable[[], None]:
            began_s = self._clock.monotonic_s()
            found = check.take(piece)
            digest_s = self._clock.monotonic_s() - began_s
            return functools.partial(self._on_taken, part, piece, found, digest_s)

        part.is_taking = True
        self._seams.background.submit(work, part.reservation.reserve.request_id)

    def _on_taken(self, part: IncomingPart, piece: Piece, found: bytes, digest_s: float) -> None:
        """Add the digests of a piece that a rank of P has written."""
        part.is_taking = False
        part.check.add(piece, found)
        if part.state is IncomingState.CHECKING:
            part.digest_s += digest_s
        self._go_on_checking(part)

    def _on_checked(self, part: IncomingPart, pushed: Pushed) -> None:
        """Compare the digests taken, now complete, with those of the rank of P."""
        reservation, reserve, rank = part.reservation, part.reservation.reserve, part.rank
        num_valid = digests.num_valid_tokens(
            reserve.owner.shape,
            pushed.digests,
            part.check.found,
            first_token=reserve.first_token,
            num_tokens=reserve.num_tokens,
        )
        is_equal = num_valid == reserve.num_tokens
        was_heard = self._peers.send_to(reserve.owner, rank, Taken(reserve.load_id, is_equal))
        if is_equal:
            part.state = IncomingState.GOOD
            self._finish_if_over(reservation)
            return
        self._facts.faults["push_digest_mismatch"] += 1
        log_event(
            _log,
            "kv push has other digests",
            level=logging.ERROR,
            request=reserve.request_id,
            peer=reserve.owner.engine_id,
            rank=rank,
            was_rewritten=part.was_rewritten,
        )
        detail = f"rank {rank} of {reserve.owner.engine_id} has written other bytes than it has"
        if not was_heard:
            part.state = IncomingState.OVER  # P writes again only on request
            self._give_up(reservation, LoadFailure.DIGEST, detail)
            return
        part.state, part.alive_s = IncomingState.ACCEPTED, self._now_s()
        if part.was_rewritten:
            # It is answered by `Fail`.
            self._give_up(reservation, LoadFailure.DIGEST, detail)
        # Nothing counts as settled until P reports it of this second writing.
        part.was_rewritten, part.check = (
            True,
            reservation.new_check(part.route, self._seams.digests),
        )

    def _give_up(self, reservation: Reservation, reason: LoadFailure, detail: str) -> None:
        """End a reservation without KV, once no rank of P can be writing any more."""
        if reservation.failure is None:
            reservation.failure = (reason, detail)
            for part in reservation.parts.values():
                match part.state:
                    case IncomingState.WAITING:
                        part.state = IncomingState.OVER
                    case IncomingState.SENT | IncomingState.ACCEPTED:
                        self._ask_to_end(part)
                    case IncomingState.CHECKING:
                        self._ask_to_end(part)
                        part.state = IncomingState.OVER
                    case _:
                        pass
        self._finish_if_over(reservation)

    def _ask_to_end(self, part: IncomingPart) -> None:
        """Ask P to confirm that it writes nothing more."""
        reserve = part.reservation.reserve
        part.asked_s = self._now_s()
        was_heard = self._peers.send_to(reserve.owner, part.rank, Abort(reserve.load_id))
        if not was_heard and part.state in (IncomingState.SENT, IncomingState.ACCEPTED):
            part.lose(part.asked_s, self._seams.mover)

    def _finish_if_over(self, reservation: Reservation) -> None:
        reserve, parts = reservation.reserve, list(reservation.parts.values())
        if reserve.load_id not in self._open:
            return
        if reservation.failure is not None:
            if all(part.state in (IncomingState.OVER, IncomingState.GOOD) for part in parts):
                del self._open[reserve.load_id]
                self._facts.failed.append(reservation.failed(*reservation.failure))
            return
        if not all(part.state is IncomingState.GOOD for part in parts):
            return
        if not reservation.is_agreed:
            self._give_up(
                reservation, LoadFailure.DIGEST, "P's ranks give different handoffs for it"
            )
            return
        del self._open[reserve.load_id]
        self._facts.received.append(reservation.received(self._now_s()))

    # ---- the clock ---------------------------------------------------------------------

    def _on_due(self, part: IncomingPart, now_s: float) -> None:
        reservation, owner, rank = part.reservation, part.reservation.reserve.owner, part.rank
        match part.state:
            case IncomingState.WAITING:
                peer = self._peers.find(owner, rank)
                late = f"no connection to rank {rank} of {owner.engine_id} in time"
                reason = None if peer is None else peer.trouble
                self._give_up(reservation, *(reason or (LoadFailure.HANDSHAKE, late)))
            case IncomingState.SENT | IncomingState.ACCEPTED:
                # P's answer may only be late, and it is still the cheapest way to end.
                quiet_s = now_s - part.alive_s
                self._give_up(
                    reservation,
                    LoadFailure.TIMEOUT,
                    f"rank {rank} of {owner.engine_id} said nothing for {quiet_s:.1f} s",
                )
                if part.state in (IncomingState.SENT, IncomingState.ACCEPTED):
                    part.state, part.lost_s, part.asked_s = IncomingState.LOST, now_s, now_s
            case IncomingState.LOST:
                part.asked_s = now_s
                self._peers.meet(owner)
                self._ask_to_end(part)
            case _:
                pass

    def _fence_if_due(self, now_s: float) -> None:
        """Fence to end LOST parts, once no other transfer is affected or the quarantine is over."""
        lost = [part for part in self._open.parts(IncomingState.LOST) if self._is_stopped(part)]
        if not lost:
            return
        is_alone = self._is_alone() and all(
            part.reservation.failure is not None for part in self._open.parts(*EXPOSED)
        )
        if is_alone or now_s >= min(part.lost_s for part in lost) + self._transfer.quarantine_s:
            self._facts.faults["push_fenced"] += 1
            self.stop_all("a rank of P was lost while it could write here")

    def stop_all(self, reason: str) -> None:
        """Fence, which ends for certain all writing through the current target."""
        self._is_fencing = True
        try:
            self._fence(reason)
        finally:
            self._is_fencing = False
        now_s = self._now_s()
        for part in self._open.parts(*EXPOSED):
            part.lost_s, part.asked_s = min(part.lost_s, now_s), now_s
            part.state = IncomingState.OVER if self._is_stopped(part) else IncomingState.LOST
            self._give_up(part.reservation, LoadFailure.PEER_LOST, reason)
        for part in self._open.parts(IncomingState.WAITING):
            self._peers.meet(part.reservation.reserve.owner)

    # ---- small answers -----------------------------------------------------------------

    def _part(self, peer: PeerId, load_id: int) -> IncomingPart | None:
        """Return the part of a reservation that a rank of P writes; None if it writes none."""
        reservation = self._open.get(load_id)
        if reservation is None or reservation.reserve.owner != peer.owner:
            return None
        return reservation.parts.get(peer.rank)

    def _find(self, peer: PeerId, load_id: int, *states: IncomingState) -> IncomingPart | None:
        """Return the part that a message is about, if in one of these states; else count it."""
        part = self._part(peer, load_id)
        if part is None or part.state not in states:
            self._facts.faults["push_unexpected"] += 1
            return None
        part.alive_s = self._now_s()
        return part

    def _is_stopped(self, part: IncomingPart) -> bool:
        """Whether all writing ends once the target that P writes to is gone."""
        process, processes = part.process, self._seams.processes
        return (
            process is None
            or not processes.writes_directly(process)
            or not processes.is_alive(process)
        )

    def _now_s(self) -> float:
        return self._clock.monotonic_s()
