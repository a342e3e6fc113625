"""Drains an engine in bounded time, on an operator's request or the engine's after SIGTERM.

    POST /drain     send it no more requests; answered when it is empty, or at the deadline
    DELETE /drain   send it requests again

Requests running there may finish there. Once half of the time is over, streams are moved with their
KV: the engine ends each with a handoff, from which another one continues (`flow`). Requests still
running shortly before the deadline are taken away and continue at other engines as after a failure,
with the same text, but no engine is blamed and no retry is spent. A prefill engine is empty only
when its KV has also been read.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from pdserve.errors import BadRequestError, NotFoundError
from pdserve.http.answers import json_answer
from pdserve.observe.log import log_event
from pdserve.proxy.backend import Health
from pdserve.proxy.client import ORDER_TIMEOUT_S
from pdserve.proxy.errors import DrainedError, WorkerError
from pdserve.wire import drain
from pdserve.wire.hop import MIGRATE_PATH, MigrateRequest
from pdserve.wire.seal import UNREADABLE

if TYPE_CHECKING:
    from pdserve.proxy.backend import Backend
    from pdserve.proxy.leg import Leg
    from pdserve.proxy.services import Services

log = logging.getLogger(__name__)

_POLL_S = 0.02
_ASK_S = 0.2
"""Between two looks at what the engine itself says that it holds."""
_MOVED_AT_ONCE = 4
"""Streams that are moved with each look."""
_MARGIN_S = 0.25
"""How long before the deadline requests are taken away, or a tenth of it: they have to let go."""


class Drains:
    """Drains engines, and serves `/drain`."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._backends = services.backends
        self._metrics = services.metrics

    def routes(self) -> list[web.RouteDef]:
        """Its paths."""
        return [web.post(drain.PATH, self._begin), web.delete(drain.PATH, self._resume)]

    def leave(self, backend: Backend, deadline_s: float) -> None:
        """Drain an engine that shuts itself down, in the background, without asking it anything."""
        drain_ = _Drain(self._services, backend, deadline_s, is_ending=True)
        self._services.http.background.start(drain_.run())

    async def _begin(self, request: web.Request) -> web.Response:
        """Drain an engine to the end, even if the caller leaves."""
        backend, deadline_s = await self._asked(request)
        work = _Drain(self._services, backend, deadline_s, is_ending=False).run()
        return json_answer(await asyncio.shield(self._services.http.background.start(work)))

    async def _resume(self, request: web.Request) -> web.Response:
        backend, _ = await self._asked(request)
        if backend.is_draining:
            backend.is_draining = False
            self._metrics.drains.labels("resumed").inc()
            log_event(log, "engine is back", url=backend.url)
        return json_answer({})

    async def _asked(self, request: web.Request) -> tuple[Backend, float]:
        """Return the engine named in the request, and the deadline.

        Raises:
            BadRequestError: The body is not a `DrainRequest`.
            NotFoundError: No engine is known at this URL.
        """
        body = await self._services.bodies.read(request)
        try:
            asked = msgspec.json.decode(body, type=drain.DrainRequest)
        except UNREADABLE as error:
            raise BadRequestError(f"the body does not name an engine to drain: {error}") from None
        backend = self._backends.get(asked.url.rstrip("/"))
        if backend is None:
            known = ", ".join(each.url for each in self._backends) or "none"
            raise NotFoundError(
                f"no engine is known at {asked.url!r}: use one of {known}",
                param="url",
                code="engine_not_known",
            )
        return backend, asked.deadline_s


class _Drain:
    """The drain of one engine.

    Args:
        is_ending: Whether it shuts itself down, and itself handles what is not this proxy's.
    """

    def __init__(
        self, services: Services, backend: Backend, deadline_s: float, *, is_ending: bool
    ) -> None:
        self._http = services.http
        self._checks = services.checks
        self._metrics = services.metrics
        self._clock = services.clock
        self._backend = backend
        self._is_ending = is_ending
        self._start_s = self._asks_s = services.clock.monotonic_s()
        self._end_s = self._start_s + deadline_s
        self._move_s = self._start_s + deadline_s / 2
        self._take_s = self._end_s - min(_MARGIN_S, deadline_s / 10)
        self._known: set[Leg] = set()
        self._asked: set[Leg] = set()
        self._taken: set[Leg] = set()

    async def run(self) -> drain.DrainReport:
        """Drain it; return by the deadline, or when requests are sent there again."""
        backend = self._backend
        backend.is_draining = True
        log_event(log, "engine is drained", url=backend.url, exchanges=len(backend.legs))
        while True:
            self._known.update(backend.legs)
            now_s = self._clock.monotonic_s()
            if now_s >= self._take_s:
                self._take_away()
            elif now_s >= self._move_s:
                self._move()
            is_empty = await self._is_empty()
            now_s = self._clock.monotonic_s()
            if is_empty or now_s >= self._end_s or not backend.is_draining:
                return self._reported(now_s - self._start_s, is_empty=is_empty)
            await asyncio.sleep(min(_POLL_S, self._end_s - now_s))

    def _move(self) -> None:
        """Ask the engine to give some streams away; it gives those that it can."""
        left = [each for each in self._backend.legs if each not in self._asked]
        for leg in left[:_MOVED_AT_ONCE]:
            self._asked.add(leg)
            leg.may_move = True
            self._http.background.start(self._give_away(leg.request_id))

    async def _give_away(self, request_id: str) -> None:
        """Ask for a stream to end with a handoff; the stream itself shows whether it does."""
        asked = MigrateRequest(request_id=request_id)
        with suppress(WorkerError):
            await self._http.order(self._backend.url, MIGRATE_PATH, asked, ORDER_TIMEOUT_S)

    def _take_away(self) -> None:
        """Make requests still running there continue elsewhere."""
        for leg in [each for each in self._backend.legs if each not in self._taken]:
            self._taken.add(leg)
            leg.take_away(DrainedError(self._backend.url))

    async def _is_empty(self) -> bool:
        backend, now_s = self._backend, self._clock.monotonic_s()
        if backend.legs:
            return False
        if self._is_ending or backend.health is Health.UNREACHABLE:
            return True
        if now_s < self._asks_s:
            return False
        self._asks_s = now_s + _ASK_S
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, self._end_s - now_s)):
                await self._checks.check(backend)
                return backend.is_idle
        return False

    def _reported(self, seconds: float, *, is_empty: bool) -> drain.DrainReport:
        moved = self._taken | {leg for leg in self._known if leg.moved}
        report = drain.DrainReport(
            url=self._backend.url,
            is_empty=is_empty,
            seconds=round(seconds, 3),
            num_finished=len(self._known - moved - set(self._backend.legs)),
            num_moved=len(moved),
            num_left=len(self._backend.legs),
        )
        if is_empty or self._backend.is_draining:  # else it was taken back before the deadline
            self._metrics.drains.labels("empty" if is_empty else "deadline").inc()
        log_event(
            log,
            "drain is over",
            url=report.url,
            empty=is_empty,
            seconds=report.seconds,
            finished=report.num_finished,
            moved=report.num_moved,
            left=report.num_left,
        )
        return report
