"""Samples the deployment's state once a second, whether or not the dashboard is open.

Changes since the last sample go into the journal, and the proxy's counts go into the minute that
the banner judges.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from pdserve.config.schema import Role
from pdserve.errors import UnavailableError
from pdserve.proxy.backend import Health
from pdserve.proxy.dashboard.banner import (
    Banner,
    Felt,
    Minute,
    Tally,
    Waits,
    banner,
    by_labels,
)
from pdserve.proxy.dashboard.journal import EngineSight, Journal, Sight, engine_name, spoken

if TYPE_CHECKING:
    from pdserve.proxy.backend import Backend
    from pdserve.proxy.services import Services

SIGHT_INTERVAL_S = 1.0

log = logging.getLogger(__name__)


class Lookout:
    """One proxy's record of its deployment.

    Attributes:
        journal: Events so far.
        began_s: Monotonic seconds at which this proxy started.
    """

    def __init__(self, services: Services) -> None:
        self._services = services
        self._clock = services.clock
        self.journal = Journal()
        self._minute = Minute()
        self.began_s = services.clock.monotonic_s()
        self._looking: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Take the first sample, and go on in the background."""
        self.see()
        self._looking = asyncio.create_task(self._look())

    async def stop(self) -> None:
        """Stop at once."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(SIGHT_INTERVAL_S)
            try:
                self.see()
            except Exception:  # the top of a loop that must go on
                log.exception("the dashboard cannot see the deployment")

    def see(self) -> None:
        """Record the current state."""
        metrics = self._services.metrics
        requests = {outcome: number for (outcome,), number in by_labels(metrics.requests).items()}
        tally = Tally(requests, Waits.of(metrics.ttft), Waits.of(metrics.inter_token))
        self._minute.note(tally, self._clock.monotonic_s())
        sight = Sight(
            engines={backend.url: _sight_of(backend) for backend in self._services.backends},
            pairs={
                (prefill, decode, mode.value): state.value
                for prefill, decode, mode, state in self._services.breakers.open_pairs()
            },
            rungs={
                (rung, reason): number
                for (rung, reason), number in by_labels(metrics.ladder).items()
                if number
            },
            outcomes=requests,
        )
        self.journal.see(sight, self._clock.wall_s())

    def banner(self) -> Banner:
        """Return what users experience now."""
        try:
            self._services.router.check_ready()
            unserved = None
        except UnavailableError as error:
            unserved = error.message
        backends, minute = list(self._services.backends), self._minute.grown
        assert minute is not None  # `start` has seen
        known = {role.value: sum(b.role is role for b in backends) for role in Role}
        ready = {role.value: sum(b.role is role and b.available for b in backends) for role in Role}
        return banner(
            Felt(
                unserved=unserved,
                ready=ready,
                known=known,
                unwell=[_ailing(backend) for backend in backends if not backend.available],
                num_waiting=self._services.admission.num_waiting,
                minute=minute,
                span_s=self._minute.span_s,
            )
        )


def _sight_of(backend: Backend) -> EngineSight:
    incarnation = "" if backend.info is None else backend.info.incarnation
    life, stats = backend.snapshot or ("", None)
    return EngineSight(
        role=backend.role.value,
        health=backend.health.value,
        reason=backend.reason,
        incarnation=incarnation,
        breaker=backend.breaker.state.value,
        stats=stats if life == incarnation else None,
    )


def _ailing(backend: Backend) -> str:
    """Return which engine is unavailable, and why."""
    name = engine_name(backend.role.value, backend.url)
    if backend.health is not Health.READY:
        return f"{name} is {spoken(backend.health.value)}: {backend.reason}"
    return f"{name} is ready, but {backend.absence}"
