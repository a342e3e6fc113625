"""Loads of a D rank: pulls a request's KV from every rank of P that has part of it.

A load has one part per route (`slicing.routes_to`), even if there is nothing to read on it:

    part:  WAITING (for the peer) -> READING (jobs on the lanes) -> ASKED (all bytes are here)
           -> CONFIRMED (the lease held, digests compared)
    load:  all parts CONFIRMED, all digests equal -> Received
           any trouble ----------------------------> Failed

A load that fails while a job may still write is quarantined: it is reported only once every
job of every part has settled, because until then the NIC may write the destination blocks.

It knows no connections and no threads; whoever runs the loop calls `tick`.
"""

from __future__ import annotations

import enum
import functools
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdserve.connectors import digests
from pdserve.connectors.pieces import pieces, token_ranges
from pdserve.connectors.remembered import Remembered
from pdserve.connectors.slicing import routes_to
from pdserve.connectors.transfer.peering import PeerState
from pdserve.connectors.transfer.protocol import Assist, Begin, Done, EndRead
from pdserve.connectors.transfer.seams import Direction, Job
from pdserve.errors import PeerError
from pdserve.observe.log import log_event
from pdserve.wire.ids import client_id_of
from pdserve.wire.transfer import Failed, LoadFailure, Received

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.connectors.handover.instructions import Load
    from pdserve.connectors.slicing import Route
    from pdserve.connectors.transfer.peer import Peer
    from pdserve.connectors.transfer.peers import Peers
    from pdserve.connectors.transfer.protocol import Confirm
    from pdserve.connectors.transfer.seams import Facts, JobEnd, Seams
    from pdserve.wire.ids import RequestId

_log = logging.getLogger(__name__)

_NEVER = float("inf")
_WARNED_S = 60.0
"""How long a request's lost KV is remembered: the choices of a request are loaded together."""


class ReadState(enum.Enum):
    """See the module's docstring."""

    WAITING = "waiting"
    READING = "reading"
    ASKED = "asked"
    CONFIRMED = "confirmed"


class Loads:
    """All loads of this rank."""

    def __init__(self, seams: Seams, facts: Facts, peers: Peers) -> None:
        self.seams = seams
        self.facts = facts
        self._peers = peers
        self._loads: dict[int, _Loading] = {}
        self._warned: Remembered[None] = Remembered()

    def __len__(self) -> int:
        """Number of loads that are not reported yet."""
        return len(self._loads)

    @property
    def open(self) -> list[Load]:
        """Return the loads that are not reported yet."""
        return [loading.load for loading in self._loads.values()]

    def begin(self, load: Load) -> None:
        """Begin a load."""
        loading = self._loads[load.load_id] = _Loading(load, self)
        context = self.seams.context
        loading.parts = [
            _Part(loading, route, self._peers.of(load.owner, route.source_rank))
            for route in routes_to(load.owner.shape, context.shape, context.rank)
        ]
        for part in loading.parts:
            if loading.failure is None:
                part.peer.enter(load.load_id, part)

    def abort(self, request_id: RequestId) -> None:
        """Stop a load; one that is over or unknown is left alone. O(loads)."""
        for loading in list(self._loads.values()):
            if loading.load.request_id == request_id:
                loading.lose(LoadFailure.ABORTED, "the request was aborted")

    def due_s(self) -> float:
        """Return when `tick` has to be called next. O(loads x parts)."""
        return min((loading.deadline_s for loading in self._loads.values()), default=_NEVER)

    def tick(self) -> bool:
        """Give up overdue loads; return whether there were any. O(loads x parts)."""
        now_s = self.seams.clock.monotonic_s()
        overdue = [each for each in self._loads.values() if each.deadline_s <= now_s]
        for loading in overdue:
            loading.time_out()
        return bool(overdue)

    def report_received(self, fact: Received) -> None:
        """Report a load that succeeded."""
        del self._loads[fact.load_id]
        self.facts.received.append(fact)

    def report_failed(self, fact: Failed) -> None:
        """Report a load that ended with no KV, or with only part of it."""
        del self._loads[fact.load_id]
        self.facts.failed.append(fact)
        log_event(
            _log,
            "kv load ended without kv",
            level=self._level_of(fact),
            request=fact.request_id,
            reason=fact.reason.value,
            detail=fact.detail,
        )

    def _level_of(self, fact: Failed) -> int:
        """Return the log level: one warning per client request, however many choices are lost."""
        client_id, _ = client_id_of(fact.request_id)
        if fact.reason is LoadFailure.ABORTED or client_id in self._warned:
            return logging.DEBUG
        now_s = self.seams.clock.monotonic_s()
        self._warned.add(client_id, None, now_s=now_s, until_s=now_s + _WARNED_S)
        return logging.WARNING


