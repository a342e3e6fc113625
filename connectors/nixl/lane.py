"""One thread that posts transfers, with a NIXL agent of its own; see `lanes`.

It knows what it was told, its peers as NIXL knows them, and what it has in flight.
"""

from __future__ import annotations

import functools
import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.connectors.nixl.agent import AgentError
from pdserve.connectors.nixl.known_peers import REST_S, KnownPeers, in_units
from pdserve.connectors.pieces import count_runs
from pdserve.connectors.transfer.seams import Direction, Job, WarmUp
from pdserve.errors import InternalError
from pdserve.observe.log import log_event

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable

    from pdserve.connectors.nixl.agent import NixlAgent, Prepared, Transfer
    from pdserve.connectors.transfer.protocol import Region
    from pdserve.connectors.transfer.seams import JobEnd, Remote
    from pdserve.observe.clock import Clock

_log = logging.getLogger(__name__)

# Of one peer on one lane: a transport that works in the background is kept busy, and a peer that
# hangs holds up nobody else.
_MAX_IN_FLIGHT = 2
_POLL_S = 0.0003
_NEVER = float("inf")
# Abandoned transfers mostly end on their own, which is cheaper than a new agent.
_SETTLE_S = 0.5
_WARM_UP_BYTES = 4096


class Dispatcher:
    """Gives lanes their jobs and takes their results; what all lanes share.

    Args:
        wake: Called from a lane when there are results.

    Attributes:
        lock: Guards everything here, and the lanes' orders.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self.lock = threading.Lock()
        self._wake = wake
        self._lanes: list[Lane] = []
        self._events: list[Callable[[], None]] = []
        self._queues: dict[Remote, deque[Job]] = {}  # the first is whose turn it is
        self._taken: set[Job] = set()
        # How each ended on the lanes that have ended it.
        self._warm_ups: dict[WarmUp, list[str | None]] = {}
        self._num_resets = 0
        self._death: BaseException | None = None

    def take(self, num_in_flight: dict[Remote, int]) -> Job | None:
        """Under the lock: the next job for a lane that has so many of each peer in flight."""
        for remote, queue in self._queues.items():
            if num_in_flight.get(remote, 0) < _MAX_IN_FLIGHT:
                job = queue.popleft()
                self._set_queue(remote, queue)
                self._taken.add(job)
                return job
        return None

    def can_post(self) -> bool:
        """Under the lock: whether there is a lane that is not broken."""
        return not all(lane.is_broken for lane in self._lanes)

    def say_slow(self, job: Job) -> None:
        """Report that `job` was posted and is still running."""
        if job.on_slow is not None:
            self._say(job.on_slow)

    def say_settled(self, job: Job, settled: JobEnd) -> None:
        """Report that `job` is over."""

        def tell() -> None:
            with self.lock:
                self._taken.discard(job)  # until now `abandon` counts it
            job.on_settled(settled)

        self._say(tell)

    def say_warm(self, warm_up: WarmUp, failure: str | None) -> None:
        """Report that one lane has ended a warm-up."""
        with self.lock:
            failures = self._warm_ups[warm_up]
            failures.append(failure)
            is_last = len(failures) == len(self._lanes)
            if is_last:
                del self._warm_ups[warm_up]
        if is_last:
            first = next((each for each in failures if each is not None), None)
            self._say(functools.partial(warm_up.on_settled, first))

    def say_reset(self) -> None:
        """Report that a lane has a new agent."""
        with self.lock:
            self._num_resets += 1

    def say_death(self, error: BaseException) -> None:
        """Report that a lane has died of a bug here."""
        self._death = error
        self._wake()

    def _say(self, event: Callable[[], None]) -> None:
        with self.lock:
            was_silent = not self._events
            self._events.append(event)
        if was_silent:
            self._wake()

    def _set_queue(self, remote: Remote, queue: deque[Job]) -> None:
        """Put it behind those of all other peers; an empty one is forgotten."""
        self._queues.pop(remote, None)
        if queue:
            self._queues[remote] = queue


@dataclass(slots=True, eq=False)
class _Posted:
    transfer: Transfer
    what: Job | WarmUp
    num_descriptors: int = 0


class Lane:
    """One thread and its agent.

    Attributes:
        is_idle: Whether it sleeps until it is roused.
        is_broken: Whether NIXL failed to make its agent at the last attempt.
        to_forget, to_warm_up, is_to_tidy, is_closing: Its pending orders.
        why_renew: Why its agent is to be made again as soon as nothing is in flight; empty where
            it is not. All of these are under the lock.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        number: int,
        *,
        make_agent: Callable[[], NixlAgent],
        pool: Region,
        scratch: Region,
        clock: Clock,
        quarantine_s: float,
    ) -> None:
        self.thread = threading.Thread(target=self._main, name=f"kv-lane-{number}", daemon=True)
        self.is_idle = False
        self.is_broken = False
        self.is_closing = False
        self.to_forget: list[Remote] = []
        self.to_warm_up: list[WarmUp] = []
        self.is_to_tidy = False
        self.why_renew = ""
        self._dispatcher = dispatcher
        self._number = number
        self._make_agent = make_agent
        self._pool = pool
        self._scratch = scratch
        self._clock = clock
        self._quarantine_s = quarantine_s
        self._roused = threading.Condition(dispatcher.lock)
        self._agent: NixlAgent | None = None
        self._peers: KnownPeers
        self._why_broken: AgentError | None = None
        self._rests_until_s = 0.0
        self._posted: list[_Posted] = []
        self._local: dict[int, Prepared] = {}

    def rouse(self) -> None:
        """Under the lock: have it look at what there is to do."""
        self.is_idle = False
        self._roused.notify()

    # ---- the thread ------------------------------------------------------------------------

    def _main(self) -> None:
        """Run; if the lane dies, release everyone who waits for it."""
        try:
            try:
                while self._turn():
                    pass
            finally:
                if self._agent is not None:
                    self._agent.close()
        except Exception as error:  # noqa: BLE001 - told to the engine by `Lanes.deliver`
            _log.exception("kv transfer lane died")
            self._dispatcher.say_death(error)

    def _turn(self) -> bool:
        """Take what there is to do, or wait for it; then do it. Returns whether to go on."""
        self._make_agent_if_due()
        with self._dispatcher.lock:
            job = self._take()
            if job is None and not self._has_orders():
                self.is_idle = not self._posted
                self._roused.wait(None if self.is_idle else _POLL_S)
                self.is_idle = False
                job = self._take()
            to_forget, self.to_forget = self.to_forget, []
            to_warm_up, self.to_warm_up = self.to_warm_up, []
            is_to_tidy, self.is_to_tidy = self.is_to_tidy, False
            why_renew = ""
            if not self._posted:
                why_renew, self.why_renew = self.why_renew, ""
        if self.is_closing:
            return False
        if is_to_tidy:
            self._tidy()
        if why_renew and self._agent is not None:
            self._reset(why_renew)
        for remote in to_forget:
            if self._agent is not None:
                self._peers.forget(remote)
        for warm_up in to_warm_up:
            self._warm_up(warm_up)
        if job is not None:
            self._post(job)
        for posted in list(self._posted):
            self._poll(posted)
        self._fence_if_stuck()
        return True

    def _has_orders(self) -> bool:
        return bool(
            self.is_closing
            or self.to_forget
            or self.to_warm_up
            or self.is_to_tidy
            or (self.why_renew and not self._posted)
        )

    def _take(self) -> Job | None:
        if self.why_renew or (self.is_broken and self._dispatcher.can_post()):
            return None
        now_s = self._clock.monotonic_s()
        num_in_flight: dict[Remote, int] = {}
        for posted in self._posted:
            if isinstance(posted.what, Job):
                if now_s - posted.what.abandoned_s > _SETTLE_S:
                    return None  # a new agent is due; what is posted now would end with this one
                remote = posted.what.remote
                num_in_flight[remote] = num_in_flight.get(remote, 0) + 1
        return self._dispatcher.take(num_in_flight)

    # ---- its agent -------------------------------------------------------------------------

    def _make_agent_if_due(self) -> None:
        """Make an agent if there is none, unless that has failed a moment ago."""
        if self._agent is not None or self._clock.monotonic_s() < self._rests_until_s:
            return
        try:
            self._agent = agent = self._make_agent()
            self._peers = KnownPeers(agent, self._has_posted, self._clock)
        except AgentError as error:
            self._why_broken = error
            self._rests_until_s = self._clock.monotonic_s() + REST_S
            log_event(
                _log,
                "kv lane without an agent",
                level=logging.ERROR,
                lane=self._number,
                reason=error,
            )
        with self._dispatcher.lock:
            self.is_broken = self._agent is None

    def _tidy(self) -> None:
        if self._agent is None:
            return
        try:
            self._agent.progress()
        except AgentError as error:
            log_event(_log, "kv lane's peer failed", level=logging.WARNING, reason=error)

    @property
    def _live_agent(self) -> NixlAgent:
        """This lane's agent: there is one while anything is posted."""
        assert self._agent is not None
        return self._agent

    # ---- transfers -------------------------------------------------------------------------

    def _post(self, job: Job) -> None:
        job.posted_s = self._clock.monotonic_s()
        self._make_agent_if_due()  # it may have slept for long
        if self._agent is None:  # nothing is wrong with the peer
            self._settle(job, str(self._why_broken))
            return
        agent = self._agent
        num_descriptors = count_runs(job.remote_units, job.local_units)
        try:
            self._check_bounds(job)
            local = self._prepare_local(job.unit_bytes)
            remote = self._peers.prepared(job.remote, job.unit_bytes)
            transfer, is_done = agent.post(
                job.direction, local, job.local_units, remote, job.remote_units
            )
        except AgentError as error:
            self._peers.note_trouble(job.remote, error)
            self._settle(job, str(error))
            return
        if is_done:
            agent.release(transfer)
            self._settle(job, None, num_descriptors)
        else:
            self._posted.append(_Posted(transfer, job, num_descriptors))
            self._dispatcher.say_slow(job)

    def _warm_up(self, warm_up: WarmUp) -> None:
        self._make_agent_if_due()
        if self._agent is None:
            self._dispatcher.say_warm(warm_up, str(self._why_broken))
            return
        num_bytes = min(_WARM_UP_BYTES, warm_up.source.num_bytes, self._scratch.num_bytes)
        try:
            known = self._peers.learn(warm_up.remote)
            transfer, is_done = self._agent.read_once(
                self._scratch, known.name, warm_up.source, num_bytes
            )
        except AgentError as error:
            self._peers.note_trouble(warm_up.remote, error)
            self._dispatcher.say_warm(warm_up, str(error))
            return
        self._posted.append(_Posted(transfer, warm_up))
        if is_done:
            self._end(self._posted[-1], None)

    def _poll(self, posted: _Posted) -> None:
        if isinstance(posted.what, WarmUp) and posted.what.is_abandoned:
            self._end(posted, "it was given up")
            return
        try:
            if not self._live_agent.poll(posted.transfer):
                return
        except AgentError as error:
            self._peers.note_trouble(posted.what.remote, error)
            self._end(posted, str(error))
        else:
            self._end(posted, None)

    def _end(self, posted: _Posted, failure: str | None) -> None:
        """Handle the end of a transfer that was in flight."""
        self._posted.remove(posted)
        self._live_agent.release(posted.transfer)
        self._tell(posted, failure)

    def _tell(self, posted: _Posted, failure: str | None) -> None:
        if isinstance(posted.what, WarmUp):
            self._dispatcher.say_warm(posted.what, failure)
        else:
            self._settle(posted.what, failure, posted.num_descriptors)

    def _settle(self, job: Job, failure: str | None, num_descriptors: int = 0) -> None:
        now_s = self._clock.monotonic_s
        self._dispatcher.say_settled(job, job.ended(failure, now_s, num_descriptors))

    def _check_bounds(self, job: Job) -> None:
        """Refuse units outside a pool, before NIXL sees them.

        Raises:
            AgentError: The peer's pool does not have the unit.
            InternalError: This side's pool does not have it.
        """
        why = self._pool.why_outside(job.local_units, job.unit_bytes)
        if why is not None:
            raise InternalError(why)
        why = job.remote.pool.why_outside(job.remote_units, job.unit_bytes)
        if why is not None:
            raise AgentError(why)

    def _prepare_local(self, unit_bytes: int) -> Prepared:
        prepared = self._local.get(unit_bytes)
        if prepared is None:
            prepared = self._live_agent.prepare(in_units(self._pool, unit_bytes))
            self._local[unit_bytes] = prepared
        return prepared

    def _has_posted(self, remote: Remote) -> bool:
        return any(posted.what.remote.metadata == remote.metadata for posted in self._posted)

    # ---- the fence -------------------------------------------------------------------------

    def _fence_if_stuck(self) -> None:
        jobs = [posted.what for posted in self._posted if isinstance(posted.what, Job)]
        abandoned_s = min((job.abandoned_s for job in jobs), default=_NEVER)
        if abandoned_s == _NEVER:
            return
        is_alone = all(job.abandoned_s < _NEVER for job in jobs)
        patience_s = min(_SETTLE_S, self._quarantine_s) if is_alone else self._quarantine_s
        if self._clock.monotonic_s() - abandoned_s > patience_s:
            self._reset(f"a transfer was stuck for {patience_s} s: its NIXL agent was destroyed")

    def _reset(self, reason: str) -> None:
        """Destroy the agent, so that nothing it posted is in flight, and make another."""
        log_event(
            _log,
            "kv lane's agent reset",
            level=logging.ERROR,
            lane=self._number,
            num_in_flight=len(self._posted),
            reason=reason,
        )
        # What is no job is a warm-up, and so a READ.
        is_reading = any(
            not isinstance(posted.what, Job) or posted.what.direction is Direction.READ
            for posted in self._posted
        )
        self._live_agent.close(is_reading=is_reading)
        self._agent = None
        posted, self._posted = self._posted, []
        self._local.clear()
        self._dispatcher.say_reset()
        for each in posted:
            self._tell(each, reason)
