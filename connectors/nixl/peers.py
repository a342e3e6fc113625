"""The reading side of a transfer thread: what D does with each P it has handoffs of.

One `Peer` per life (incarnation) of an engine. It connects when a request of that engine
is queued, warms the transport up, keeps leases alive, and carries out loads:

    WAITING (for the peer) -> READING (posted) -> ASKED (all bytes are here) -> Received
       any of them, on trouble ----------------> Failed

A load that fails while a READ is in flight is quarantined: it is reported only once its
transfers have settled, because until then the NIC may write the destination blocks.

    peer:  IDLE -> CONNECTING -> WIRING -> READY -> DRAINING -> IDLE
                        `-----------`---- refused --> REFUSED (for ever)

It knows no tensors and no threads; whoever runs the loop calls `tick`.
"""

from __future__ import annotations

import enum
import functools
import logging
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, assert_never

import msgspec
import numpy as np

from pdserve.connectors.nixl.agent import AgentError, TransferState
from pdserve.connectors.nixl.channel import (
    ClosedError,
    Connection,
    UnreachableError,
    start_connect,
)
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
    ToClient,
    Welcome,
)
from pdserve.observe.log import log_event
from pdserve.wire.ids import EngineId
from pdserve.wire.transfer import Failed, LoadFailure, Received

if TYPE_CHECKING:
    import numpy.typing as npt

    from pdserve.connectors.base import ConnectorContext
    from pdserve.connectors.nixl.agent import NixlAgent, Prepared, Transfer
    from pdserve.connectors.nixl.reactor import Reactor
    from pdserve.connectors.pull.instructions import Load, Owner, Watch
    from pdserve.errors import PeerError
    from pdserve.observe.clock import Clock
    from pdserve.wire.ids import RequestId

_log = logging.getLogger(__name__)

HEARTBEATS_PER_LEASE = 6
_NONCES_PER_HEARTBEAT = 4096  # a frame has at most 1 MiB

# One READ of at most so many bytes: between two of them heartbeats and other peers get
# their turn, and 64 MiB hide the 50 us of a post at any rate there is.
_CHUNK_BYTES = 64 << 20
_MAX_CHUNKS_IN_FLIGHT = 4
_BACKOFF_MIN_S, _BACKOFF_MAX_S = 1.0, 60.0
_NEVER = float("inf")


class PeerState(enum.Enum):
    """See the module's docstring."""

    IDLE = "idle"
    CONNECTING = "connecting"
    WIRING = "wiring"
    READY = "ready"
    DRAINING = "draining"
    REFUSED = "refused"


class LoadState(enum.Enum):
    """See the module's docstring."""

    WAITING = "waiting"
    READING = "reading"
    ASKED = "asked"


@dataclass(slots=True, eq=False)
class _Loading:
    """One load.

    Attributes:
        chunks: Pairs of (local, remote) block ids that are not posted yet.
        first_post_s: When the transfer's clock started.
        failure: Set once it is lost; then only `transfers` are waited for.
        quarantined_s: Since when.
    """

    load: Load
    requested_s: float
    chunks: deque[tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]]
    num_bytes: int
    num_descriptors: int
    state: LoadState = LoadState.WAITING
    first_post_s: float = 0.0
    assisted: bool = False
    transfers: list[Transfer] = field(default_factory=list)
    failure: tuple[LoadFailure, str] | None = None
    quarantined_s: float = _NEVER


@dataclass(slots=True)
class Local:
    """This engine's side of every transfer; `agent` and what it prepared change together."""

    agent: NixlAgent
    pool: Prepared
    scratch: Prepared
    num_scratch_units: int


@dataclass(slots=True)
class _Remote:
    """What the agent knows of a peer; None is what it has not prepared (yet)."""

    name: str
    num_blocks: int
    pool: Prepared | None = None
    scratch: Prepared | None = None


def count_runs(local: npt.NDArray[np.int32], remote: npt.NDArray[np.int32]) -> int:
    """Descriptors that are left of these pairs when neighbours on both sides are merged."""
    if not len(local):
        return 0
    return 1 + int(np.count_nonzero((np.diff(local) != 1) | (np.diff(remote) != 1)))


