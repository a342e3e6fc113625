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
from collections import deque
from typing import TYPE_CHECKING

from pdserve.connectors.nixl.lane import Dispatcher, Lane
from pdserve.connectors.transfer.seams import OneSided, Remote
from pdserve.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from pdserve.connectors.nixl.agent import NixlAgent
    from pdserve.connectors.transfer.protocol import Region
    from pdserve.connectors.transfer.seams import Job, WarmUp
    from pdserve.observe.clock import Clock


class Lanes(Dispatcher, OneSided):
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
        super().__init__(wake)
        self._clock = clock
        self._lanes += [
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
        with self.lock:
            for lane in self._lanes:
                lane.to_forget.append(remote)
                lane.rouse()

    def warm_up(self, warm_up: WarmUp) -> None:
        """See `Mover`: on each lane; it is over once all have ended it, with the first failure."""
        with self.lock:
            self._warm_ups[warm_up] = []
            for lane in self._lanes:
                lane.to_warm_up.append(warm_up)
                lane.rouse()

    def submit(self, job: Job) -> None:
        """See `Mover`: as soon as a lane is free; peers in turn."""
        with self.lock:
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
        with self.lock:
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
        with self.lock:
            events, self._events = self._events, []
        for event in events:
            event()
        return bool(events)

    def tidy(self) -> None:
        """Have each lane's agent close the connections whose other sides have ended."""
        with self.lock:
            for lane in self._lanes:
                lane.is_to_tidy = True
                lane.rouse()

    def renew(self, reason: str) -> None:
        """Have each lane's agent made again, as soon as nothing is in flight there."""
        with self.lock:
            for lane in self._lanes:
                lane.why_renew = reason
                lane.rouse()

    def take_num_resets(self) -> int:
        """How often a lane's agent was destroyed to stop a transfer, since the last call."""
        with self.lock:
            number, self._num_resets = self._num_resets, 0
        return number

    def close(self, timeout_s: float) -> bool:
        """End the threads and destroy their agents; return whether that was done in time.

        A lane that is stuck inside NIXL is left behind.
        """
        if not self._is_started:
            return True
        with self.lock:
            for lane in self._lanes:
                lane.is_closing = True
                lane.rouse()
        ends_s = self._clock.monotonic_s() + timeout_s
        for lane in self._lanes:
            if lane.thread.ident is not None:  # the system refuses threads beyond its limit
                lane.thread.join(max(0.0, ends_s - self._clock.monotonic_s()))
        return not any(lane.thread.is_alive() for lane in self._lanes)
