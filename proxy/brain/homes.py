"""Assigns home roles to one proxy's engines, from the load it measures.

Of the engines that do both, the first ones by URL prefer prompts: proxies that find the same share
choose the same engines without communicating.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, Final

from pdserve.config.schema import Role
from pdserve.observe.log import log_event
from pdserve.proxy.backend import Health
from pdserve.proxy.brain.roles import (
    INTERVAL_S,
    Demand,
    HomeBounds,
    HomeControl,
    HomesShown,
)

if TYPE_CHECKING:
    from pdserve.config.http import ProxyConfig
    from pdserve.observe.clock import Clock
    from pdserve.proxy.backend import Backend
    from pdserve.proxy.backends import Backends
    from pdserve.proxy.brain.metrics import RouteMetrics
    from pdserve.proxy.brain.pairing import Pairing
    from pdserve.proxy.brain.roles import HomeLook

log = logging.getLogger(__name__)

SAMPLE_S: Final = 1.0
"""Between two looks at what engines do."""
_NUM_KEPT: Final = 60


class HomeRoles:
    """See the module.

    Attributes:
        looks: Findings on the demand of the last intervals, the newest last.
    """

    def __init__(
        self,
        config: ProxyConfig,
        backends: Backends,
        pairing: Pairing,
        clock: Clock,
        metrics: RouteMetrics,
    ) -> None:
        self._backends = backends
        self._pairing = pairing
        self._clock = clock
        self._metrics = metrics
        self._control = HomeControl(config.itl_slo_s)
        self.looks: deque[HomeLook] = deque(maxlen=_NUM_KEPT)
        self._begin()

    async def run(self) -> None:
        """Sample for ever."""
        while True:
            await asyncio.sleep(SAMPLE_S)
            self.sample()

    def sample(self) -> None:
        """Sample the engines' load; at an interval's end, decide whether one changes its home.

        Called each `SAMPLE_S`. Homes are reassigned at once when an engine comes or goes.
        """
        pairing, bounds = self._pairing, self._bounds()
        times = pairing.model.times()
        for each in self._backends:
            work = pairing.ledger.at(each.url)
            self._num_own += pairing.ledger.of(each.url).num_streams
            if work.num_streams:
                step_s = max(1e-6, times.step_s(work.num_streams, work.kv_tokens))
                self._tokens_per_s += work.num_streams / step_s
                self._num_streams += work.num_streams
                self._kv_tokens += work.kv_tokens
        self._num_samples += 1
        seconds = self._clock.monotonic_s() - self._begun_s
        if seconds >= INTERVAL_S - SAMPLE_S / 2:
            self._end(bounds, seconds)
            self._begin()
        self._give(bounds)

    def shown(self) -> HomesShown:
        """Return their part of `/debug/decisions`."""
        homes = {each.url: each.home.value for each in self._backends}
        return HomesShown(engines=homes, looks=list(reversed(self.looks)))

    def _begin(self) -> None:
        self._begun_s = self._clock.monotonic_s()
        self._asked = self._pairing.ledger.asked
        self._num_samples = self._num_streams = self._num_own = self._kv_tokens = 0
        self._tokens_per_s = 0.0

    def _end(self, bounds: HomeBounds, seconds: float) -> None:
        """Judge an interval; one without requests, or with an engine draining, is ignored."""
        pairing = self._pairing
        asked = pairing.ledger.asked.minus(self._asked)
        is_leaving = any(each.is_draining for each in self._backends)
        has_work = asked.num or self._num_streams
        if is_leaving or not (has_work and bounds.has_choice and pairing.model.is_known):
            self._control.interrupt()
            return
        times, clock = pairing.model.times(), self._clock
        # Of others' prompts nothing is said that adds up: there are as many for each stream.
        share = self._num_own / self._num_streams if self._num_own else 1.0
        demand = Demand(
            prompt_engines=times.computing_s(asked) / share / seconds,
            tokens_per_s=self._tokens_per_s / self._num_samples,
            kv_tokens=self._kv_tokens / max(1, self._num_streams),
        )
        look = self._control.look(
            demand, times, bounds, now_s=clock.monotonic_s(), at_s=clock.wall_s()
        )
        self.looks.append(look)
        if look.is_made:
            assert look.better is not None
            is_more = look.better.num_prefill > look.now.num_prefill
            role = Role.PREFILL if is_more else Role.DECODE
            self._metrics.home_moves.labels(role.value).inc()
            log_event(
                log,
                "an engine's home role changes",
                role=role.value,
                reason=f"{look.now.in_words()}; {look.better.in_words()}",
            )

    def _bounds(self) -> HomeBounds:
        roles = [each.role for each in self._backends if _is_there(each)]
        return HomeBounds(
            num_prefill=roles.count(Role.PREFILL),
            num_decode=roles.count(Role.DECODE),
            num_both=roles.count(Role.BOTH),
        )

    def _give(self, bounds: HomeBounds) -> None:
        homes: dict[str, Role] = {}
        if bounds.has_choice:
            both = sorted(b.url for b in self._backends if b.role is Role.BOTH and _is_there(b))
            num = bounds.nearest(self._control.share)
            homes = {url: Role.PREFILL if i < num else Role.DECODE for i, url in enumerate(both)}
        self._backends.give_homes(homes)


def _is_there(backend: Backend) -> bool:
    return backend.health is Health.READY and not backend.is_draining
