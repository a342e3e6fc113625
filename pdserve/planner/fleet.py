"""Simulates a deployment: engines in virtual time behind real routers.

Real are the router of each proxy, its policies and what they look at (backends, prefix index,
pending work, what engines say of others'), and of each engine the scheduler, the prefix cache and
the KV events. A step takes the time that a formula gives it, KV on its way to a decode engine the
time of its bytes; a hop and an event take a constant. There is no HTTP, no text and no model: a run
of minutes takes seconds, and the same again each time.
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
        num_proxies: Before the same engines; requests come to each in turn.
        report_s: How often each hears how much engines have to do; as often as the real one at
            least does, unless told otherwise.
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
        """The only proxy, where there is one."""
        return self.proxies[0]

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        """Do something later."""
        at_s = self.clock.monotonic_s() + seconds
        heapq.heappush(self._queue, (at_s, next(self._numbers), do))

    def teach(self, workload: Sequence[Work]) -> None:
        """Have the proxies know what engines take, as they do that have served such requests."""
        for proxy in self.proxies:
            proxy.teach(workload, self.layout.max_num_seqs)

    def run(self, workload: Sequence[Work], *, patience_s: float = 600.0) -> list[FleetOutcome]:
        """Serve a workload, until all is over or so long after its last arrival."""
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
        """Do something now and again, for as long as requests are to come or are not over."""
        if self._num_left:
            do()
            self.after(seconds, lambda: self._every(seconds, do))

    def _tell(
        self, holders: Sequence[Holder], tracker: GrainTracker, events: list[KVEvent]
    ) -> None:
        """Tell the indexes, a moment later, what a cache has gained and lost."""
        for event in tracker.apply(events):
            for holder in holders:
                if self._rng.random() >= self.faults.lost_events:
                    self.after(self.faults.event_s, partial(holder.apply, event))

    def _arrive(self, work: Work, outcome: FleetOutcome, number: int) -> None:
        self._last_s = max(self._last_s, self.clock.monotonic_s())
        self.proxies[number % self.num_proxies].arrive(work, outcome, number)

    def _over(self, work: Work, number: int, is_answered: bool) -> None:
        """Have the requests come that follow one which is over; if it has no answer, none do."""
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