class _Loading:
    """One load.

    Attributes:
        failure: Set once the load is lost; it then waits only for jobs that may still write.
    """

    def __init__(self, load: Load, loads: Loads) -> None:
        self.load = load
        self.loads = loads
        self.parts: list[_Part] = []
        self.failure: tuple[LoadFailure, str] | None = None
        self.requested_s = loads.seams.clock.monotonic_s()

    @property
    def started_s(self) -> float:
        """When the transfer's clock started, with the first byte posted; inf before."""
        return min((part.started_s for part in self.parts), default=_NEVER)

    @property
    def deadline_s(self) -> float:
        """Time at which the load is given up; inf once it is lost."""
        if self.failure is not None:
            return _NEVER
        config = self.loads.seams.transfer
        started_s = self.started_s
        if started_s < _NEVER:
            return started_s + config.transfer_timeout_s
        patience_s = config.handshake_timeout_s
        if all(part.peer.state is PeerState.READY for part in self.parts):
            patience_s += config.transfer_timeout_s  # it waits for other loads, not for peers
        return self.requested_s + patience_s

    def time_out(self) -> None:
        """Fail the load because it took too long."""
        late = next(part for part in self.parts if part.state is not ReadState.CONFIRMED)
        unmet = [part for part in self.parts if part.peer.state is not PeerState.READY]
        if unmet and late.state is ReadState.WAITING:
            late = unmet[0]
        self.lose(
            LoadFailure.HANDSHAKE if late in unmet else LoadFailure.TIMEOUT,
            f"{late.peer.id} is {late.peer.state.value}, the load {late.state.value} since "
            f"{self.loads.seams.clock.monotonic_s() - self.requested_s:.1f} s",
        )

    def lose(self, reason: LoadFailure, detail: str) -> None:
        """End the load without KV: now, or once its jobs in flight have settled."""
        if self.failure is not None:
            return
        self.failure = (reason, detail)
        for part in self.parts:
            part.stop()
        self.report_if_settled()

    def report_if_settled(self) -> None:
        """Report the load if it is lost and its last job has settled."""
        if self.failure is None or any(part.num_unsettled for part in self.parts):
            return
        load = self.load
        for part in self.parts:
            part.say_end()
        reason, detail = self.failure
        valid = (part.num_valid_tokens for part in self.parts)
        self.loads.report_failed(
            Failed(
                request_id=load.request_id,
                reason=reason,
                detail=detail,
                load_id=load.load_id,
                num_valid_tokens=min(valid, default=load.first_token),
            )
        )

    @property
    def _digest_s(self) -> float:
        """Return the transfer time spent on digests, several of which are taken at once."""
        num_pieces = sum(len(part.found) for part in self.parts)
        at_once = max(1, min(num_pieces, self.loads.seams.mover.num_lanes))
        return sum(part.digest_s for part in self.parts) / at_once

    def finish_if_confirmed(self) -> None:
        """Report the load as received if all parts are confirmed and all digests are right."""
        if any(part.state is not ReadState.CONFIRMED for part in self.parts):
            return
        load = self.load
        worst = min(self.parts, key=lambda part: part.num_valid_tokens)
        if worst.num_valid_tokens < load.num_tokens:
            block = load.remote_block_ids[worst.num_valid_tokens // load.owner.shape.block_size]
            self.lose(
                LoadFailure.DIGEST,
                f"what came from {worst.peer.id} is not what it has there, from its block "
                f"{block} (token {worst.num_valid_tokens}) on",
            )
            return
        started_s, now_s = self.started_s, self.loads.seams.clock.monotonic_s()
        self.loads.report_received(
            Received(
                request_id=load.request_id,
                num_bytes=sum(part.num_bytes for part in self.parts),
                num_descriptors=sum(part.num_descriptors for part in self.parts),
                wait_s=started_s - self.requested_s,
                transfer_s=now_s - started_s,
                load_id=load.load_id,
                digest_s=self._digest_s,
                elapsed_s=now_s - self.requested_s,
            )
        )


@dataclass(slots=True, eq=False)
class _Part:
    """The part of a load that comes over one route. A `PeerUser`.

    Attributes:
        started_s: When the first job was posted, or all was asked for at once; inf before.
        num_unsettled: Number of jobs that may still write.
        found: Digests of each piece, in the order of tokens.
        num_valid_tokens: Leading tokens of the prompt that were confirmed and compared.
    """

    loading: _Loading
    route: Route
    peer: Peer
    state: ReadState = ReadState.WAITING
    num_unsettled: int = 0
    num_bytes: int = 0
    num_descriptors: int = 0
    digest_s: float = 0.0
    found: list[bytes] = field(default_factory=list)
    num_valid_tokens: int = field(init=False)
    _first_job: Job | None = None
    _asked_s: float = _NEVER
    _has_begun: bool = False
    _is_assisted: bool = False

    def __post_init__(self) -> None:
        self.num_valid_tokens = self.loading.load.first_token

    @property
    def started_s(self) -> float:
        """See the class."""
        return self._asked_s if self._first_job is None else self._first_job.posted_s

    # ---- what the peer says --------------------------------------------------------------

    def on_ready(self) -> None:
        """See `PeerUser`: begin."""
        if self.state is not ReadState.WAITING or self.loading.failure is not None:
            return
        self.state = ReadState.READING
        load, mover = self.loading.load, self.loading.loads.seams.mover
        self._has_begun = True
        self.peer.send(Begin(load.nonce, load.load_id))
        try:
            for job in self._jobs():
                self._first_job = self._first_job or job
                self.num_unsettled += 1
                mover.submit(job)
        except PeerError as error:
            self.loading.lose(LoadFailure.INCOMPATIBLE, str(error))
            return
        self._ask_if_all_here()

    def on_confirm(self, confirm: Confirm) -> None:
        """See `PeerUser`: P's verdict on the lease, and its digests of the bytes."""
        if self.state is not ReadState.ASKED or self.loading.failure is not None:
            return
        if not confirm.valid:
            self.loading.lose(
                LoadFailure.LEASE_LOST, f"{self.peer.id} says that the lease had ended"
            )
            return
        load = self.loading.load
        self.state = ReadState.CONFIRMED
        self.peer.leave(load.load_id)
        self._compare(confirm.digests)
        self.loading.finish_if_confirmed()

    def on_lost(self, reason: LoadFailure, detail: str) -> None:
        """See `PeerUser`: a part that is still waiting keeps waiting."""
        if self.state is not ReadState.WAITING:
            self.loading.lose(reason, detail)

    def on_hopeless(self, reason: LoadFailure, detail: str) -> None:
        """See `PeerUser`."""
        self.loading.lose(reason, detail)

    # ---- what the load says --------------------------------------------------------------

    def stop(self) -> None:
        """Stop the part, which is no longer needed; jobs in flight still have to settle."""
        self.num_unsettled = self.loading.loads.seams.mover.abandon(self)
        if not self.num_unsettled:
            self.peer.leave(self.loading.load.load_id)

    def say_end(self) -> None:
        """Tell P that its blocks are no longer being read."""
        if self._has_begun and self.state is not ReadState.CONFIRMED:
            self.peer.send(EndRead(self.loading.load.nonce, self.loading.load.load_id))

    # ---- reading ---------------------------------------------------------------------------

    def _jobs(self) -> Iterator[Job]:
        """Cut the part at edges of P's blocks, so that each piece has digests of its own."""
        seams, load = self.loading.loads.seams, self.loading.load
        source, dest, route = load.owner.shape, seams.context.shape, self.route
        tokens = (load.first_token, load.num_tokens)
        for first, end in token_ranges(source, route, tokens, seams.piece_bytes):
            piece = pieces(
                source,
                dest,
                route,
                load.remote_block_ids,
                load.local_block_ids,
                first_token=first,
                num_tokens=end,
            )
            number = len(self.found)
            self.found.append(b"")
            yield Job(
                tag=self,
                direction=Direction.READ,
                remote=self.peer.remote,
                unit_bytes=piece.unit_bytes,
                local_units=piece.dest_units,
                remote_units=piece.source_units,
                on_settled=functools.partial(self._on_settled, number, piece.num_bytes),
                then=functools.partial(
                    seams.digests.found,
                    source,
                    route,
                    load.local_block_ids,
                    first_token=first,
                    num_tokens=end,
                ),
                on_slow=self._on_slow,
                link=self.peer.remote.link,
            )

    def _on_slow(self) -> None:
        if not self._is_assisted:
            self._is_assisted = True
            self.peer.send(Assist(self.loading.load.load_id))

    def _on_settled(self, number: int, num_bytes: int, settled: JobEnd) -> None:
        self.num_unsettled -= 1
        self.loading.loads.seams.trace(
            Direction.READ, num_bytes, self.loading.load.request_id, settled
        )
        if self.loading.failure is not None:
            if not self.num_unsettled:
                self.peer.leave(self.loading.load.load_id)
            self.loading.report_if_settled()
            return
        if settled.failure is not None:
            self.loading.lose(LoadFailure.PEER_LOST, settled.failure)
            return
        assert isinstance(settled.value, bytes)
        self.found[number] = settled.value
        self.num_bytes += num_bytes
        self.num_descriptors += settled.num_descriptors
        self.digest_s += settled.settled_s - settled.moved_s
        self._ask_if_all_here()

    def _ask_if_all_here(self) -> None:
        if self.state is not ReadState.READING or self.num_unsettled:
            return
        self.state = ReadState.ASKED
        self._asked_s = self.loading.loads.seams.clock.monotonic_s()
        load = self.loading.load
        self.peer.send(Done(load.nonce, load.load_id, load.first_token))

    def _compare(self, expected: bytes) -> None:
        """Accept as KV only the leading blocks whose digests match P's."""
        load = self.loading.load
        self.num_valid_tokens = digests.num_valid_tokens(
            load.owner.shape,
            expected,
            b"".join(self.found),
            first_token=load.first_token,
            num_tokens=load.num_tokens,
        )
        if self.num_valid_tokens < load.num_tokens:
            self.loading.loads.facts.faults["digest_mismatch"] += 1
            log_event(
                _log,
                "kv digest mismatch",
                level=logging.ERROR,
                request=load.request_id,
                peer=load.owner.engine_id,
                rank=self.route.source_rank,
                first_bad_token=self.num_valid_tokens,
            )
