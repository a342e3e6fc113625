"""A peer of a D rank: one rank of one incarnation of P.

It connects when a request of that engine is queued, warms up the transport, keeps leases
alive, and tells the users of this rank (`PeerUser`, `PushReceiver`) when it becomes reachable
and when it no longer is.

    IDLE -> CONNECTING -> WIRING -> READY -> DRAINING -> IDLE
                  `-----------`---- refused --> REFUSED (for ever)
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, assert_never

from pdserve.connectors.transfer.greeting import hello_to, why_incompatible
from pdserve.connectors.transfer.peering import (
    MAX_REST_S,
    MIN_REST_S,
    BackOff,
    Heartbeats,
    PeerState,
)
from pdserve.connectors.transfer.protocol import (
    Accept,
    Bye,
    Confirm,
    Fail,
    Heartbeat,
    LeaseRelease,
    MoverFrame,
    Progress,
    Pushed,
    Ready,
    Refuse,
    RefuseReason,
    Welcome,
)
from pdserve.connectors.transfer.seams import ClosedError, MoverLink, UnreachableError, WarmUp
from pdserve.observe.log import log_event
from pdserve.wire.transfer import LeaseEnd, LoadFailure

if TYPE_CHECKING:
    import msgspec

    from pdserve.connectors.handover.instructions import Watch
    from pdserve.connectors.transfer.peering import PeerId, PeerUser, PushReceiver
    from pdserve.connectors.transfer.protocol import Process, ToClient
    from pdserve.connectors.transfer.seams import PeerLink, Remote, Seams
    from pdserve.errors import PeerError

_log = logging.getLogger(__name__)

_NEVER = float("inf")


class Peer:
    """The link to one rank of P, and the leases kept alive there.

    Attributes:
        state: See the module.
        users: The users, by the read id under which the peer knows them.
        process: The peer's process on its host; None before the first handshake.
    """

    def __init__(self, peer_id: PeerId, seams: Seams, receiver: PushReceiver) -> None:
        self.id = peer_id
        self.users: dict[int, PeerUser] = {}
        self._seams = seams
        self._mover = seams.mover
        self._receiver = receiver
        self._owner = peer_id.owner
        self.state = PeerState.IDLE
        self._since_s = seams.clock.monotonic_s()
        self._link: PeerLink | None = None
        self._remote: Remote | None = None
        self._mover_link: MoverLink | None = None
        self._is_remote_kept = False
        self._is_warming_up = False
        self._warm_up_began_s = 0.0
        self._is_called = False
        self.process: Process | None = None
        self._rest = BackOff()
        self._refusal: tuple[LoadFailure, str] | None = None
        self._heartbeats = Heartbeats()
        self._releases: list[LeaseRelease] = []

    # ---- questions -------------------------------------------------------------------

    @property
    def remote(self) -> Remote:
        """The peer's memory, while it is WIRING or READY."""
        assert self._remote is not None
        return self._remote

    @property
    def trouble(self) -> tuple[LoadFailure, str] | None:
        """Why no connection is even tried now; None = it is connected, or may be soon."""
        if self._refusal is not None:
            return self._refusal
        is_away = self.state in (PeerState.IDLE, PeerState.DRAINING)
        return self._rest.why(self._now_s()) if is_away else None

    @property
    def is_forgettable(self) -> bool:
        """Whether this object can be dropped without losing anything."""
        return (
            self.state in (PeerState.IDLE, PeerState.REFUSED)
            and not self._is_wanted
            and self._now_s() >= self._rest.until_s + MAX_REST_S
        )

    @property
    def _is_wanted(self) -> bool:
        return bool(self._is_called or self._heartbeats or self._releases or self.users)

    @property
    def _is_met(self) -> bool:
        return self.state in (PeerState.WIRING, PeerState.READY)

    @property
    def _has_unsettled(self) -> bool:
        return self._is_warming_up or any(user.num_unsettled for user in self.users.values())

    def due_s(self) -> float:
        """When `tick` has to be called next."""
        match self.state:
            case PeerState.IDLE:
                if self.users:
                    return -_NEVER  # users are carried on or turned away at once
                return self._rest.until_s if self._is_wanted else _NEVER
            case PeerState.CONNECTING | PeerState.WIRING:
                return min(self._handshake_ends_s, self._heartbeats.due_s)
            case PeerState.READY:
                return self._heartbeats.due_s
            case PeerState.DRAINING:
                return _NEVER if self._has_unsettled else -_NEVER
            case PeerState.REFUSED:
                return -_NEVER if self._is_wanted else _NEVER
            case _:
                assert_never(self.state)

    @property
    def _handshake_ends_s(self) -> float:
        return self._since_s + self._seams.transfer.handshake_timeout_s

    # ---- what others want ----------------------------------------------------------------

    def call(self) -> None:
        """Connect to the peer once, although it has no users yet."""
        self._is_called = self.state in (PeerState.IDLE, PeerState.DRAINING)

    def watch(self, watch: Watch) -> None:
        """Keep a lease alive."""
        if self.state is PeerState.REFUSED:
            return
        self._heartbeats.add(watch, self._now_s())
        if self._is_met:
            self.send(Heartbeat([watch.nonce]))

    def unwatch(self, nonce: str) -> None:
        """Stop sending heartbeats for a lease; unknown nonces are ignored."""
        self._heartbeats.remove(nonce)

    def release(self, nonce: str, end: LeaseEnd) -> None:
        """Give a lease back: now, or after a handshake; failing that, the lease expires."""
        self.unwatch(nonce)
        release = LeaseRelease(nonce, end)
        if self._is_met:
            self.send(release)
        elif self.state is PeerState.CONNECTING or (
            self.state in (PeerState.IDLE, PeerState.DRAINING)
            and self._now_s() >= self._rest.until_s
        ):
            self._releases.append(release)

    def enter(self, read_id: int, user: PeerUser) -> None:
        """Add a user; `on_ready` is called at once if the peer is READY."""
        self.users[read_id] = user
        if self.state is PeerState.READY:
            user.on_ready()

    def leave(self, read_id: int) -> None:
        """Remove a user; may be repeated."""
        self.users.pop(read_id, None)

    def send(self, message: msgspec.Struct) -> bool:
        """Send a message if there is a connection; return whether there is."""
        if self._link is None:
            return False
        self._link.send(message)
        return True

    def drop(self, reason: str) -> None:
        """Close the connection on purpose; it is made again if it is needed.

        A READY peer is met again at once, and its agent, which is in order, stays known: UCX keeps
        its connection to a forgotten agent until a process ends.
        """
        if self.state in (PeerState.CONNECTING, PeerState.WIRING, PeerState.READY):
            self._is_called = self._is_remote_kept = self.state is PeerState.READY
            self.say_bye(reason)
            self._end_connection(reason)

    def say_bye(self, reason: str) -> None:
        """Close the connection, if there is one."""
        if self._link is not None:
            self.send(Bye(reason))
            self._link.close()
            self._hang_up()

    # ---- the loop ----------------------------------------------------------------------

    def tick(self) -> bool:
        """Do what is due; return whether anything moved."""
        now_s = self._now_s()
        moved = False
        match self.state:
            case PeerState.IDLE:
                trouble = self.trouble
                if trouble is not None:
                    self._turn_away(*trouble)
                elif self._is_wanted:
                    self._connect()
                    moved = True
            case PeerState.CONNECTING | PeerState.WIRING:
                if now_s >= self._handshake_ends_s:
                    self._give_up(
                        LoadFailure.HANDSHAKE,
                        f"no complete handshake with {self.id} in "
                        f"{self._seams.transfer.handshake_timeout_s} s ({self.state.value})",
                    )
                    moved = True
            case PeerState.READY:
                pass
            case PeerState.DRAINING:
                if not self._has_unsettled:
                    if not self._is_remote_kept:
                        self._forget_remote()
                    self._become(PeerState.IDLE)
                    moved = True
            case PeerState.REFUSED:
                assert self._refusal is not None
                self._is_called = False
                self._turn_away(*self._refusal)
            case _:
                assert_never(self.state)
        if now_s >= self._heartbeats.due_s:
            if self._is_met:
                self._send_heartbeats()
            self._heartbeats.plan(now_s)
        return moved

    # ---- connecting --------------------------------------------------------------------

    def _connect(self) -> None:
        self._become(PeerState.CONNECTING)
        self._is_called = False
        context, target = self._seams.context, self._mover.target
        if target is None:
            self._give_up(LoadFailure.HANDSHAKE, "this engine has no NIXL agent now")
            return
        endpoint = self._owner.endpoints[self.id.rank]
        name = f"{self._owner.engine_id} at {endpoint.host}:{endpoint.port}"
        try:
            self._link = self._seams.connect(endpoint, name)
        except UnreachableError as error:
            self._give_up(LoadFailure.PEER_LOST, str(error))
            return
        self._link.attach(self._on_message, self._on_lost)
        self.send(hello_to(self._owner, self.id.rank, context, target))

    def _on_message(self, message: ToClient) -> None:
        match message:
            case Welcome():
                if self.state is PeerState.CONNECTING:
                    self._wire(message)
            case Refuse():
                if self.state is PeerState.CONNECTING:
                    self._on_refused(message)
            case Confirm():
                user = self.users.get(message.read_id)
                if user is not None:
                    user.on_confirm(message)
            case Accept():
                self._receiver.on_accept(self.id, message)
            case Progress():
                self._receiver.on_progress(self.id, message)
            case Pushed():
                self._receiver.on_pushed(self.id, message)
            case Fail():
                self._receiver.on_fail(self.id, message)
            case MoverFrame():
                if self._mover_link is not None:
                    self._mover.hear(self._mover_link, message.body)
            case Bye():
                link, self._link = self._link, None
                if link is not None:
                    link.close()
                    self._on_lost(
                        ClosedError(f"{link.peer} ended the connection: {message.reason}")
                    )
            case _:
                assert_never(message)

    def _wire(self, welcome: Welcome) -> None:
        """Learn the peer's memory and warm up with a small read, so that no request has to."""
        why = why_incompatible(welcome, self.id)
        if why is not None:
            self._give_up(LoadFailure.INCOMPATIBLE, why)
            return
        self.process = welcome.process
        kept = self._remote
        if kept is None or (kept.metadata, kept.pool) != (welcome.agent_metadata, welcome.pool):
            self._forget_remote()
            self._remote = self._mover.meet(welcome.agent_metadata, welcome.pool)
        self._mover_link = self.remote.link = MoverLink(
            welcome.agent_metadata,
            say=lambda body: self.send(MoverFrame(body)),
            exposed=lambda: self._receiver.exposed_to(self.id),
        )
        self._become(PeerState.WIRING, keep_clock=True)
        self._is_warming_up = True
        self._warm_up_began_s = self._now_s()
        self._mover.warm_up(WarmUp(self, self.remote, welcome.scratch, self._on_warm))

    def _on_warm(self, failure: str | None) -> None:
        """Handle the end of the warm-up."""
        self._is_warming_up = False
        if self.state is not PeerState.WIRING:
            return
        if failure is not None:
            self._give_up(LoadFailure.HANDSHAKE, failure)
            return
        self._rest.reset()
        self._become(PeerState.READY)
        self.send(Ready())
        self._send_heartbeats()
        releases, self._releases = self._releases, []
        for release in releases:
            self.send(release)
        self._heartbeats.plan(self._now_s())
        log_event(
            _log,
            "kv peer ready",
            peer=self._owner.engine_id,
            rank=self.id.rank,
            incarnation=self._owner.incarnation,
            warm_up_ms=(self._now_s() - self._warm_up_began_s) * 1e3,
        )
        for user in list(self.users.values()):
            user.on_ready()
        self._receiver.on_ready(self.id)

    def _on_refused(self, refuse: Refuse) -> None:
        is_stale = refuse.reason is RefuseReason.STALE
        reason = LoadFailure.LEASE_LOST if is_stale else LoadFailure.INCOMPATIBLE
        self._refusal = (reason, refuse.detail)
        self.say_bye("refused")
        self._forget_remote()
        self._heartbeats.clear()
        self._releases.clear()
        self._become(PeerState.REFUSED)
        self._turn_away(reason, refuse.detail)
        self._receiver.on_lost(self.id, reason, refuse.detail)

    def _on_lost(self, error: PeerError) -> None:
        """Handle a lost connection: retry at once if it was in service, otherwise later."""
        self._hang_up()
        self._is_remote_kept = False
        if self.state is not PeerState.READY:
            is_unreachable = isinstance(error, UnreachableError)
            reason = LoadFailure.PEER_LOST if is_unreachable else LoadFailure.HANDSHAKE
            self._give_up(reason, str(error))
            return
        lived_s = self._now_s() - self._since_s
        log_event(
            _log,
            "kv peer lost",
            peer=self._owner.engine_id,
            rank=self.id.rank,
            after_s=lived_s,
            reason=error,
        )
        if lived_s < MIN_REST_S:
            self._rest.begin(LoadFailure.PEER_LOST, str(error), self._now_s())
        self._end_connection(str(error))

    def _end_connection(self, detail: str) -> None:
        self._stop_warming_up()
        self._become(PeerState.DRAINING)
        for user in list(self.users.values()):
            user.on_lost(LoadFailure.PEER_LOST, detail)
        self._receiver.on_lost(self.id, LoadFailure.PEER_LOST, detail)

    def _give_up(self, reason: LoadFailure, detail: str) -> None:
        """Give up this attempt to connect and turn away every user that waits for it."""
        log_event(
            _log,
            "kv peer out of reach",
            level=logging.WARNING,
            peer=self._owner.engine_id,
            rank=self.id.rank,
            reason=detail,
        )
        self.say_bye("no handshake")
        self._stop_warming_up()
        self._is_remote_kept = False
        self._rest.begin(reason, detail, self._now_s())
        self._releases.clear()
        self._become(PeerState.DRAINING)
        self._turn_away(reason, detail)
        self._receiver.on_lost(self.id, reason, detail)

    def _turn_away(self, reason: LoadFailure, detail: str) -> None:
        for user in list(self.users.values()):
            user.on_hopeless(reason, detail)

    def _stop_warming_up(self) -> None:
        if self._is_warming_up:
            self._mover.abandon(self)

    def _forget_remote(self) -> None:
        if self._remote is not None:
            self._mover.forget(self._remote)
            self._remote = None

    def _hang_up(self) -> None:
        self._link = None
        link, self._mover_link = self._mover_link, None
        if link is not None:
            self._mover.hang_up(link)

    # ---- small moves -------------------------------------------------------------------

    def _send_heartbeats(self) -> None:
        for message in self._heartbeats.messages():
            self.send(message)

    def _become(self, state: PeerState, *, keep_clock: bool = False) -> None:
        self.state = state
        if not keep_clock:
            self._since_s = self._now_s()

    def _now_s(self) -> float:
        return self._seams.clock.monotonic_s()
