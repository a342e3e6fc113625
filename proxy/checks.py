"""Checks every engine's health at an interval, and before a request gives up on one.

Knows what an engine's answers mean for its health and its load; `backends` holds the set of
engines. Costs: one task per engine, and per interval one small GET to one that is ready, two to
another; in a large fleet the rate is capped.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import zlib
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from pdserve.errors import HandshakeError
from pdserve.observe.log import log_event
from pdserve.proxy.backend import Health
from pdserve.proxy.errors import WorkerError
from pdserve.wire.hop import INFO_PATH, REACH_PATH, EngineReport, ReachReport, ReachRequest
from pdserve.wire.seal import UNREADABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from pdserve.config.http import ProxyConfig
    from pdserve.config.schema import Role
    from pdserve.observe.clock import Clock
    from pdserve.proxy.backend import Backend
    from pdserve.proxy.backends import Backends
    from pdserve.proxy.client import EngineHttp
    from pdserve.proxy.leg import Leg
    from pdserve.proxy.totals import Totals
    from pdserve.wire.events import RoutingLoad
    from pdserve.wire.request import EngineInfo
    from pdserve.wire.transfer import Endpoint

log = logging.getLogger(__name__)

_MAX_SKEW_S = 1.0
_SOON_S = 0.2
_MAX_CHECKS_PER_S = 200
"""While engines are well: with more of them each one's turn comes later. A request that fails says
sooner that one has died, and what this proxy has sent is known without asking."""
_STOPPED_S = 1.0
_REMIND_S = 60.0
"""How often it is said again that an engine is away."""
_REACH_TIMEOUT_S = 1.5
_MAX_PEERS = 8
"""Of the counterparts that are asked: the ways to further ones are like theirs, and after a proxy's
restart a large fleet comes at once."""
LOOK_AGAIN_S = 0.25
"""How long an engine that is looked at out of turn may take to say that it is ready."""


class HealthChecks:
    """Checks the engines of `backends`.

    Args:
        totals: Receives each engine's counts.
        headers: Sent with every check.
        on_load: Called with each engine's load.

    Attributes:
        reach: Asks engines whether they can reach each other.
    """

    def __init__(
        self,
        config: ProxyConfig,
        backends: Backends,
        http: EngineHttp,
        clock: Clock,
        *,
        totals: Totals,
        headers: Mapping[str, str],
        on_load: Callable[[Backend, RoutingLoad], None],
    ) -> None:
        self._config = config
        self._backends = backends
        self._http = http
        self._clock = clock
        self._totals = totals
        self._headers = headers
        self._on_load = on_load
        self.reach = Reach(backends, http)
        self._watchers: set[asyncio.Task[None]] = set()
        self._looks: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Check every engine once, then keep checking in the background."""
        await asyncio.gather(*(self.check(backend) for backend in self._backends))
        for number, backend in enumerate(self._backends, start=1):
            self.watch(backend, delay_s=self._interval_s(backend) * number / len(self._backends))

    async def stop(self) -> None:
        """End the background checks."""
        watchers = [*self._watchers, *self._looks.values()]
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)

    def watch(self, backend: Backend, *, delay_s: float = 0.0) -> None:
        """Check an engine from now on, the first time after `delay_s`."""
        if backend.is_watched:
            return
        backend.is_watched = True
        watcher = asyncio.create_task(self._watch_loop(backend, delay_s))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)

    async def _watch_loop(self, backend: Backend, delay_s: float) -> None:
        """Check an engine as long as it is known or anything still runs there."""
        while True:
            wakes_s = self._clock.monotonic_s() + delay_s
            await asyncio.sleep(delay_s)
            # A suspended proxy heard from no engine: that time counts against no lease.
            overslept_s = self._clock.monotonic_s() - wakes_s
            if overslept_s > _STOPPED_S:
                backend.lease_end_s += overslept_s
            self._backends.expire(backend)
            if backend.is_gone and not backend.legs:
                return
            try:
                await self.check(backend)
            except Exception as error:  # noqa: BLE001 - the top of a loop that must go on
                _tell_failure(backend.url, error)
            delay_s = self._interval_s(backend)

    def _interval_s(self, backend: Backend) -> float:
        return interval_of(backend, len(self._backends), self._config.health_check_interval_s)

    async def look_again(self, suspects: Collection[Backend] = ()) -> None:
        """Check engines that were last seen not ready, now rather than at their turn.

        Concurrent callers share the checks. Engines that answer late are left to their turn.

        Args:
            suspects: Also checked, whatever their last state.
        """
        for backend in self._backends:
            is_doubtful = backend.health is not Health.READY or backend in suspects
            if backend.num_late_checks or not is_doubtful:
                continue
            if backend.url not in self._looks:
                look = self._looks[backend.url] = asyncio.create_task(self.check(backend))
                look.add_done_callback(partial(self._looked, backend.url))
        if self._looks:
            await asyncio.wait(self._looks.values(), timeout=LOOK_AGAIN_S)

    def _looked(self, url: str, look: asyncio.Task[None]) -> None:
        del self._looks[url]
        if not look.cancelled() and (error := look.exception()) is not None:
            _tell_failure(url, error)

    async def check(self, backend: Backend) -> None:
        """Check an engine's health; a ready engine of ours says so in its report."""
        timeout_s = self._config.health_check_timeout_s
        before, level = backend.health, logging.INFO
        reads = {leg: leg.num_reads for leg in backend.legs}
        asked_s = self._clock.wall_s()
        try:
            status, body = await self._get(backend, INFO_PATH, timeout_s)
            report = _report_in(backend, body) if status == 200 else None
            if report is None or not report.ready:
                status, body = await self._get(backend, "/readyz", timeout_s)
                if status == 404:  # an engine of another make
                    status, body = await self._get(backend, "/health", timeout_s)
            if status == 200:
                await self._take(backend, report or EngineReport(), asked_s, timeout_s)
        except WorkerError as failure:
            self._note_failed_check(backend, failure, reads)
        else:
            backend.num_late_checks = 0
            why = _why_no_engine(report, body) or self._backends.why_misfit(backend)
            if status == 200 and why:
                backend.health, backend.reason, backend.models = Health.NOT_READY, why, []
                level = logging.ERROR
            elif status == 200:
                backend.health, backend.reason = Health.READY, ""
            else:
                backend.health = Health.NOT_READY
                backend.reason = (
                    f"/readyz answers {status}: {body[:200].decode(errors='replace').strip()}"
                )
        self._tell(backend, before, level)

    def _tell(self, backend: Backend, before: Health, level: int) -> None:
        """Log a change of health, and at intervals that an engine is still away.

        At first, an engine never seen may be away without fault, as any start order works. A
        proxy without a single ready engine needs attention at once.
        """
        now_s = self._clock.monotonic_s()
        is_ready = backend.health is Health.READY
        if backend.health is not before:
            backend.logged_s = now_s
            if before is Health.READY:
                is_last = all(each.health is not Health.READY for each in self._backends)
                level = logging.ERROR if is_last else logging.WARNING
        elif is_ready or now_s < backend.logged_s + _REMIND_S:
            return
        else:
            backend.logged_s = now_s
            level = logging.WARNING
        log_event(
            log,
            f"engine {backend.health.value.replace('_', ' ')}",
            level=level,
            url=backend.url,
            role=backend.role.value,
            reason=backend.reason or None,
        )

    def _note_failed_check(
        self, backend: Backend, failure: WorkerError, reads: Mapping[Leg, int]
    ) -> None:
        """Judge a failed check: a refusal is certain, a late answer may mean a busy machine.

        Args:
            reads: Reads by its legs when the check began. An engine that has sent anything
                since is alive.
        """
        if failure.reason == "timeout":
            if any(leg.num_reads > reads.get(leg, 0) for leg in backend.legs):
                return
            backend.num_late_checks += 1
            if backend.num_late_checks < self._config.cb_failure_threshold:
                return
            backend.lose_legs()
        backend.health, backend.reason = Health.UNREACHABLE, failure.detail

    async def _take(
        self, backend: Backend, report: EngineReport, asked_s: float, timeout_s: float
    ) -> None:
        """Record a ready engine's report."""
        if report.engine is not None:
            is_known = self._backends.knows(backend.url, report.engine)
            self._backends.learn(backend, report.engine)
            if not is_known:
                self._http.background.start(self._tell_reach(backend, report.engine))
        load = report.stats
        if load is not None:
            brief = load.in_brief()
            backend.is_idle = not (brief.num_requests or brief.num_used_blocks)
            self._on_load(backend, brief)
        if report.wall_s is not None:
            self._compare_clocks(backend, asked_s, report.wall_s)
        if not backend.models:
            await self._read_models(backend, timeout_s)
        if load is not None:
            self._totals.add(backend, load)

    async def _tell_reach(self, backend: Backend, engine: EngineInfo) -> None:
        """Log an engine out of reach that did not register, and so was not refused."""
        try:
            await self.reach.require(backend.url, backend.role, engine)
        except HandshakeError as error:
            log_event(log, "KV cannot be handed over", level=logging.ERROR, reason=error.message)

    def _compare_clocks(self, backend: Backend, asked_s: float, wall_s: float) -> None:
        """Record the difference between two hosts' wall clocks; warn when it changes.

        No decision depends on them, but logs of such hosts cannot be read side by side.
        """
        # It was reported between the question and now.
        early_s, late_s = wall_s - self._clock.wall_s(), wall_s - asked_s
        ahead_s = max(0.0, early_s) + min(0.0, late_s)
        if abs(ahead_s - backend.ahead_s) < _MAX_SKEW_S:
            return
        backend.ahead_s = ahead_s
        differs = abs(ahead_s) >= _MAX_SKEW_S
        log_event(
            log,
            f"its wall clock {'differs from' if differs else 'agrees again with'} this host's",
            level=logging.WARNING if differs else logging.INFO,
            engine=backend.url,
            ahead_s=round(ahead_s, 1),
        )

    async def _read_models(self, backend: Backend, timeout_s: float) -> None:
        status, body = await self._get(backend, "/v1/models", timeout_s)
        if status != 200:
            return
        try:
            models = msgspec.json.decode(body)["data"]
            backend.models = [model for model in models if isinstance(model["id"], str)]
        except (*UNREADABLE, KeyError, TypeError) as error:
            message = f"{backend.url}/v1/models cannot be read: {error!r}"
            raise WorkerError(message, reason="garbled") from error

    async def _get(self, backend: Backend, path: str, timeout_s: float) -> tuple[int, bytes]:
        return await self._http.get_json(f"{backend.url}{path}", timeout_s, self._headers)


