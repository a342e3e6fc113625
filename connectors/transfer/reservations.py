"""A reservation at D: the part of each rank of P, and the digests.

Only values and what is derived from them; `receiving` acts on them.

The digests of what a rank of P writes are taken piece by piece as P goes on (`Check`). Once P has
said that the WRITEs of some tokens have settled, nobody writes these bytes: each earlier
registration of the blocks ended by P's word, or by a fence. So a digest taken then says as much as
one taken after the last byte; neither says anything of a moment later. Sums of layers add up, so
the last chunk, which may come layer by layer, is taken so, too.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from pdserve.connectors.transfer.protocol import Register
from pdserve.observe.log import log_event
from pdserve.wire.transfer import Failed, KVMode, LoadFailure, Received

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.config.schema import TransferConfig
    from pdserve.connectors.digests import BlockDigests
    from pdserve.connectors.handover.instructions import Reserve
    from pdserve.connectors.slicing import Route
    from pdserve.connectors.transfer.peering import PeerId
    from pdserve.connectors.transfer.protocol import Process, Pushed
    from pdserve.connectors.transfer.seams import Mover
    from pdserve.wire.ids import BlockId
    from pdserve.wire.transfer import KVHandoff, KVShape

_log = logging.getLogger(__name__)

_ASK_AGAIN_S = 0.2
_DIGEST = np.dtype("<u8")
_NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens `[first_token, end_token)` of some layers (absolute)."""

    first_token: int
    end_token: int
    layers: range


