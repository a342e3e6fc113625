"""`/dashboard` and `/dashboard/data`.

The figures are exactly those of `/metrics`, the proxy's own and the engines': nothing is counted
here. The answer also says what users experience, which engines there are, what has happened since
the proxy started, and which requests were slow.

The page is one document: markup, style and script in one answer that loads nothing else. Its policy
admits only this style and this script, by their digests, and lets the page connect only to the
proxy that served it.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from aiohttp import hdrs, web

import pdserve
from pdserve.proxy.dashboard.banner import Banner
from pdserve.proxy.dashboard.journal import JournalEntry
from pdserve.proxy.dashboard.lookout import Lookout
from pdserve.proxy.dashboard.watch import SHOWN_OF_PROXY, EngineWatch, series_in
from pdserve.wire.finished import Finished

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from pdserve.proxy.backend import Backend
    from pdserve.proxy.brain.pairing import Pairing
    from pdserve.proxy.brain.prefixes import Prefixes
    from pdserve.proxy.brain.record import DecisionRecord
    from pdserve.proxy.services import Services

_HERE = Path(__file__).parent


def _source(text: str) -> str:
    """Return the CSP source of an inline element with this text (CSP 3, section 2.3.1)."""
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


_STYLE = (_HERE / "page.css").read_text(encoding="utf-8")
_SCRIPT = (_HERE / "page.js").read_text(encoding="utf-8")

PAGE = (
    (_HERE / "page.html")
    .read_text(encoding="utf-8")
    .replace("/*style*/", _STYLE)
    .replace("/*script*/", _SCRIPT)
    .encode()
)

POLICY = "; ".join(
    (
        "default-src 'none'",
        f"script-src {_source(_SCRIPT)}",
        f"style-src {_source(_STYLE)}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)

NUM_SLOWEST = 8
SLOWEST_SINCE_S = 300.0
_NUM_DECISIONS = 100
_MAX_ROUTED = 32
"""Engines whose work is shown."""

_COMMON_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    hdrs.CACHE_CONTROL: "no-store",
}


class ProxyShown(msgspec.Struct, frozen=True, kw_only=True):
    """The proxy itself; `series` are the shown ones of its `/metrics`."""

    version: str
    kv_mode: str
    prefill_policy: str
    decode_policy: str
    split_policy: str
    max_concurrent_requests: int
    queue_size: int
    needs_key: bool
    series: dict[str, float]


class EngineShown(msgspec.Struct, frozen=True, kw_only=True):
    """One engine.

    Attributes:
        health, reason: Result of the last health check.
        is_unreachable: Whether the newest read of its `/metrics` could not connect.
        failure: Why its `/metrics` cannot be read now; empty if it can.
        age_s: Seconds since `series` were read; None if never.
        in_flight: This proxy's exchanges with the engine.
        num_foreign: Requests that are not this proxy's.
        series: The shown ones of its `/metrics`.
    """

    url: str
    role: str
    health: str
    reason: str
    is_static: bool
    is_unreachable: bool
    failure: str
    age_s: float | None
    breaker: str
    in_flight: int
    num_foreign: int
    engine_id: str
    incarnation: str
    model: str
    dtype: str
    num_blocks: int
    block_size: int
    can_push: bool
    series: dict[str, float]


class EdgeShown(msgspec.Struct, frozen=True, kw_only=True):
    """A breaker of a pair of engines that is not closed."""

    prefill: str
    decode: str
    mode: str
    state: str


class RouteShown(msgspec.Struct, frozen=True, kw_only=True):
    """One decision; `measured_ms` is the time to first token, if the request ended well."""

    seq: int
    request_id: str
    is_split: bool
    reason: str
    predicted_ms: float
    measured_ms: float | None
    words: str


class WorkShown(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's work for this proxy, as predicted times.

    Attributes:
        home: Preferred role, under this load, of an engine that does both; empty if none.
        backlog_ms: Time until its prompts are computed.
        itl_ms: Time between two tokens of each stream; 0 without streams.
        lag_ms: Time since its last KV event batch; None if it publishes no KV events.
    """

    url: str
    home: str
    backlog_ms: float
    itl_ms: float
    num_prompts: int
    num_streams: int
    lag_ms: float | None


class RoutesShown(msgspec.Struct, frozen=True, kw_only=True):
    """The last decisions, newest first, and the engines as the next one will see them."""

    is_known: bool
    decisions: list[RouteShown]
    engines: list[WorkShown]


class Data(msgspec.Struct, frozen=True, kw_only=True):
    """The data that the page draws, once a second.

    Attributes:
        at_s: Monotonic time in seconds, from which rates are computed.
        wall_s: Unix time.
        began_s: Monotonic seconds at which this proxy started; distinguishes proxies.
        banner: What users experience now.
        events: Newest first, from `events_since_s` (Unix time) on.
        routes: Why requests went where they did; None if the proxy does not choose pairs.
        slowest: Requests of the last `slowest_since_s`, the longest time to first token first.
    """

    at_s: float
    wall_s: float
    began_s: float
    banner: Banner
    events: list[JournalEntry]
    events_since_s: float
    proxy: ProxyShown
    engines: list[EngineShown]
    edges: list[EdgeShown]
    routes: RoutesShown | None
    slowest: list[Finished]
    slowest_since_s: float


