"""The engines behind this proxy: which there are, which are well, how loaded they are.

Engines come from the command line, where they stay for good, or register themselves and stay
while they renew their lease. Each is asked for its health and its load at an interval; each
has a circuit breaker (`breaker`), and so has each pair of a prefill and a decode engine, because
two healthy engines may still not reach each other: one for pulls and one for pushes, which need
not fail together. Knows nothing of requests but their number.

Costs: one task and two small GETs per engine and interval; a choice is O(prefill engines x
decode engines) at worst, O(engines) as soon as one compatible pair is found early.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from pdserve.config.schema import Role
from pdserve.errors import BadRequestError, HandshakeError
from pdserve.observe.log import log_event
from pdserve.proxy.backend import Backend, Health
from pdserve.proxy.breaker import Breaker, BreakerState
from pdserve.proxy.errors import WorkerError
from pdserve.proxy.policies import BackendView
from pdserve.wire.hop import INFO_PATH, EngineReport
from pdserve.wire.seal import PROTOCOL
from pdserve.wire.transfer import KVMode

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from pdserve.config.schema import ProxyConfig
    from pdserve.observe.clock import Clock
    from pdserve.proxy.client import EngineHttp, Leg
    from pdserve.wire.hop import Registration
    from pdserve.wire.request import EngineInfo

log = logging.getLogger(__name__)

MAX_LEASE_S = 3600.0
_MAX_SKEW_S = 1.0
_SOON_S = 0.2
_STOPPED_S = 1.0
LOOK_AGAIN_S = 0.25
"""How long an engine that is looked at out of turn may take to say that it is ready."""
_REVISION = frozenset({"protocol", "schema", "weights"})
"""Fields of a layout in which engines of one deployment may differ while it is rolled."""
OUTAGE_MEMORY_S = 600.0
"""How long a deployment whose last engine of a role went counts as one that has an outage; after
that it is one without such engines."""


class Backends:
    """All engines this proxy knows of.

    Args:
        headers: Sent with every health check.
    """

    def __init__(
        self,
        config: ProxyConfig,
        http: EngineHttp,
        clock: Clock,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._config = config
        self._http = http
        self._clock = clock
        self._headers = dict(headers or {})
        self._backends: dict[str, Backend] = {}
        self._edges: dict[tuple[str, str, KVMode], Breaker] = {}
        self._watchers: set[asyncio.Task[None]] = set()
        self._prefill_lost_s = float("-inf")
        self._gone_s = dict.fromkeys(Role, float("-inf"))
        self._looks: dict[str, asyncio.Task[None]] = {}
        for url in config.prefill:
            self._add(_bare(url), Role.PREFILL, is_static=True)
        for url in config.decode:
            known = self._backends.get(_bare(url))
            if known is None:
                self._add(_bare(url), Role.DECODE, is_static=True)
            else:
                known.role = Role.BOTH

    def __iter__(self) -> Iterator[Backend]:
        return iter(list(self._backends.values()))

    @property
    def has_lost_prefill(self) -> bool:
        """Whether there is a prefill engine, ready or not, or one went without taking its leave."""
        return self._is_recent(self._prefill_lost_s) or any(b.role is Role.PREFILL for b in self)

    @property
    def has_lost_decode(self) -> bool:
        """Whether there is an engine that decodes, ready or not, or one went in whatever way.

        One that takes its leave counts as well: it may come back, and nobody else decodes for good.
        """
        decoders = (Role.DECODE, Role.BOTH)
        return any(b.decodes() for b in self) or any(
            self._is_recent(self._gone_s[role]) for role in decoders
        )

    @property
    def has_missing(self) -> bool:
        """Whether an engine can be waited for: a known one, or the last of a role, that went."""
        is_away = any(not each.available or each.num_late_checks for each in self)
        return is_away or any(map(self._is_recent, self._gone_s.values()))

    @property
    def available(self) -> frozenset[Backend]:
        """The engines that a request may be sent to now."""
        return frozenset(backend for backend in self if backend.available)

    def _is_recent(self, at_s: float) -> bool:
        return self._clock.monotonic_s() - at_s < OUTAGE_MEMORY_S

    def get(self, url: str) -> Backend | None:
        """Return the engine at a base URL."""
        return self._backends.get(url)

    # --- life cycle

    async def start(self) -> None:
        """Check every engine once, then go on checking in the background."""
        await asyncio.gather(*(self.check(backend) for backend in self))
        for backend in self:
            self._watch(backend, delay_s=self._interval_s(backend))

    async def stop(self) -> None:
        """End the background checks."""
        watchers = [*self._watchers, *self._looks.values()]
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)

    def _add(self, url: str, role: Role, *, is_static: bool) -> Backend:
        backend = Backend(url, role, is_static, self._breaker())
        self._backends[url] = backend
        return backend

    def _forget(self, backend: Backend, why: str) -> None:
        log.info("engine gone: url=%s role=%s (%s)", backend.url, backend.role.value, why)
        del self._backends[backend.url]
        self._forget_edges(backend.url)
        if not any(other.role is backend.role for other in self):
            self._gone_s[backend.role] = self._clock.monotonic_s()

    def _forget_edges(self, url: str) -> None:
        for edge in [edge for edge in self._edges if url in edge]:
            del self._edges[edge]

    def _breaker(self) -> Breaker:
        return Breaker(self._clock, self._config.cb_failure_threshold, self._config.cb_timeout_s)

    # --- registration

    def register(self, registration: Registration) -> None:
        """Take an engine in, or renew its lease.

        A new life of a known engine replaces the former one, whose failures say nothing
        about it.

        Raises:
            BadRequestError: A field is out of range.
            HandshakeError: It serves another model than an engine it would exchange KV with, or
                keeps its KV in another way. One of other weights, or of another version, is
                taken in: it finds its pairs among its like.
        """
        url = _bare(registration.url)
        if not url.startswith(("http://", "https://")):
            raise BadRequestError(f"url is {url!r}: an http URL is needed", param="url")
        if not 0 < registration.lease_s <= MAX_LEASE_S:
            raise BadRequestError(
                f"lease_s is {registration.lease_s:g}: between 0 and {MAX_LEASE_S:g} is possible",
                param="lease_s",
            )
        role = Role(registration.role)
        self._refuse_misfit(url, role, registration.engine)
        engine = registration.engine
        for other in self:
            if (
                other.url != url
                and other.info is not None
                and other.info.engine_id == engine.engine_id
                and other.info.incarnation != engine.incarnation
                and not other.is_static
            ):
                self._forget(other, f"restarted as {url}")
        backend = self._backends.get(url)
        if backend is None:
            backend = self._add(url, role, is_static=False)
            log.info("engine registered: url=%s role=%s", url, backend.role.value)
        elif not backend.is_static:
            backend.role = role
        self._gone_s[backend.role] = float("-inf")
        if backend.role is Role.PREFILL:
            self._prefill_lost_s = float("-inf")
        self._learn(backend, engine)
        if not backend.is_static:
            backend.lease_end_s = self._clock.monotonic_s() + registration.lease_s
        if not backend.is_watched:
            self._watch(backend, delay_s=0.0)

    def deregister(self, url: str) -> None:
        """Send nothing more to an engine that takes its leave; what runs there goes on."""
        backend = self._backends.get(_bare(url))
        if backend is None:
            return
        if backend.is_static:
            backend.health, backend.reason = Health.NOT_READY, "it is shutting down"
        else:
            self._forget(backend, "it took its leave")

    def _refuse_misfit(self, url: str, role: Role, engine: EngineInfo) -> None:
        known = self.get(url)
        if known is not None and known.info is not None:
            known_as = (known.info.incarnation, known.info.layout_digest)
            if known_as == (engine.incarnation, engine.layout_digest):
                return  # it was here first: it is another one that does not fit
        for other in self._counterparts(url, role):
            assert other.info is not None
            if not _is_same_model(engine, other.info):
                raise HandshakeError(_cannot_exchange(url, engine, other.url, other.info))

    def _counterparts(self, url: str, role: Role) -> Iterator[Backend]:
        """Yield the engines that one of this role would exchange KV with."""
        for other in self:
            pairs = (role is not Role.DECODE and other.decodes()) or (
                role is not Role.PREFILL and other.prefills()
            )
            if other.url != url and other.info is not None and pairs:
                yield other

    def _learn(self, backend: Backend, engine: EngineInfo) -> None:
        """Take note of who answers at a URL; a new incarnation starts with a clean sheet."""
        former, backend.info = backend.info, engine
        if former is None or former.incarnation != engine.incarnation:
            for other in self._counterparts(backend.url, backend.role):
                assert other.info is not None
                if other.info.layout_digest != engine.layout_digest:
                    is_other_revision = _is_same_model(engine, other.info)
                    log.log(
                        logging.WARNING if is_other_revision else logging.ERROR,
                        "requests will not be split between these two: %s",
                        _cannot_exchange(backend.url, engine, other.url, other.info),
                    )
        if former is not None and former.incarnation != engine.incarnation:
            log.info("engine restarted: url=%s engine=%s", backend.url, engine.engine_id)
            backend.breaker = self._breaker()
            backend.models = []
            self._forget_edges(backend.url)
            self._lose_legs(backend)

    # --- health

    def _watch(self, backend: Backend, *, delay_s: float) -> None:
        backend.is_watched = True
        watcher = asyncio.create_task(self._watch_loop(backend, delay_s))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)

    async def _watch_loop(self, backend: Backend, delay_s: float) -> None:
        """Check an engine for as long as it is known, or anything still runs there."""
        while True:
            wakes_s = self._clock.monotonic_s() + delay_s
            await asyncio.sleep(delay_s)
            # A proxy that was stopped has heard nobody meanwhile: no engine's lease ran then.
            overslept_s = self._clock.monotonic_s() - wakes_s
            if overslept_s > _STOPPED_S:
                backend.lease_end_s += overslept_s
            is_known = self.get(backend.url) is backend
            if is_known and self._clock.monotonic_s() > backend.lease_end_s:
                self._forget(backend, "its lease ran out")
                is_known = False
                if backend.role is Role.PREFILL:
                    self._prefill_lost_s = self._clock.monotonic_s()
            if not is_known and not backend.legs:
                return
            try:
                await self.check(backend)
            except Exception:
                log.exception("health check failed: url=%s", backend.url)
            delay_s = self._interval_s(backend)

    def _interval_s(self, backend: Backend) -> float:
        """Return the time to the next check; one that is not ready, or was late, is wanted soon."""
        interval_s = self._config.health_check_interval_s
        is_well = backend.health is Health.READY and not backend.num_late_checks
        return interval_s if is_well else min(interval_s, _SOON_S)

    async def look_again(self, suspects: Collection[Backend] = ()) -> None:
        """Check those that were not ready when last seen, now rather than at their turn.

        Callers at the same time share the checks. Engines that answer late are left to their turn.

        Args:
            suspects: Checked as well, however they were when last seen.
        """
        for backend in self:
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
            log.error("health check failed: url=%s", url, exc_info=error)

    async def check(self, backend: Backend) -> None:
        """Ask an engine how it is."""
        timeout_s = self._config.health_check_timeout_s
        before = backend.health
        reads = {leg: leg.num_reads for leg in backend.legs}
        try:
            status, body = await self._get(backend, "/readyz", timeout_s)
            if status == 404:  # an engine of another make
                status, body = await self._get(backend, "/health", timeout_s)
            if status == 200:
                await self._read_report(backend, timeout_s)
        except WorkerError as failure:
            self._note_failed_check(backend, failure, reads)
        else:
            backend.num_late_checks = 0
            if status == 200:
                backend.health, backend.reason = Health.READY, ""
            else:
                backend.health = Health.NOT_READY
                backend.reason = f"/readyz answers {status}: {body[:200].decode(errors='replace')}"
        if backend.health is not before:
            log.info(
                "engine %s: url=%s role=%s %s",
                backend.health.value,
                backend.url,
                backend.role.value,
                backend.reason,
            )

    def _note_failed_check(
        self, backend: Backend, failure: WorkerError, reads: Mapping[Leg, int]
    ) -> None:
        """A refused connection is certain; a late answer may only mean a busy machine.

        Args:
            reads: Of the legs there, when the check began. An engine of which something has come
                since is alive.
        """
        if failure.reason == "timeout":
            if any(leg.num_reads > reads.get(leg, 0) for leg in backend.legs):
                return
            backend.num_late_checks += 1
            if backend.num_late_checks < self._config.cb_failure_threshold:
                return
            self._lose_legs(backend)
        backend.health, backend.reason = Health.UNREACHABLE, failure.detail

    async def _read_report(self, backend: Backend, timeout_s: float) -> None:
        asked_s = self._clock.wall_s()
        status, body = await self._get(backend, INFO_PATH, timeout_s)
        if status == 200:
            try:
                report = msgspec.json.decode(body, type=EngineReport)
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                message = f"{backend.url}{INFO_PATH} cannot be read: {error}"
                raise WorkerError(message, reason="garbled") from error
            if report.engine is not None:
                self._learn(backend, report.engine)
            if report.stats is not None:
                load = report.stats
                backend.load_s = self._clock.monotonic_s()
                total = load.num_running + load.num_waiting + load.num_receiving
                backend.num_foreign = max(0, total - backend.in_flight)
                backend.kv_usage = load.kv_usage
            if report.wall_s is not None:
                self._compare_clocks(backend, asked_s, report.wall_s)
        if not backend.models:
            await self._read_models(backend, timeout_s)

    def _compare_clocks(self, backend: Backend, asked_s: float, wall_s: float) -> None:
        """Note how far two hosts' wall clocks are apart; warn when that changes.

        Nothing is decided by them, but logs of several hosts cannot be read side by side.
        """
        # It was said between the question and now.
        early_s, late_s = wall_s - self._clock.wall_s(), wall_s - asked_s
        ahead_s = max(0.0, early_s) + min(0.0, late_s)
        if abs(ahead_s - backend.ahead_s) < _MAX_SKEW_S:
            return
        backend.ahead_s = ahead_s
        log_event(
            log,
            "its wall clock differs from this host's",
            level=logging.WARNING,
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
        except (msgspec.MsgspecError, ValueError, KeyError, TypeError) as error:
            message = f"{backend.url}/v1/models cannot be read: {error!r}"
            raise WorkerError(message, reason="garbled") from error

    async def _get(self, backend: Backend, path: str, timeout_s: float) -> tuple[int, bytes]:
        return await self._http.get_json(f"{backend.url}{path}", timeout_s, self._headers)

    def _lose_legs(self, backend: Backend) -> None:
        for leg in list(backend.legs):
            leg.lose()

    def view(self, backend: Backend) -> BackendView:
        """Return what a policy may know of an engine."""
        return BackendView(
            url=backend.url,
            available=backend.available,
            in_flight=backend.in_flight,
            num_foreign=backend.num_foreign,
            kv_usage=backend.kv_usage,
            age_s=self._clock.monotonic_s() - backend.load_s,
        )

    # --- pairs

    def edge(self, prefill: Backend, decode: Backend, mode: KVMode = KVMode.PULL) -> Breaker:
        """Return the breaker of a pair; one that nobody keeps if an engine is gone."""
        key = (prefill.url, decode.url, mode)
        edge = self._edges.get(key) or self._breaker()
        if self.get(prefill.url) is prefill and self.get(decode.url) is decode:
            self._edges[key] = edge
        return edge

    def can_pair(self, prefill: Backend, decode: Backend) -> bool:
        """Whether KV can go from one to the other, as far as is known.

        Equal digests say that it means the same at both: model, weights, dtype. How it is
        shared out over ranks and blocks may differ.
        """
        if prefill is decode:
            return False
        ours, theirs = prefill.info, decode.info
        if ours and theirs and ours.layout_digest != theirs.layout_digest:
            return False
        breaker = self._edges.get((prefill.url, decode.url, KVMode.PULL))
        return breaker is None or breaker.allows

    def can_push(self, prefill: Backend, decode: Backend) -> bool:
        """Whether one can write into the other's blocks, as both say, if they can pair at all."""
        ours, theirs = prefill.info, decode.info
        return (
            ours is not None
            and theirs is not None
            and ours.layout_digest == theirs.layout_digest
            and ours.protocol == theirs.protocol == PROTOCOL  # the ticket is ours
            and all(e.can_push and e.endpoints and e.kv_shape is not None for e in (ours, theirs))
        )

    def pushes_well(self, prefill: Backend, decode: Backend) -> bool:
        """Whether the pair's breaker lets a push through."""
        breaker = self._edges.get((prefill.url, decode.url, KVMode.PUSH))
        return breaker is None or breaker.allows

    def count(self) -> dict[tuple[str, str], int]:
        """Return the number of engines by (role, state); every combination is present."""
        states = [health.value for health in Health] + ["breaker_open"]
        counts = {(role.value, state): 0 for role in Role for state in states}
        for backend in self:
            state = backend.health.value
            if backend.health is Health.READY and backend.breaker.state is BreakerState.OPEN:
                state = "breaker_open"
            counts[backend.role.value, state] += 1
        return counts

    def edges(self) -> list[tuple[str, str, KVMode, BreakerState]]:
        """Return the breakers of pairs that have been used: (prefill, decode, mode, state)."""
        return [(*pair, edge.state) for pair, edge in self._edges.items()]

    def open_edges(self) -> int:
        """Return the number of pairs with a breaker that is not closed."""
        pairs = {
            (prefill, decode)
            for (prefill, decode, _), edge in self._edges.items()
            if edge.state is not BreakerState.CLOSED
        }
        return len(pairs)


def _bare(url: str) -> str:
    return url.rstrip("/")


def _is_same_model(ours: EngineInfo, theirs: EngineInfo) -> bool:
    """Whether two engines are what a deployment may be while it is rolled.

    Weights may then differ, if both are served by one name, and so may what a version knows of a
    layout: only what both know is compared.
    """
    if ours.layout_digest == theirs.layout_digest:
        return True
    known_to_both = ours.layout.keys() & theirs.layout.keys() - _REVISION
    return ours.model == theirs.model and all(
        ours.layout[name] == theirs.layout[name] for name in known_to_both
    )


def _cannot_exchange(url: str, engine: EngineInfo, other_url: str, other: EngineInfo) -> str:
    """Name what differs, with both values."""
    ours, theirs = ({**each.layout, "served model name": each.model} for each in (engine, other))
    differing = [
        f"{name} is {ours.get(name)} here and {theirs.get(name)} there"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]
    digests = f"layout digest {engine.layout_digest} here, {other.layout_digest} there"
    remedy = "" if engine.model == other.model else " (--served-model-name gives both one name)"
    what = "; ".join(differing) or digests
    return f"{url} cannot exchange KV with {other_url}: {what}{remedy}"