def interval_of(backend: Backend, num_engines: int, interval_s: float) -> float:
    """Return the time to an engine's next check; one that is not well is checked soon.

    In a large fleet all wait longer, each for a different time: otherwise engines that arrived
    together would always be asked together.

    Args:
        num_engines: Size of the fleet.
        interval_s: Time between two checks in a small fleet.
    """
    crowd = num_engines / (_MAX_CHECKS_PER_S * interval_s)
    if backend.health is not Health.READY or backend.num_late_checks:
        interval_s = min(interval_s, _SOON_S)
    if crowd <= 1:
        return interval_s
    return interval_s * crowd * (0.75 + zlib.crc32(backend.url.encode()) / 2**33)


def _report_in(backend: Backend, body: bytes) -> EngineReport:
    try:
        return msgspec.json.decode(body, type=EngineReport)
    except UNREADABLE as error:
        message = f"{backend.url}{INFO_PATH} cannot be read: {error}"
        raise WorkerError(message, reason="garbled") from error


class _ProxyStatus(msgspec.Struct):
    """What a ready proxy says at `/readyz`."""

    engines: dict[str, int]


def _why_no_engine(report: EngineReport | None, body: bytes) -> str:
    """Return why what answered a check is no engine; empty if it may be one."""
    if report is None:
        with contextlib.suppress(*UNREADABLE):
            msgspec.json.decode(body, type=_ProxyStatus)
            return "it is a proxy, and would serve each leg as a whole request: name its engines"
    return ""