class Dashboard:
    """Serves the page and its data.

    Args:
        exposition: Returns the text of the proxy's `/metrics`.
        headers: Headers of requests to engines.
    """

    def __init__(
        self, services: Services, exposition: Callable[[], bytes], headers: Mapping[str, str]
    ) -> None:
        self._config = services.config
        self._backends = services.backends
        self._breakers = services.breakers
        self._pairing, self._prefixes = services.pairing, services.prefixes
        self._clock = services.clock
        self._recent = services.live.recent
        self._exposition = exposition
        self.watch = EngineWatch(services, headers)
        self.lookout = Lookout(services)

    def routes(self) -> list[web.RouteDef]:
        """Return the dashboard's routes; all of them need the API key."""
        return [web.get("/dashboard", self._page), web.get("/dashboard/data", self._data)]

    def start(self) -> None:
        """Start recording events, whether or not the dashboard is open."""
        self.lookout.start()

    async def stop(self) -> None:
        """Stop the background tasks."""
        await self.lookout.stop()
        await self.watch.stop()

    async def _page(self, request: web.Request) -> web.Response:
        return web.Response(
            body=PAGE,
            headers={
                **_COMMON_HEADERS,
                hdrs.CONTENT_TYPE: "text/html; charset=utf-8",
                "Content-Security-Policy": POLICY,
            },
        )

    async def _data(self, request: web.Request) -> web.Response:
        await self.watch.look()
        return web.Response(
            body=msgspec.json.encode(self.data()),
            headers={**_COMMON_HEADERS, hdrs.CONTENT_TYPE: "application/json"},
        )

    def data(self) -> Data:
        """Return the current data."""
        now_s = self._clock.monotonic_s()
        config = self._config
        return Data(
            at_s=round(now_s, 4),
            wall_s=round(self._clock.wall_s(), 3),
            began_s=round(self.lookout.began_s, 4),
            banner=self.lookout.banner(),
            events=self.lookout.journal.events,
            events_since_s=self.lookout.journal.since_s or 0.0,
            proxy=ProxyShown(
                version=pdserve.__version__,
                kv_mode=config.kv_mode.value,
                prefill_policy=config.prefill_policy,
                decode_policy=config.decode_policy,
                split_policy=config.split_policy,
                max_concurrent_requests=config.max_concurrent_requests,
                queue_size=config.queue_size,
                needs_key=bool(config.operator_keys or config.api_keys),
                series=series_in(self._exposition().decode(), SHOWN_OF_PROXY),
            ),
            engines=[self._engine(backend, now_s) for backend in self._backends],
            edges=[
                EdgeShown(prefill=prefill, decode=decode, mode=mode.value, state=state.value)
                for prefill, decode, mode, state in self._breakers.open_pairs()
            ],
            routes=_routes(self._pairing, self._prefixes, self._backends),
            slowest=self._recent.slowest(NUM_SLOWEST, since_s=now_s - SLOWEST_SINCE_S),
            slowest_since_s=SLOWEST_SINCE_S,
        )

    def _engine(self, backend: Backend, now_s: float) -> EngineShown:
        reading, info = self.watch.reading(backend), backend.info
        return EngineShown(
            url=backend.url,
            role=backend.role.value,
            health="draining" if backend.is_draining else backend.health.value,
            reason=backend.reason,
            is_static=backend.is_static,
            is_unreachable=reading.is_unreachable,
            failure=reading.failure,
            age_s=None if reading.at_s is None else round(now_s - reading.at_s, 3),
            breaker=backend.breaker.state.value,
            in_flight=backend.in_flight,
            num_foreign=backend.num_foreign,
            engine_id=info.engine_id if info is not None else "",
            incarnation=info.incarnation if info is not None else "",
            model=info.model if info is not None else "",
            dtype=info.dtype if info is not None else "",
            num_blocks=info.num_blocks if info is not None else 0,
            block_size=info.block_size if info is not None else 0,
            can_push=info.can_push if info is not None else False,
            series=reading.series,
        )


def _routes(
    pairing: Pairing | None, prefixes: Prefixes | None, engines: Iterable[Backend]
) -> RoutesShown | None:
    """Return the current decisions and work; None if the proxy does not choose pairs."""
    if pairing is None or prefixes is None:
        return None
    lags_s = prefixes.lags_s()
    shown = list(engines)[:_MAX_ROUTED]
    return RoutesShown(
        is_known=pairing.model.is_known,
        decisions=[_route(each) for each in pairing.log.newest()[:_NUM_DECISIONS]],
        engines=[_work(pairing, each, lags_s.get(each.url)) for each in shown],
    )


def _route(record: DecisionRecord) -> RouteShown:
    chosen, measured = record.decision.chosen, record.measured
    ttft_s = None if measured is None else measured.ttft_s
    return RouteShown(
        seq=record.seq,
        request_id=record.request_id,
        is_split=not chosen.is_local,
        reason=record.decision.reason,
        predicted_ms=round((record.taken or chosen).ttft_s * 1e3, 2),
        measured_ms=None if ttft_s is None else round(ttft_s * 1e3, 2),
        words=record.decision.in_words(ttft_s, record.taken),
    )


def _work(pairing: Pairing, engine: Backend, lag_s: float | None) -> WorkShown:
    work, times = pairing.ledger.at(engine.url), pairing.model.times()
    itl_s = times.step_s(work.num_streams, work.kv_tokens) if work.num_streams else 0.0
    return WorkShown(
        url=engine.url,
        home=engine.home_role.value if engine.home_role is not None else "",
        backlog_ms=round(pairing.backlog_s(engine) * 1e3, 1),
        itl_ms=round(itl_s * 1e3, 2),
        num_prompts=work.num_prompts,
        num_streams=work.num_streams,
        lag_ms=None if lag_s is None else round(lag_s * 1e3, 1),
    )