class Peers:
    """All peers this engine loads from.

    Attributes:
        received, failed: Facts for the next report; the owner of the loop empties them.
    """

    def __init__(
        self,
        context: ConnectorContext,
        *,
        secret: bytes,
        reactor: Reactor,
        clock: Clock,
        local: Local,
    ) -> None:
        self.context = context
        self.secret = secret
        self.reactor = reactor
        self.clock = clock
        self.local = local
        self.decoder = msgspec.msgpack.Decoder(ToClient)
        self.received: list[Received] = []
        self.failed: list[Failed] = []
        self._peers: dict[Owner, Peer] = {}
        self._by_request: dict[RequestId, Peer] = {}

    @property
    def is_polling(self) -> bool:
        """Whether something is in flight that only `tick` notices the end of."""
        return any(peer.num_in_flight for peer in self._peers.values())

    @property
    def has_more_to_post(self) -> bool:
        """Whether `tick` would post again at once."""
        return any(peer.can_post for peer in self._peers.values())

    @property
    def num_loads(self) -> int:
        """Loads that are not reported."""
        return sum(len(peer.loads) for peer in self._peers.values())

    def watch(self, watch: Watch) -> None:
        """Meet the owner and keep its lease alive."""
        self._peer(watch.owner).watch(watch)

    def load(self, load: Load) -> None:
        """Begin to load."""
        peer = self._peer(load.owner)
        self._by_request[load.request_id] = peer
        peer.load(load)

    def release(self, nonce: str, owner: Owner) -> None:
        """Tell the owner that its lease will not be read."""
        self._peer(owner).release(nonce)

    def abort(self, request_id: RequestId) -> None:
        """Stop a load; one that is over or unknown is left alone."""
        peer = self._by_request.get(request_id)
        if peer is not None:
            peer.abort(request_id)

    def due_s(self) -> float:
        """When `tick` has to be called next. O(peers + loads)."""
        return min((peer.due_s() for peer in self._peers.values()), default=_NEVER)

    def tick(self) -> bool:
        """Poll, post, and do what is due. O(peers + loads).

        Returns:
            Whether anything moved.
        """
        moved = False
        for owner, peer in list(self._peers.items()):
            moved |= peer.tick()
            if peer.is_forgettable:
                del self._peers[owner]
        return moved

    def oldest_quarantine_s(self) -> float:
        """Since when the oldest lost load waits for its transfers; inf = none does."""
        return min((peer.quarantined_s() for peer in self._peers.values()), default=_NEVER)

    def fence(self, reason: str) -> None:
        """The agent is gone, and with it every transfer: end all that depended on one."""
        for peer in self._peers.values():
            peer.fence(reason)

    def report_received(self, fact: Received) -> None:
        """A load is over, well."""
        del self._by_request[fact.request_id]
        self.received.append(fact)

    def report_failed(self, fact: Failed) -> None:
        """A load is over, without KV."""
        del self._by_request[fact.request_id]
        self.failed.append(fact)
        log_event(
            _log,
            "kv load ended without kv",
            level=logging.DEBUG if fact.reason is LoadFailure.ABORTED else logging.WARNING,
            request=fact.request_id,
            reason=fact.reason.value,
            detail=fact.detail,
        )

    def close(self) -> None:
        """Say goodbye everywhere. Transfers are the agent's to end."""
        for peer in self._peers.values():
            peer.say_bye()

    def _peer(self, owner: Owner) -> Peer:
        if owner not in self._peers:
            self._peers[owner] = Peer(owner, self)
        return self._peers[owner]