def _tell_failure(url: str, error: BaseException) -> None:
    log_event(log, "health check failed", level=logging.ERROR, exc_info=error, url=url)


class Reach:
    """Asks engines whether they can reach each other's side channels.

    The engines are asked because they, not the proxy, will connect: once per pair of lives, when
    the later one registers.
    """

    def __init__(self, backends: Backends, http: EngineHttp) -> None:
        self._backends = backends
        self._http = http

    async def require(self, url: str, role: Role, engine: EngineInfo) -> None:
        """Refuse an engine that one of its counterparts cannot reach, or that cannot reach one.

        An engine that does not answer, having ended or being of another make, proves nothing.

        Raises:
            HandshakeError: The message names both engines, the address and the remedy.
        """
        peers = [
            (other.url, other.info)
            for other in self._backends.counterparts(url, role)
            if other.info is not None and other.info.endpoints
        ][:_MAX_PEERS]
        if not peers or not engine.endpoints:
            return
        theirs = [info.endpoints[0] for _, info in peers]
        ours, *answers = await asyncio.gather(
            self._ask(url, theirs),
            *(self._ask(peer, engine.endpoints[:1]) for peer, _ in peers),
        )
        for (peer, _), endpoint, answer, reason in zip(
            peers, theirs, answers, ours or [None] * len(peers), strict=True
        ):
            if answer is not None and answer[0] is not None:
                raise HandshakeError(_cannot_reach(peer, url, engine.endpoints[0], answer[0]))
            if answer is not None and reason is not None:  # an engine that answers is alive
                raise HandshakeError(_cannot_reach(url, peer, endpoint, reason))

    async def _ask(self, url: str, endpoints: Sequence[Endpoint]) -> list[str | None] | None:
        """Return why the engine at `url` cannot reach each endpoint; None if it does not say."""
        body = ReachRequest(endpoints=list(endpoints))
        try:
            status, answer = await self._http.order(url, REACH_PATH, body, _REACH_TIMEOUT_S)
            reasons = msgspec.json.decode(answer, type=ReachReport).reasons
        except (WorkerError, *UNREADABLE):
            return None
        return reasons if status == 200 and len(reasons) == len(endpoints) else None


def _cannot_reach(who: str, whom: str, endpoint: Endpoint, reason: str) -> str:
    return (
        f"{who} cannot reach the address for KV of {whom}, {endpoint.host}:{endpoint.port} "
        f"({reason}): start {whom} with --kv-transfer-config.host and an address that other hosts "
        "reach (left out, it follows --host), and let nothing between them refuse its ports"
    )
