"""Simulates a deployment: engines in virtual time behind real routers.

The router of each proxy is real, with its policies and their inputs (backends, prefix index,
pending work, engines' reports of others' work), and so are each engine's scheduler, prefix cache
and KV events. A formula gives the time of a step and of a KV transfer; a hop and an event take
constant times. KV is pushed unless `kv_mode` says pull: chunks of a prompt are written while later
ones are computed, and only the last one's transfer is waited for. There is no HTTP, no text and no
model: a run of minutes takes seconds, and every run gives the same result.
"""

from __future__ import annotations

import heapq
import itertools
import random
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pdserve.config.http import ProxyConfig
from pdserve.kvcache.grains import GrainTracker
from pdserve.observe.clock import ManualClock
from pdserve.planner.engine import FleetEngine, FleetTime
from pdserve.planner.proxy import FleetFaults, VirtualProxy
from pdserve.planner.work import FleetCosts, FleetOutcome, output_token
from pdserve.proxy.brain.homes import SAMPLE_S
from pdserve.wire.events import HEARTBEAT_S

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.planner.work import FleetLayout, Work
    from pdserve.proxy.brain.index import Holder
    from pdserve.wire.events import KVEvent


@dataclass
class Fleet:
    """A deployment under one policy.

    Args:
        settings: Fields of `ProxyConfig` that name the policies.
        num_proxies: Proxies in front of the same engines; requests go to each in turn.
        report_s: Interval at which each proxy reads the engines' load; by default the longest one
            of real proxies.
    """

    layout: FleetLayout
    settings: dict[str, Any]
    costs: FleetCosts = field(default_factory=FleetCosts)
    faults: FleetFaults = field(default_factory=FleetFaults)
    num_proxies: int = 1
    report_s: float = HEARTBEAT_S

    def __post_init__(self) -> None:
        layout = self.layout
        self.clock = ManualClock(0.0)
        self._rng = random.Random(0)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._num_left = 0
        self._last_s = 0.0
        self._followers: dict[int, list[tuple[Work, FleetOutcome, int]]] = {}
        both = [f"http://b{i}" for i in range(layout.num_both)]
        prefill = [f"http://p{i}" for i in range(layout.num_prefill)] + both
        decode = [f"http://d{i}" for i in range(layout.num_decode)] + both
        config = ProxyConfig(prefill=tuple(prefill), decode=tuple(decode), **self.settings)
        time = FleetTime(self.clock, self.costs, self.after)
        self.engines: dict[str, FleetEngine] = {}
        self.proxies = [
            VirtualProxy(config, time, self.engines, self.faults, self._over)
            for _ in range(self.num_proxies)
        ]
        feeds = [proxy.feed for proxy in self.proxies if proxy.feed is not None]
        for url in dict.fromkeys((*prefill, *decode)):
            holders = [feed.holder(url) for feed in feeds]
            tell = partial(self._tell, holders, GrainTracker()) if holders else None
            self.engines[url] = FleetEngine(layout, time, tell)

    @property
    def first(self) -> VirtualProxy:
        """The first proxy, or the only one."""
        return self.proxies[0]

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        """Call `do` after some seconds of virtual time."""
        at_s = self.clock.monotonic_s() + seconds
        heapq.heappush(self._queue, (at_s, next(self._numbers), do))

    def teach(self, workload: Sequence[Work]) -> None:
        """Teach the proxies the engines' times, as if they had served such requests."""
        for proxy in self.proxies:
            proxy.teach(workload, self.layout)

    def run(self, workload: Sequence[Work], *, patience_s: float = 600.0) -> list[FleetOutcome]:
        """Serve a workload until all requests are over, or `patience_s` after the last arrival."""
        outcomes = []
        self._num_left = len(workload)
        for number, work in enumerate(workload):
            outcome = FleetOutcome(len(work.prompt), work.num_output, work.tenant)
            outcomes.append(outcome)
            if work.after is None:
                self.after(work.at_s, partial(self._arrive, work, outcome, number))
                self._last_s = max(self._last_s, work.at_s)
            else:
                self._followers.setdefault(work.after, []).append((work, outcome, number))
        for i, proxy in enumerate(self.proxies):
            if proxy.homes is not None:
                self._every(SAMPLE_S, proxy.homes.sample)
            hear = partial(self._every, self.report_s, proxy.hear)
            self.after(i * self.report_s / self.num_proxies, hear)
        while self._queue and self._queue[0][0] <= self._last_s + patience_s:
            at_s, _, do = heapq.heappop(self._queue)
            self.clock.now_s = max(self.clock.now_s, at_s)
            do()
        return outcomes

    def _every(self, seconds: float, do: Callable[[], None]) -> None:
        """Call `do` at this interval while requests are still to come or unfinished."""
        if self._num_left:
            do()
            self.after(seconds, lambda: self._every(seconds, do))

    def _tell(
        self, holders: Sequence[Holder], tracker: GrainTracker, events: list[KVEvent]
    ) -> None:
        """Apply a cache's events to the indexes after a delay."""
        for event in tracker.apply(events):
            for holder in holders:
                if self._rng.random() >= self.faults.lost_events:
                    self.after(self.faults.event_s, partial(holder.apply, event))

    def _arrive(self, work: Work, outcome: FleetOutcome, number: int) -> None:
        self._last_s = max(self._last_s, self.clock.monotonic_s())
        self.proxies[number % self.num_proxies].arrive(work, outcome, number)

    def _over(self, work: Work, number: int, is_answered: bool) -> None:
        """Schedule the requests that follow a finished one; without an answer they end, too."""
        self._num_left -= 1
        for follower, outcome, its_number in self._followers.pop(number, ()):
            if not is_answered:
                self._over(follower, its_number, is_answered=False)
                continue
            start = len(work.prompt)
            answer = [output_token(number, start + i) for i in range(work.num_output)]
            whole = replace(follower, prompt=[*work.prompt, *answer, *follower.prompt])
            wait_s = self.costs.hop + follower.delay_s
            self.after(wait_s, partial(self._arrive, whole, outcome, its_number))