class Peer:
    """One life of one engine that this one reads from."""

    def __init__(self, owner: Owner, peers: Peers) -> None:
        self._owner = owner
        self._peers = peers
        self._transfer_config = peers.context.config.transfer
        self._state = PeerState.IDLE
        self._since_s = peers.clock.monotonic_s()
        self._connection: Connection[ToClient] | None = None
        self._remote: _Remote | None = None
        self._warm_up: Transfer | None = None
        self._warm_up_posted_s = 0.0
        self._back_off_s = 0.0
        self._not_before_s = 0.0
        self._trouble = (LoadFailure.PEER_LOST, "")
        self._refusal: tuple[LoadFailure, str] | None = None
        self._watches: dict[str, Watch] = {}
        self._next_beat_s = _NEVER
        self._releases: list[Release] = []
        self.loads: dict[int, _Loading] = {}

    # ---- questions -------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        """Posted transfers that have not settled, the warm-up included."""
        return sum(len(loading.transfers) for loading in self.loads.values()) + (
            self._warm_up is not None
        )

    @property
    def can_post(self) -> bool:
        """Whether a chunk waits and may be posted."""
        return (
            self._state is PeerState.READY
            and any(loading.chunks for loading in self.loads.values())
            and self.num_in_flight < _MAX_CHUNKS_IN_FLIGHT
        )

    @property
    def is_forgettable(self) -> bool:
        """Whether nothing would be lost without this object."""
        return (
            self._state in (PeerState.IDLE, PeerState.REFUSED)
            and not self._is_wanted
            and self._now_s() >= self._not_before_s + _BACKOFF_MAX_S
        )

    @property
    def _is_wanted(self) -> bool:
        return bool(self._watches or self._releases or self.loads)

    @property
    def _is_met(self) -> bool:
        return self._state in (PeerState.WIRING, PeerState.READY)

    def due_s(self) -> float:
        """When `tick` has to be called next, transfers in flight aside."""
        due_s = min((self._deadline_s(loading) for loading in self.loads.values()), default=_NEVER)
        match self._state:
            case PeerState.IDLE:
                if self.loads:
                    return -_NEVER  # they are carried on or lost at once
                return self._not_before_s if self._is_wanted else _NEVER
            case PeerState.CONNECTING | PeerState.WIRING:
                return min(due_s, self._handshake_ends_s, self._next_beat_s)
            case PeerState.READY:
                return min(due_s, self._next_beat_s)
            case PeerState.DRAINING:
                return due_s if self.num_in_flight else -_NEVER
            case PeerState.REFUSED:
                return due_s
            case _:
                assert_never(self._state)

    def quarantined_s(self) -> float:
        """Since when the oldest lost load waits for its transfers; inf = none does."""
        return min((load.quarantined_s for load in self.loads.values()), default=_NEVER)

    @property
    def _handshake_ends_s(self) -> float:
        return self._since_s + self._transfer_config.handshake_timeout_s

    # ---- what the scheduler half wants -------------------------------------------------

    def watch(self, watch: Watch) -> None:
        """Keep a lease alive."""
        self._watches[watch.nonce] = watch
        if self._is_met:
            self._send(Heartbeat([watch.nonce]))
        beat_s = self._now_s() + watch.lease_s / HEARTBEATS_PER_LEASE
        self._next_beat_s = min(self._next_beat_s, beat_s)

    def release(self, nonce: str) -> None:
        """Give a lease back, as soon as there is a connection."""
        self._unwatch(nonce)
        self._send_release(Release(nonce))

    def load(self, load: Load) -> None:
        """Begin to load."""
        loading = self._plan(load)
        self.loads[loading.load.load_id] = loading

    def abort(self, request_id: RequestId) -> None:
        """Stop a load; what is in flight settles first."""
        for loading in list(self.loads.values()):
            if loading.load.request_id == request_id and loading.failure is None:
                self._lose(loading, LoadFailure.ABORTED, "the request was aborted")

    # ---- the loop ----------------------------------------------------------------------

    def tick(self) -> bool:
        """Poll, post, and do what is due; return whether anything moved."""
        moved = self._poll()
        now_s = self._now_s()
        for loading in list(self.loads.values()):
            if loading.failure is None and self._deadline_s(loading) <= now_s:
                self._time_out(loading)
                moved = True
        match self._state:
            case PeerState.IDLE:
                if now_s < self._not_before_s:
                    reason, detail = self._trouble
                    wait_s = self._not_before_s - now_s
                    self._lose_all(reason, f"{detail}; next try in {wait_s:.1f} s")
                elif self._is_wanted:
                    self._connect()
                    moved = True
            case PeerState.CONNECTING | PeerState.WIRING:
                if now_s >= self._handshake_ends_s:
                    self._give_up(
                        LoadFailure.HANDSHAKE,
                        f"no complete handshake with {self._owner.engine_id} in "
                        f"{self._transfer_config.handshake_timeout_s} s "
                        f"({self._state.value})",
                    )
                    moved = True
            case PeerState.READY:
                moved |= self._post()
            case PeerState.DRAINING:
                if not self.num_in_flight:
                    self._forget_remote()
                    self._become(PeerState.IDLE)
                    moved = True
            case PeerState.REFUSED:
                assert self._refusal is not None
                self._lose_all(*self._refusal)
            case _:
                assert_never(self._state)
        if now_s >= self._next_beat_s:
            if self._is_met:
                self._send_heartbeats()
            self._plan_beat()
        return moved

    def fence(self, reason: str) -> None:
        """The agent was destroyed: nothing is in flight any more, no handle is valid."""
        self._warm_up = None
        self._remote = None
        for loading in list(self.loads.values()):
            loading.transfers.clear()
            if loading.failure is not None:
                self._report(loading)
            elif loading.state is not LoadState.WAITING:
                self._lose(loading, LoadFailure.PEER_LOST, reason)
        if self._state is not PeerState.REFUSED:
            self.say_bye()
            self._become(PeerState.IDLE)

    def say_bye(self) -> None:
        """Close the connection, if there is one."""
        if self._connection is not None:
            self._send(Bye("closing"))
            self._peers.reactor.detach(self._connection)
            self._connection = None

    # ---- connecting --------------------------------------------------------------------

    def _connect(self) -> None:
        self._become(PeerState.CONNECTING)
        peers = self._peers
        rank = peers.context.rank
        endpoint = self._owner.endpoints[rank]
        try:
            sock = start_connect(endpoint)
        except ClosedError as error:
            self._give_up(LoadFailure.PEER_LOST, str(error))
            return
        self._connection = Connection(
            sock,
            peers.secret,
            peers.decoder,
            is_client=True,
            peer=f"{self._owner.engine_id} at {endpoint.host}:{endpoint.port}",
        )
        peers.reactor.attach(self._connection, self._on_message, self._on_lost)
        self._send(
            Hello(
                engine_id=EngineId(peers.context.engine_id),
                incarnation=peers.context.incarnation,
                rank=rank,
                wants_engine_id=self._owner.engine_id,
                wants_incarnation=self._owner.incarnation,
                wants_rank=rank,
                layout_digest=peers.context.layout_digest,
                layout_fields=peers.context.layout_fields,
            )
        )

    def _on_message(self, message: ToClient) -> None:
        match message:
            case Welcome():
                if self._state is PeerState.CONNECTING:
                    self._wire(message)
            case Refuse():
                self._on_refused(message)
            case Confirm():
                self._on_confirm(message)
            case Bye():
                connection, self._connection = self._connection, None
                if connection is not None:
                    self._peers.reactor.detach(connection)
                    self._on_lost(ClosedError(f"{connection.peer} said bye: {message.reason}"))
            case _:
                assert_never(message)

    def _wire(self, welcome: Welcome) -> None:
        """Learn the peer's memory and post one small READ, so that no request pays for it."""
        local, block_bytes = self._peers.local, self._peers.context.layout.block_bytes
        if welcome.pool.stride_bytes != block_bytes:
            self._give_up(
                LoadFailure.INCOMPATIBLE,
                f"a block has {welcome.pool.stride_bytes} bytes at {self._owner.engine_id} and "
                f"{block_bytes} at {self._peers.context.engine_id}",
            )
            return
        agent = local.agent
        try:
            name = agent.add_peer(welcome.agent_metadata)
            self._remote = remote = _Remote(name, welcome.pool.num_units)
            remote.pool = agent.prepare_remote(name, welcome.pool)
            remote.scratch = agent.prepare_remote(name, welcome.scratch)
            units = np.arange(
                min(local.num_scratch_units, welcome.scratch.num_units), dtype=np.int32
            )
            self._become(PeerState.WIRING, keep_clock=True)
            self._warm_up_posted_s = self._now_s()
            transfer, state = agent.read(local.scratch, units, remote.scratch, units)
        except AgentError as error:
            self._give_up(LoadFailure.HANDSHAKE, str(error))
            return
        self._warm_up = transfer
        if state is TransferState.DONE:
            self._on_warm()

    def _on_warm(self) -> None:
        assert self._warm_up is not None
        self._peers.local.agent.release(self._warm_up)
        self._warm_up = None
        if self._state is not PeerState.WIRING:
            return
        self._back_off_s = 0.0
        self._become(PeerState.READY)
        self._send(Ready())
        self._send_heartbeats()
        releases, self._releases = self._releases, []
        for release in releases:
            self._send(release)
        self._plan_beat()
        log_event(
            _log,
            "kv peer ready",
            peer=self._owner.engine_id,
            incarnation=self._owner.incarnation,
            warm_up_ms=(self._now_s() - self._warm_up_posted_s) * 1e3,
        )

    def _on_refused(self, refuse: Refuse) -> None:
        match refuse.reason:
            case RefuseReason.STALE:
                reason = LoadFailure.LEASE_LOST
            case RefuseReason.INCOMPATIBLE:
                reason = LoadFailure.INCOMPATIBLE
            case _:
                assert_never(refuse.reason)
        self._refusal = (reason, refuse.detail)
        self.say_bye()
        self._watches.clear()
        self._releases.clear()
        self._plan_beat()
        self._become(PeerState.REFUSED)
        self._lose_all(reason, refuse.detail)

    def _on_lost(self, error: PeerError) -> None:
        """The connection is gone; one that served is tried again at once, others later."""
        self._connection = None
        if self._state is not PeerState.READY:
            is_unreachable = isinstance(error, UnreachableError)
            reason = LoadFailure.PEER_LOST if is_unreachable else LoadFailure.HANDSHAKE
            self._give_up(reason, str(error))
            return
        lived_s = self._now_s() - self._since_s
        log_event(_log, "kv peer lost", peer=self._owner.engine_id, after_s=lived_s, reason=error)
        if lived_s < _BACKOFF_MIN_S:
            self._back_off(LoadFailure.PEER_LOST, str(error))
        self._become(PeerState.DRAINING)
        for loading in list(self.loads.values()):
            if loading.state is not LoadState.WAITING:
                self._lose(loading, LoadFailure.PEER_LOST, str(error))

    def _give_up(self, reason: LoadFailure, detail: str) -> None:
        """This attempt to meet has failed: every load that waits for it has, too."""
        log_event(
            _log,
            "kv peer out of reach",
            level=logging.WARNING,
            peer=self._owner.engine_id,
            reason=detail,
        )
        self.say_bye()
        if self._warm_up is not None:
            # What is still in flight for it can only land in the scratch region.
            self._peers.local.agent.release(self._warm_up)
            self._warm_up = None
        self._back_off(reason, detail)
        self._releases.clear()
        self._become(PeerState.DRAINING)
        self._lose_all(reason, detail)

    def _back_off(self, reason: LoadFailure, detail: str) -> None:
        """Do not try again for a while; loads that come meanwhile fail for the same reason."""
        self._trouble = (reason, detail)
        self._back_off_s = min(_BACKOFF_MAX_S, max(_BACKOFF_MIN_S, 2 * self._back_off_s))
        self._not_before_s = self._now_s() + self._back_off_s

    def _forget_remote(self) -> None:
        """In the order NIXL needs: transfers (they are over), prepared regions, the agent.

        A step that is refused stops none after it: an agent that is not removed could never
        be met again.
        """
        remote, self._remote = self._remote, None
        if remote is None:
            return
        agent = self._peers.local.agent
        prepared = [p for p in (remote.pool, remote.scratch) if p is not None]
        for forget in (
            *(functools.partial(agent.unprepare, region) for region in prepared),
            functools.partial(agent.remove_peer, remote.name),
        ):
            try:
                forget()
            except AgentError as error:
                log_event(
                    _log,
                    "kv peer not forgotten",
                    level=logging.WARNING,
                    peer=self._owner.engine_id,
                    reason=error,
                )

    # ---- loading -----------------------------------------------------------------------

    def _plan(self, load: Load) -> _Loading:
        """Cut a load into chunks, in the order in which the most neighbours merge."""
        remote = np.asarray(load.remote_block_ids, dtype=np.int32)
        local = np.asarray(load.local_block_ids, dtype=np.int32)
        order = np.argsort(remote, kind="stable")
        remote, local = remote[order], local[order]
        block_bytes = self._peers.context.layout.block_bytes
        step = max(1, _CHUNK_BYTES // block_bytes)
        chunks = deque(
            (local[start : start + step], remote[start : start + step])
            for start in range(0, len(local), step)
        )
        return _Loading(
            load=load,
            requested_s=self._now_s(),
            chunks=chunks,
            num_bytes=len(local) * block_bytes,
            num_descriptors=sum(count_runs(*chunk) for chunk in chunks),
        )

    def _post(self) -> bool:
        """Post the next chunk of the first load that has one."""
        if not self.can_post:
            return False
        assert self._remote is not None
        assert self._remote.pool is not None
        loading = next(loading for loading in self.loads.values() if loading.chunks)
        last_block = max(loading.load.remote_block_ids)
        if last_block >= self._remote.num_blocks:
            self._lose(
                loading,
                LoadFailure.INCOMPATIBLE,
                f"the handoff names block {last_block}, {self._owner.engine_id} has "
                f"{self._remote.num_blocks}",
            )
            return True
        if loading.state is LoadState.WAITING:
            loading.state = LoadState.READING
            loading.first_post_s = self._now_s()
            self._send(Begin(loading.load.nonce, loading.load.load_id))
        local_units, remote_units = loading.chunks.popleft()
        local = self._peers.local
        try:
            transfer, state = local.agent.read(
                local.pool, local_units, self._remote.pool, remote_units
            )
        except AgentError as error:
            self._lose(loading, LoadFailure.PEER_LOST, str(error))
            return True
        if state is TransferState.DONE:
            local.agent.release(transfer)
            self._ask_if_all_here(loading)
        else:
            loading.transfers.append(transfer)
            if not loading.assisted:
                loading.assisted = True
                self._send(Assist(loading.load.load_id))
        return True

    def _poll(self) -> bool:
        """Look at everything in flight; return whether anything settled."""
        settled = False
        agent = self._peers.local.agent
        if self._warm_up is not None:
            try:
                if agent.poll(self._warm_up) is TransferState.DONE:
                    settled = True
                    self._on_warm()
            except AgentError as error:
                settled = True
                agent.release(self._warm_up)
                self._warm_up = None
                if self._state is PeerState.WIRING:
                    self._give_up(LoadFailure.HANDSHAKE, str(error))
        for loading in list(self.loads.values()):
            for transfer in list(loading.transfers):
                failure = None
                try:
                    if agent.poll(transfer) is TransferState.IN_PROGRESS:
                        continue
                except AgentError as error:
                    failure = str(error)
                settled = True
                agent.release(transfer)
                loading.transfers.remove(transfer)
                if loading.failure is not None:
                    if not loading.transfers:
                        self._report(loading)
                elif failure is not None:
                    self._lose(loading, LoadFailure.PEER_LOST, failure)
                else:
                    self._ask_if_all_here(loading)
        return settled

    def _ask_if_all_here(self, loading: _Loading) -> None:
        if not loading.chunks and not loading.transfers:
            loading.state = LoadState.ASKED
            self._send(Done(loading.load.nonce, loading.load.load_id))

    def _on_confirm(self, confirm: Confirm) -> None:
        loading = self.loads.get(confirm.read_id)
        if loading is None or loading.failure is not None or loading.state is not LoadState.ASKED:
            return
        if not confirm.valid:
            self._lose(
                loading,
                LoadFailure.LEASE_LOST,
                f"{self._owner.engine_id} says that the lease had ended",
            )
            return
        del self.loads[confirm.read_id]
        self._unwatch(loading.load.nonce)
        self._peers.report_received(
            Received(
                request_id=loading.load.request_id,
                num_bytes=loading.num_bytes,
                num_descriptors=loading.num_descriptors,
                wait_s=loading.first_post_s - loading.requested_s,
                transfer_s=self._now_s() - loading.first_post_s,
                load_id=loading.load.load_id,
            )
        )

    def _deadline_s(self, loading: _Loading) -> float:
        """When a load is given up; inf once it has failed."""
        if loading.failure is not None:
            return _NEVER
        config = self._transfer_config
        if loading.state is not LoadState.WAITING:
            return loading.first_post_s + config.transfer_timeout_s
        patience_s = config.handshake_timeout_s
        if self._state is PeerState.READY:
            patience_s += config.transfer_timeout_s  # it waits for other loads, not for the peer
        return loading.requested_s + patience_s

    def _time_out(self, loading: _Loading) -> None:
        is_met = self._state is PeerState.READY
        self._lose(
            loading,
            LoadFailure.TIMEOUT if is_met else LoadFailure.HANDSHAKE,
            f"{self._owner.engine_id} is {self._state.value}, the load {loading.state.value} "
            f"since {self._now_s() - loading.requested_s:.1f} s",
        )

    def _lose_all(self, reason: LoadFailure, detail: str) -> None:
        for loading in list(self.loads.values()):
            self._lose(loading, reason, detail)

    def _lose(self, loading: _Loading, reason: LoadFailure, detail: str) -> None:
        """End a load without KV: now, or once what is in flight for it has settled."""
        if loading.failure is not None:
            return
        loading.failure = (reason, detail)
        loading.chunks.clear()
        if loading.transfers:
            loading.quarantined_s = self._now_s()
        else:
            self._report(loading)

    def _report(self, loading: _Loading) -> None:
        assert loading.failure is not None
        reason, detail = loading.failure
        load = loading.load
        del self.loads[loading.load.load_id]
        self._unwatch(load.nonce)
        self._send_release(Release(load.nonce, loading.load.load_id))
        self._peers.report_failed(
            Failed(request_id=load.request_id, reason=reason, detail=detail, load_id=load.load_id)
        )

    # ---- small moves -------------------------------------------------------------------

    def _send(self, message: msgspec.Struct) -> None:
        if self._connection is not None:
            self._peers.reactor.send(self._connection, message)

    def _send_heartbeats(self) -> None:
        nonces = list(self._watches)
        for start in range(0, len(nonces), _NONCES_PER_HEARTBEAT):
            self._send(Heartbeat(nonces[start : start + _NONCES_PER_HEARTBEAT]))

    def _send_release(self, release: Release) -> None:
        """Now, or after a handshake that is under way; else the lease ends by itself."""
        if self._is_met:
            self._send(release)
        elif self._state is PeerState.CONNECTING or (
            self._state in (PeerState.IDLE, PeerState.DRAINING)
            and self._now_s() >= self._not_before_s
        ):
            self._releases.append(release)

    def _unwatch(self, nonce: str) -> None:
        if self._watches.pop(nonce, None) is not None and not self._watches:
            self._next_beat_s = _NEVER

    def _plan_beat(self) -> None:
        lease_s = min((watch.lease_s for watch in self._watches.values()), default=_NEVER)
        self._next_beat_s = self._now_s() + lease_s / HEARTBEATS_PER_LEASE

    def _become(self, state: PeerState, *, keep_clock: bool = False) -> None:
        self._state = state
        if not keep_clock:
            self._since_s = self._now_s()

    def _now_s(self) -> float:
        return self._peers.clock.monotonic_s()