class Check:
    """The digests of the KV that one rank of P writes to one rank of D.

        tokens:  first ........ taken ........ settled ........ num_tokens
        layers:  all            all            [.., layers_end) of those behind `settled`

    Of the tokens behind what was taken whole, some layers may be taken already; then they are of
    all these tokens.

    Args:
        digests: Of this rank's memory.
        block_ids: D's whole table.
        first_token: First token of the transfer.
    """

    def __init__(
        self,
        digests: BlockDigests,
        source: KVShape,
        route: Route,
        block_ids: Sequence[BlockId],
        *,
        first_token: int,
        num_tokens: int,
    ) -> None:
        self._digests = digests
        self._source, self._route = source, route
        self._block_ids = block_ids
        self._first_block = first_token // source.block_size
        self._num_tokens = num_tokens
        is_empty = not route or first_token >= num_tokens
        num_blocks = 0 if is_empty else -(-num_tokens // source.block_size) - self._first_block
        self._sums = np.zeros(num_blocks, dtype=_DIGEST)
        self._taken = self._settled = num_tokens if is_empty else first_token
        self._taken_layers_end = self._settled_layers_end = route.layers.start

    @property
    def found(self) -> bytes:
        """The digests that P's must equal, once `next_piece` is None and all has settled."""
        return self._sums.tobytes()

    def settle(self, num_tokens: int, layers_end: int = 0) -> None:
        """Note that P has finished writing these tokens.

        Args:
            num_tokens: Number of leading tokens with all layers written.
            layers_end: End of the layers written of the tokens after those, up to the last.
        """
        if num_tokens < self._num_tokens:
            num_tokens -= num_tokens % self._source.block_size
        self._settled = min(max(self._settled, num_tokens), self._num_tokens)
        # Layers reported for a longer span of tokens hold for those after `_settled`, too.
        layers_end = min(layers_end, self._route.layers.stop)
        self._settled_layers_end = max(self._settled_layers_end, layers_end)

    def settle_all(self) -> None:
        """Note that P has written everything."""
        self._settled = self._num_tokens

    def next_piece(self) -> Piece | None:
        """Return a piece to take now, which must be added before the next call; None = none."""
        if self._taken >= self._num_tokens:
            return None
        layers = self._route.layers
        is_begun = self._taken_layers_end > layers.start
        if self._settled > self._taken and not is_begun:
            return Piece(self._taken, self._settled, layers)
        is_rest = self._settled >= self._num_tokens
        stop = layers.stop if is_rest else self._settled_layers_end
        if stop > self._taken_layers_end:
            return Piece(self._taken, self._num_tokens, range(self._taken_layers_end, stop))
        return None

    def take(self, piece: Piece) -> bytes:
        """Return the digests of a piece, read from memory. For any thread; heavy."""
        return self._digests.found(
            self._source,
            dataclasses.replace(self._route, layers=piece.layers),
            self._block_ids,
            first_token=piece.first_token,
            num_tokens=piece.end_token,
        )

    def add(self, piece: Piece, taken: bytes) -> None:
        """Add the digests that `take` returned."""
        size = self._source.block_size
        sums = np.frombuffer(taken, _DIGEST)
        start = piece.first_token // size - self._first_block
        self._sums[start : start + len(sums)] += sums
        if piece.layers.stop == self._route.layers.stop:
            self._taken = piece.end_token
        else:
            self._taken_layers_end = piece.layers.stop


class IncomingState(enum.Enum):
    """See the docstring of `receiving`."""

    WAITING = "waiting"
    SENT = "sent"
    ACCEPTED = "accepted"
    CHECKING = "checking"
    GOOD = "good"
    OVER = "over"
    LOST = "lost"


EXPOSED = (IncomingState.SENT, IncomingState.ACCEPTED, IncomingState.LOST)
"""Where P may be writing."""

CHECKED = (IncomingState.SENT, IncomingState.ACCEPTED, IncomingState.CHECKING)
"""Where the digests of what is written are taken."""


@dataclass(slots=True, eq=False)
class IncomingPart:
    """The part of a reservation that one rank of P writes.

    Attributes:
        alive_s: P's last sign of life.
        check: The digests of the KV that P has written.
        is_taking: Whether the digests of one of its pieces are being taken.
        needs_agent: Whether P's transport writes only while this side is driven.
        asked_s: When P was last asked to end the part.
        lost_s: When the part became LOST.
        digest_s: Seconds of the check that came after `pushed`.
    """

    reservation: Reservation
    route: Route
    check: Check
    state: IncomingState = IncomingState.WAITING
    alive_s: float = 0.0
    is_taking: bool = False
    needs_agent: bool = False
    was_rewritten: bool = False
    asked_s: float = _NEVER
    lost_s: float = _NEVER
    process: Process | None = None
    pushed: Pushed | None = None
    pushed_s: float = 0.0
    digest_s: float = 0.0

    @property
    def rank(self) -> int:
        """The rank of P."""
        return self.route.source_rank

    def lose(self, now_s: float, mover: Mover) -> None:
        """Note that P cannot be reached: it may still write, if the mover lets it."""
        self.state = IncomingState.LOST if mover.outlives_links else IncomingState.OVER
        self.lost_s = self.asked_s = now_s

    def due_s(self, transfer: TransferConfig) -> float:
        """Return when the part next needs attention (monotonic seconds); inf = never."""
        match self.state:
            case IncomingState.WAITING:
                return self.reservation.since_s + transfer.handshake_timeout_s
            case IncomingState.SENT | IncomingState.ACCEPTED:
                if self.reservation.failure is not None:
                    return self.asked_s + transfer.transfer_timeout_s
                return self.alive_s + transfer.lease_s
            case IncomingState.LOST:
                return self.asked_s + _ASK_AGAIN_S
            case _:
                return _NEVER


@dataclass(slots=True, eq=False)
class Reservation:
    """Blocks that one P writes into.

    Attributes:
        parts: The part of each rank of P, by rank.
        began_s: When P was first known to write; inf before.
        failure: Why the reservation ends without KV.
    """

    reserve: Reserve
    since_s: float
    parts: dict[int, IncomingPart] = field(default_factory=dict)
    began_s: float = _NEVER
    failure: tuple[LoadFailure, str] | None = None

    @property
    def is_agreed(self) -> bool:
        """Whether all ranks of P that have written everything give the same handoff."""
        pushed = self._pushed
        return all(each.handoff == pushed[0].handoff for each in pushed)

    def why_wrong(self, handoff: KVHandoff) -> str | None:
        """Return why a handoff cannot be that of this push; None = it can."""
        reserve = self.reserve
        for what, theirs, ours in (
            ("nonce", handoff.nonce, reserve.nonce),
            ("engine", handoff.engine_id, reserve.owner.engine_id),
            ("incarnation", handoff.incarnation, reserve.owner.incarnation),
            ("number of tokens", handoff.num_tokens, reserve.num_tokens),
        ):
            if theirs != ours:
                return f"the handoff's {what} is {theirs}, not {ours}"
        return None

    @property
    def registration(self) -> Register:
        """The registration that D sends to each rank of P."""
        reserve = self.reserve
        return Register(
            reserve.nonce,
            reserve.load_id,
            reserve.request_id,
            reserve.local_block_ids,
            reserve.first_token,
            reserve.num_tokens,
        )

    def new_check(self, route: Route, digests: BlockDigests) -> Check:
        """Return a check, with no digests taken yet, of the KV to come over a route."""
        reserve = self.reserve
        return Check(
            digests,
            reserve.owner.shape,
            route,
            reserve.local_block_ids,
            first_token=reserve.first_token,
            num_tokens=reserve.num_tokens,
        )

    def failed(self, reason: LoadFailure, detail: str) -> Failed:
        """Return, and log, the report of a reservation that ends without KV."""
        reserve = self.reserve
        log_event(
            _log,
            "kv push ended without kv",
            level=logging.DEBUG if reason is LoadFailure.ABORTED else logging.WARNING,
            request=reserve.request_id,
            reason=reason.value,
            detail=detail,
        )
        return Failed(
            request_id=reserve.request_id,
            reason=reason,
            detail=detail,
            load_id=reserve.load_id,
            num_valid_tokens=reserve.first_token,
        )

    def received(self, now_s: float) -> Received:
        """Return the report of a reservation whose parts are all GOOD."""
        reserve, parts, pushed = self.reserve, self.parts.values(), self._pushed
        began_s = min(self.began_s, *(part.pushed_s for part in parts))
        return Received(
            request_id=reserve.request_id,
            num_bytes=sum(each.num_bytes for each in pushed),
            num_descriptors=sum(each.num_descriptors for each in pushed),
            wait_s=began_s - self.since_s,
            transfer_s=max(
                each.exposed_s + now_s - part.pushed_s
                for part, each in zip(parts, pushed, strict=True)
            ),
            load_id=reserve.load_id,
            mode=KVMode.PUSH,
            handoff=pushed[0].handoff,
            digest_s=max(part.digest_s for part in parts),
            elapsed_s=now_s - self.since_s,
        )

    @property
    def _pushed(self) -> list[Pushed]:
        return [part.pushed for part in self.parts.values() if part.pushed is not None]


class Reservations(dict[int, Reservation]):
    """The reservations that are not reported yet, by load id."""

    def parts(self, *states: IncomingState) -> list[IncomingPart]:
        """Return the parts in any of these states; all parts if no state is given."""
        return [
            part
            for reservation in self.values()
            for part in reservation.parts.values()
            if not states or part.state in states
        ]

    def of(self, peer: PeerId) -> list[IncomingPart]:
        """Return all parts of a rank of P."""
        return [
            reservation.parts[peer.rank]
            for reservation in self.values()
            if reservation.reserve.owner == peer.owner and peer.rank in reservation.parts
        ]
