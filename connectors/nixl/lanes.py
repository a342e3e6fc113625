"""Threads that post transfers, so that no other thread waits inside NIXL.

A lane is one thread with one NIXL agent of its own, over the same KV memory as all others: it
posts READs (D pulls) and WRITEs (P pushes), polls them to their end, and calls what is to be
done with the bytes while they are in the cache (a digest). On one host a post is the copy
itself, so two lanes move more than one does. Lanes begin with the first peer that is met, and
sleep while there is nothing to do.

A posted transfer cannot be taken back: what NIXL releases goes on moving. So an abandoned job
is polled on; if it does not settle, its lane takes no other jobs, and once it is alone there
(or has lasted for too long) the lane's agent is destroyed and made again. That is the one
certain stop, and ends what else is in flight on that lane, too, as values.

A lane for which NIXL makes no agent is broken: it leaves the jobs to others, or fails them as
values if there is no other, and asks for an agent again when there is something to do.

Jobs are cut by their owner, to about `PIECE_BYTES`. This module knows no blocks, no leases and
no messages.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from typing import TYPE_CHECKING

from pdserve.connectors.nixl.lane import Lane, WarmUp
from pdserve.connectors.transfer.seams import Job, OneSided, Remote
from pdserve.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from pdserve.connectors.nixl.agent import NixlAgent
    from pdserve.connectors.transfer.protocol import Region
    from pdserve.connectors.transfer.seams import JobEnd
    from pdserve.observe.clock import Clock

# Of one peer on one lane: a transport that works in the background is kept busy, and a peer that
# hangs holds up nobody else.
_MAX_IN_FLIGHT = 2


class Lanes(OneSided):
    """Some threads that post; all methods belong to one other thread, the transfer thread.

    Args:
        make_agent: Called in a lane's thread with its number; the agent has registered `pool`
            and `scratch`, and its name was never used before.
        pool: This side's KV memory.
        scratch: Destination of warm-up reads, at least 4096 bytes.
        wake: Called from a lane when `deliver` has something to do.
        quarantine_s: How long an abandoned job may stay in flight beside others of its lane
            before the lane's agent is destroyed. One that is alone has half a second.
    """

    def __init__(
        self,
        *,
        num_lanes: int,
        make_agent: Callable[[int], NixlAgent],
        pool: Region,
        scratch: Region,
        wake: Callable[[], None],
        clock: Clock,
        quarantine_s: float,
    ) -> None:
        self._clock = clock
        self._wake = wake
        self._lock = threading.Lock()
        self._events: list[Callable[[], None]] = []
        self._queues: dict[Remote, deque[Job]] = {}  # the first is whose turn it is
        self._taken: set[Job] = set()
        self._warm_ups: set[WarmUp] = set()
        self._num_resets = 0
        self._death: BaseException | None = None
        self._lanes = [
            Lane(
                self,
                number,
                make_agent=functools.partial(make_agent, number),
                pool=pool,
                scratch=scratch,
                clock=clock,
                quarantine_s=quarantine_s,
            )
            for number in range(num_lanes)
        ]
        self._is_started = False

    # ---- what the transfer thread calls --------------------------------------------------

    @property
    def num_lanes(self) -> int:
        """Threads."""
        return len(self._lanes)

    def meet(self, metadata: bytes, pool: Region) -> Remote:
        """See `Mover`: lanes begin with the first peer."""
        if not self._is_started:
            self._is_started = True
            for lane in self._lanes:
                lane.thread.start()
        return Remote(metadata, pool)

    def forget(self, remote: Remote) -> None:
        """See `Mover`."""
        with self._lock:
            for lane in self._lanes:
                lane.to_forget.append(remote)
                lane.rouse()

    def warm_up(
        self,
        remote: Remote,
        source: Region,
        *,
        tag: Hashable,
        on_settled: Callable[[str | None], None],
    ) -> None:
        """See `Mover`: once that has ended on all lanes, with the first failure."""
        warm_up = WarmUp(tag, remote, source, on_settled, len(self._lanes))
        with self._lock:
            self._warm_ups.add(warm_up)
            for lane in self._lanes:
                lane.to_warm_up.append(warm_up)
                lane.rouse()

    def submit(self, job: Job) -> None:
        """See `Mover`: as soon as a lane is free; peers in turn."""
        with self._lock:
            self._queues.setdefault(job.remote, deque()).append(job)
            # A broken one may get an agent again, if no other has the time.
            idle = [lane for lane in self._lanes if lane.is_idle]
            if idle:
                min(idle, key=lambda lane: lane.is_broken).rouse()

    def abandon(self, tag: Hashable) -> int:
        """See `Mover`.

        What is still in flight of a warm-up that has ended can only land in the scratch memory.
        """
        now_s = self._clock.monotonic_s()
        with self._lock:
            for remote, queue in list(self._queues.items()):
                self._set_queue(remote, deque(job for job in queue if job.tag != tag))
            in_flight = [job for job in self._taken if job.tag == tag]
            for job in in_flight:
                job.abandoned_s = min(job.abandoned_s, now_s)
            for warm_up in self._warm_ups:
                warm_up.is_abandoned |= warm_up.tag == tag
            for lane in self._lanes:
                lane.rouse()
        return len(in_flight)

    def deliver(self) -> bool:
        """Call `on_settled` and `on_slow` of what happened; return whether anything did.

        Raises:
            InternalError: A lane has died.
        """
        if self._death is not None:
            raise InternalError(f"a KV transfer lane died: {self._death!r}") from self._death
        with self._lock:
            events, self._events = self._events, []
        for event in events:
            event()
        return bool(events)

    def tidy(self) -> None:
        """Have each lane's agent close the connections whose other sides have ended."""
        with self._lock:
            for lane in self._lanes:
                lane.is_to_tidy = True
                lane.rouse()

    def renew(self, reason: str) -> None:
        """Have each lane's agent made again, as soon as nothing is in flight there."""
        with self._lock:
            for lane in self._lanes:
                lane.why_renew = reason
                lane.rouse()

    def take_num_resets(self) -> int:
        """How often a lane's agent was destroyed to stop a transfer, since the last call."""
        with self._lock:
            number, self._num_resets = self._num_resets, 0
        return number

    def close(self, timeout_s: float) -> bool:
        """End the threads and destroy their agents; return whether that was done in time.

        A lane that is stuck inside NIXL is left behind.
        """
        if not self._is_started:
            return True
        with self._lock:
            for lane in self._lanes:
                lane.is_closing = True
                lane.rouse()
        ends_s = self._clock.monotonic_s() + timeout_s
        for lane in self._lanes:
            if lane.thread.ident is not None:  # the system refuses threads beyond its limit
                lane.thread.join(max(0.0, ends_s - self._clock.monotonic_s()))
        return not any(lane.thread.is_alive() for lane in self._lanes)

    # ---- what the lanes call -------------------------------------------------------------

    @property
    def lock(self) -> threading.Lock:
        """Guards everything that the transfer thread and the lanes share."""
        return self._lock

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
            with self._lock:
                self._taken.discard(job)  # until now `abandon` counts it
            job.on_settled(settled)

        self._say(tell)

    def say_warm(self, warm_up: WarmUp, failure: str | None) -> None:
        """Report that one lane has ended a warm-up."""
        with self._lock:
            warm_up.failure = warm_up.failure or failure
            warm_up.num_left -= 1
            is_last = not warm_up.num_left
            if is_last:
                self._warm_ups.discard(warm_up)
        if is_last:
            self._say(functools.partial(warm_up.on_settled, warm_up.failure))

    def say_reset(self) -> None:
        """Report that a lane has a new agent."""
        with self._lock:
            self._num_resets += 1

    def say_death(self, error: BaseException) -> None:
        """Report that a lane has died of a bug here."""
        self._death = error
        self._wake()

    def _say(self, event: Callable[[], None]) -> None:
        with self._lock:
            was_silent = not self._events
            self._events.append(event)
        if was_silent:
            self._wake()

    def _set_queue(self, remote: Remote, queue: deque[Job]) -> None:
        """Put it behind those of all other peers; an empty one is forgotten."""
        self._queues.pop(remote, None)
        if queue:
            self._queues[remote] = queue
