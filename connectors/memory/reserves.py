"""D's side of pushes: blocks that ranks of P may write until all has come or has been given up.

What P says is noted when it is said and acted on in the next poll. A reservation is over once
every rank of P has either written everything, and what it wrote was checked, or has said that
it writes no more; a P that cannot be asked is shut out (`may_write`), which is what the end of a
receiving agent is to the real thing.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdserve.connectors import digests
from pdserve.connectors.slicing import routes_to
from pdserve.errors import PeerError
from pdserve.wire.transfer import ConnectorReport, Failed, KVMode, LoadFailure, Received

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdserve.connectors.handover.instructions import Reserve
    from pdserve.connectors.memory.worker import MemoryWorker
    from pdserve.connectors.slicing import Route
    from pdserve.wire.ids import BlockId, RequestId
    from pdserve.wire.transfer import KVHandoff


class _State(enum.Enum):
    OPEN = enum.auto()
    WRITTEN = enum.auto()
    TAKEN = enum.auto()
    OVER = enum.auto()


@dataclass(frozen=True, slots=True)
class Written:
    """What a rank of P says of its part once every byte of it is written.

    Attributes:
        exposed_s: Seconds since it was computed.
    """

    handoff: KVHandoff
    digests: bytes
    exposed_s: float
    num_bytes: int
    num_descriptors: int


@dataclass(slots=True)
class _Leg:
    """What one rank of P has to write."""

    route: Route
    state: _State = _State.OPEN
    written: Written | None = None
    is_checked_before: bool = False


@dataclass(slots=True, eq=False)
class _Reservation:
    reserve: Reserve
    posted_s: float
    heard_s: float
    first_byte_s: float | None = None
    legs: list[_Leg] = field(default_factory=list)
    is_aborted: bool = False
    cause: LoadFailure | None = None
    detail: str = ""
    given_up_s: float | None = None

    def give_up(self, cause: LoadFailure, detail: str = "") -> None:
        """The first reason counts."""
        if self.cause is None:
            self.cause, self.detail = cause, detail


class Reserves:
    """All reservations of one rank of D, by load id."""

    def __init__(self, here: MemoryWorker) -> None:
        self._here = here
        self._open: dict[int, _Reservation] = {}

    def __len__(self) -> int:
        """Number of reservations that have not been reported."""
        return len(self._open)

    @property
    def blocks(self) -> Iterable[BlockId]:
        """Blocks that a P may still write."""
        size = self._here.context.layout.block_size
        for each in self._open.values():
            yield from each.reserve.local_block_ids[each.reserve.first_token // size :]

    def post(self, reserve: Reserve, now_s: float) -> None:
        """Register with the next poll."""
        self._open[reserve.load_id] = _Reservation(reserve, now_s, now_s)

    def abort(self, request_ids: set[RequestId]) -> None:
        """Have P write no more; each is reported once it does not."""
        for each in self._open.values():
            each.is_aborted |= each.reserve.request_id in request_ids

    # ---- what P says -----------------------------------------------------------------

    def heard(self, load_id: int, now_s: float) -> None:
        """P works on it."""
        each = self._open.get(load_id)
        if each is not None:
            each.heard_s = now_s

    def may_write(self, load_id: int, source_rank: int, now_s: float) -> bool:
        """Whether the blocks are open to this rank of P, which is about to write."""
        leg = self._leg(load_id, source_rank)
        if leg is None or leg.state in (_State.TAKEN, _State.OVER):
            return False
        each = self._open[load_id]
        each.heard_s = now_s
        if each.first_byte_s is None:
            each.first_byte_s = now_s
        return True

    def written(self, load_id: int, source_rank: int, what: Written) -> None:
        """P has written its part."""
        leg = self._leg(load_id, source_rank)
        if leg is not None and leg.state is _State.OPEN:
            leg.state, leg.written = _State.WRITTEN, what
            self._here.wake()

    def fail(self, load_id: int, source_rank: int, reason: str) -> None:
        """P writes nothing (more), and nothing of it is in flight."""
        leg = self._leg(load_id, source_rank)
        if leg is not None and leg.state is not _State.TAKEN:
            leg.state = _State.OVER
            self._open[load_id].give_up(LoadFailure.WITHDRAWN, reason)
            self._here.wake()

    # ---- what follows ----------------------------------------------------------------

    def poll(self, now_s: float) -> ConnectorReport:
        """Do what is due; return what is over."""
        received: list[Received] = []
        failed: list[Failed] = []
        for each in list(self._open.values()):
            outcome = self._advance(each, now_s)
            if outcome is None:
                continue
            del self._open[each.reserve.load_id]
            if isinstance(outcome, Failed):
                self._here.unwatch(each.reserve.nonce)
                failed.append(outcome)
            else:
                received.append(outcome)
        return ConnectorReport(received=received, failed=failed)

    def _advance(self, each: _Reservation, now_s: float) -> Received | Failed | None:
        if each.is_aborted:
            each.give_up(LoadFailure.ABORTED)
        if not each.legs and each.cause is None:
            self._register(each, now_s)
        for leg in each.legs:
            self._look_after(each, leg)
        lease_s = self._here.context.config.transfer.lease_s
        if each.heard_s + lease_s <= now_s:
            name = each.reserve.owner.engine_id
            each.give_up(LoadFailure.TIMEOUT, f"nothing was heard from {name} for {lease_s} s")
        if each.cause is not None:
            return self._give_up(each, now_s)
        if all(leg.state is _State.TAKEN for leg in each.legs):
            return _whole(each, now_s)
        return None

    def _register(self, each: _Reservation, now_s: float) -> None:
        reserve, mine = each.reserve, self._here.context
        try:
            routes = routes_to(reserve.owner.shape, mine.shape, mine.rank)
        except PeerError as error:
            each.give_up(LoadFailure.INCOMPATIBLE, str(error))
            return
        for route in routes:
            leg = _Leg(route)
            each.legs.append(leg)
            owner = self._here.exchange.find(reserve.owner.endpoints[route.source_rank])
            if owner is None:
                leg.state = _State.OVER
                each.give_up(LoadFailure.PEER_LOST, f"{reserve.owner.engine_id} is not here")
                continue
            why = self._here.why_not(owner, reserve.owner, route.source_rank)
            if why is not None:
                leg.state = _State.OVER
                each.give_up(*why)
                continue
            owner.pushes.register(self._here, reserve, route, now_s)
            owner.wake()

    def _look_after(self, each: _Reservation, leg: _Leg) -> None:
        """Check what P has written; notice that it is gone."""
        if leg.state in (_State.TAKEN, _State.OVER):
            return
        reserve, rank = each.reserve, self._here.context.rank
        owner = self._here.peer(reserve.owner, leg.route.source_rank)
        if owner is None or self._here.kv is None:
            leg.state = _State.OVER
            each.give_up(LoadFailure.PEER_LOST, f"{reserve.owner.engine_id} is gone")
            return
        if leg.state is not _State.WRITTEN or leg.written is None or each.cause is not None:
            return
        found = digests.digests_of(
            self._here.kv,
            reserve.owner.shape,
            self._here.context.shape,
            leg.route,
            reserve.local_block_ids,
            first_token=reserve.first_token,
            num_tokens=reserve.num_tokens,
        )
        num_valid = digests.num_valid_tokens(
            reserve.owner.shape,
            leg.written.digests,
            found,
            first_token=reserve.first_token,
            num_tokens=reserve.num_tokens,
        )
        if num_valid == reserve.num_tokens:
            leg.state = _State.TAKEN
        elif leg.is_checked_before:
            each.give_up(LoadFailure.DIGEST, f"twice the KV is good up to token {num_valid}")
            return
        else:
            leg.state, leg.is_checked_before = _State.OPEN, True
        owner.pushes.taken(reserve.nonce, rank, is_valid=leg.state is _State.TAKEN)
        owner.wake()

    def _give_up(self, each: _Reservation, now_s: float) -> Failed | None:
        """Ask P to stop, and wait until it has; at most for a lease's time."""
        reserve, rank = each.reserve, self._here.context.rank
        waiting = [leg for leg in each.legs if leg.state in (_State.OPEN, _State.WRITTEN)]
        if each.given_up_s is None:
            each.given_up_s = now_s
            for leg in waiting:
                owner = self._here.peer(reserve.owner, leg.route.source_rank)
                if owner is not None:
                    owner.pushes.abort(reserve.nonce, rank)
                    owner.wake()
        elif each.given_up_s + self._here.context.config.transfer.lease_s <= now_s:
            for leg in waiting:
                leg.state = _State.OVER
        if any(leg.state in (_State.OPEN, _State.WRITTEN) for leg in each.legs):
            return None
        assert each.cause is not None
        return Failed(
            request_id=reserve.request_id,
            reason=each.cause,
            detail=each.detail,
            load_id=reserve.load_id,
            num_valid_tokens=reserve.first_token,
        )

    def _leg(self, load_id: int, source_rank: int) -> _Leg | None:
        each = self._open.get(load_id)
        if each is None:
            return None
        return next((leg for leg in each.legs if leg.route.source_rank == source_rank), None)


def _whole(each: _Reservation, now_s: float) -> Received | Failed:
    reserve = each.reserve
    parts = [leg.written for leg in each.legs if leg.written is not None]
    handoff = parts[0].handoff
    if any(part.handoff != handoff for part in parts):
        return Failed(
            request_id=reserve.request_id,
            reason=LoadFailure.DIGEST,
            detail=f"ranks of {reserve.owner.engine_id} sent different handoffs",
            load_id=reserve.load_id,
            num_valid_tokens=reserve.first_token,
        )
    first_byte_s = each.posted_s if each.first_byte_s is None else each.first_byte_s
    return Received(
        request_id=reserve.request_id,
        num_bytes=sum(part.num_bytes for part in parts),
        num_descriptors=sum(part.num_descriptors for part in parts),
        wait_s=first_byte_s - each.posted_s,
        transfer_s=max(part.exposed_s for part in parts),
        load_id=reserve.load_id,
        mode=KVMode.PUSH,
        handoff=handoff,
    )
