"""The proxy's process: parts, background tasks, start and shutdown.

Each part declares its own paths (`generation`, `status`, `dashboard`, `draining`,
`registration`); every request passes through the middleware in `delivery`. The proxy is stateless:
after a restart it learns its engines again from its command line and from their registrations.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
from typing import TYPE_CHECKING

from aiohttp import web

from pdserve.config.policies import PREDICTED, SHADOW
from pdserve.errors import ConfigError
from pdserve.http import openapi
from pdserve.http.access import engine_headers
from pdserve.http.bodies import Bodies
from pdserve.http.connection import HttpListener
from pdserve.http.cors import let_pages_ask
from pdserve.http.ignored import tell_ignored
from pdserve.http.stopping import StopSignals, wait_for
from pdserve.http.tls import client_context
from pdserve.observe.clock import SystemClock
from pdserve.observe.heap import keep_flat
from pdserve.observe.log import log_event
from pdserve.observe.metrics import measure_loop_lag
from pdserve.observe.stats_log import log_stats
from pdserve.proxy.admission import AdmissionQueue
from pdserve.proxy.backends import Backends
from pdserve.proxy.brain.homes import HomeRoles
from pdserve.proxy.brain.pairing import Pairing
from pdserve.proxy.brain.prefixes import make_prefixes
from pdserve.proxy.breakers import Breakers
from pdserve.proxy.checks import HealthChecks
from pdserve.proxy.client import EngineHttp
from pdserve.proxy.dashboard.handlers import Dashboard
from pdserve.proxy.delivery import Boundary
from pdserve.proxy.draining import Drains
from pdserve.proxy.gate import Gate
from pdserve.proxy.generation import Generation
from pdserve.proxy.live import LiveRequests
from pdserve.proxy.metrics import Metrics
from pdserve.proxy.registration import Registrations
from pdserve.proxy.routing import Router
from pdserve.proxy.services import Services
from pdserve.proxy.status import Debug, Status
from pdserve.wire.hop import PARAMS

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Sequence

    from pdserve.config.http import ProxyConfig
    from pdserve.observe.clock import Clock
    from pdserve.proxy.backend import Backend
    from pdserve.proxy.brain.index import PrefixIndex
    from pdserve.proxy.brain.prefixes import Feed
    from pdserve.proxy.epp.listener import EppListener
    from pdserve.wire.events import RoutingLoad
    from pdserve.wire.learned import LearnedTimes

log = logging.getLogger(__name__)

_RELEASE_TIMEOUT_S = 5.0
_CUT_S = 1.0
"""How long requests that are cut off have to tell their clients."""


async def run_proxy(config: ProxyConfig, *, on_ready: Callable[[str], None]) -> signal.Signals:
    """Serve until SIGINT, SIGTERM or SIGHUP; return the signal received.

    After the latter two, requests are accepted for the drain delay; those still running then may
    finish within the shutdown timeout. A second signal cuts them off.

    Args:
        on_ready: Called with the base URL once connections are accepted.

    Raises:
        ConfigError: The address cannot be bound, or a setting names nothing that exists.
    """
    proxy = Proxy(config)
    with StopSignals() as stop:
        try:
            on_ready(await proxy.start())
            keep_flat()
            await stop.asked.wait()
            assert stop.first is not None
            running = len(proxy.live.stories)
            log_event(log, "shutting down", cause=stop.first.name, running=running)
        finally:
            await proxy.stop(cut=stop.insisted, delay_s=stop.delay_s(config.drain_delay_s))
    return stop.first


class Proxy:
    """One proxy: start it, let it serve, stop it.

    Args:
        clock: Measures requests and leases.
        rng: Draws seeds for requests without one.
        new_nonce: Returns a string never returned before; unguessable outside of tests.
    """

    def __init__(
        self,
        config: ProxyConfig,
        *,
        clock: Clock | None = None,
        rng: random.Random | None = None,
        new_nonce: Callable[[], str] = secrets.token_urlsafe,
    ) -> None:
        self._config = config
        self._clock = clock or SystemClock()
        self._http = EngineHttp(secret=config.secret)
        self.metrics = Metrics()
        headers = engine_headers(config.api_keys, {})
        self.breakers = Breakers(config, self._clock, self.metrics)
        self.backends = Backends(config, self._clock, self.breakers, on_gone=self._gone)
        self.admission = AdmissionQueue(
            config.max_concurrent_requests, config.queue_size, config.queue_timeout_s
        )
        self.bodies = Bodies(config.limits)
        self._prefixes = make_prefixes(
            config,
            self.backends,
            self._clock,
            self.metrics.prefixes,
            self._listen,
        )
        self.pairing, self.homes, route = None, None, self.metrics.route
        if config.split_policy in (PREDICTED, SHADOW):
            self.pairing = Pairing(config, self._clock, route, on_change=self.admission.places.look)
            if config.split_policy == PREDICTED:
                self.homes = HomeRoles(config, self.backends, self.pairing, self._clock, route)
        self.checks = HealthChecks(
            config,
            self.backends,
            self._http,
            self._clock,
            totals=self.metrics.totals,
            headers=headers,
            on_load=self._heard,
        )
        router = Router(config, self.backends, self._prefixes, self.pairing)
        gate = Gate(
            config,
            router,
            self.backends,
            self.pairing,
            self.admission.places,
            self.metrics.gate,
        )
        self.live = LiveRequests(self.backends, self.admission, self._clock)
        services = Services(
            config=config,
            clock=self._clock,
            http=self._http,
            backends=self.backends,
            checks=self.checks,
            breakers=self.breakers,
            router=router,
            prefixes=self._prefixes,
            pairing=self.pairing,
            homes=self.homes,
            admission=self.admission,
            gate=gate,
            bodies=self.bodies,
            live=self.live,
            metrics=self.metrics,
            new_nonce=new_nonce,
        )
        status, drains = Status(services), Drains(services)
        self.dashboard = Dashboard(services, status.exposition, headers)
        self._parts = (
            Generation(services, rng or random.SystemRandom()),
            status,
            Debug(services),
            self.dashboard,
            drains,
            Registrations(services, drains),
        )
        self._services = services
        self._epp: EppListener | None = None
        self._runner: web.AppRunner | None = None
        self._listener: HttpListener | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> str:
        """Check the engines once and accept connections; return the base URL.

        Raises:
            ConfigError: The address cannot be bound, or a TLS file or the tokenizer is unusable.
        """
        self._http.tls = await asyncio.to_thread(client_context, self._config.tls)
        if self._prefixes is not None:
            await self._prefixes.start()
        runner = self._runner = web.AppRunner(
            self.build_app(),
            handler_cancellation=True,  # or a client that leaves would go unnoticed
            access_log=None,
            shutdown_timeout=0.1,  # `stop` has waited for them already
        )
        await runner.setup()
        listener = HttpListener(runner, self._config)
        try:
            await listener.start()
            self._listener = listener
            if self._config.epp.port is not None:
                await self._answer_gateways()
        except ConfigError:
            await self.stop()
            raise
        self._tasks = [
            asyncio.create_task(measure_loop_lag(self.metrics.loop_lag, self._clock)),
            asyncio.create_task(log_stats(self.live.stats)),
        ]
        await self.checks.start()
        if self.homes is not None:
            self.homes.sample()
            self._tasks.append(asyncio.create_task(self.homes.run()))
        self.dashboard.start()
        return listener.url

    async def stop(self, *, cut: asyncio.Event | None = None, delay_s: float = 0.0) -> None:
        """Turn unready, refuse connections, finish running requests, give leases back, close.

        Requests that still arrive on open connections are served, each as its connection's last.

        Args:
            cut: Once set, requests still running are cut off, with an error for their clients.
            delay_s: How long connections are still accepted, for senders that poll `/readyz`.
        """
        cut = cut or asyncio.Event()
        self.live.is_leaving = True
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.leave()
            await wait_for(cut, delay_s)
            await listener.stop()
        if self._epp is not None:
            await self._epp.stop(cut, self._config.shutdown_timeout_s)
        ends = [asyncio.create_task(each.wait()) for each in (self.live.is_idle, cut)]
        await asyncio.wait(
            ends,
            timeout=self._config.shutdown_timeout_s,
            return_when=asyncio.FIRST_COMPLETED,
        )
        for end in ends:
            end.cancel()
        if num := len(self.live.stories):
            log_event(log, "requests cut off", level=logging.WARNING, num=num)
            self.live.cut()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CUT_S):
                    await self.live.is_idle.wait()
        if self._runner is not None:
            await self._runner.cleanup()
        await self.dashboard.stop()
        await self.checks.stop()
        if self._prefixes is not None:
            await self._prefixes.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._http.close(_RELEASE_TIMEOUT_S)

    async def _answer_gateways(self) -> None:
        """Start picking engines for gateways.

        Raises:
            ConfigError: The address or a TLS file cannot be used, or grpcio is missing.
        """
        # gRPC is for those who have it.
        from pdserve.proxy.epp.listener import EppListener

        self._epp = EppListener(self._services)
        await self._epp.start()

    @property
    def epp_address(self) -> str | None:
        """The address that answers gateways, as `host:port`; None: gateways are not served."""
        return None if self._epp is None else self._epp.address

    @property
    def num_background_tasks(self) -> int:
        """Number of releases and drains under way."""
        return len(self._http.background)

    def _listen(self, index: PrefixIndex) -> Feed:
        """Return the source of engines' KV events: their sockets."""
        # ZMQ is for proxies that look at prefixes.
        from pdserve.proxy.brain.feed import EventFeed

        return EventFeed(
            index,
            self.backends,
            self._clock,
            secret=self._config.secret,
            on_load=self._heard,
            on_learned=self._taught,
        )

    def _heard(self, engine: Backend, load: RoutingLoad) -> None:
        """Record the load that an engine reports."""
        engine.heard(load, self._clock.monotonic_s())
        if self.pairing is not None:
            self.pairing.heard(engine, load)

    def _taught(self, url: str, learned: Sequence[LearnedTimes]) -> None:
        """Record the step times that an engine reports."""
        if self.pairing is not None:
            self.pairing.model.hear(url, learned)

    def _gone(self, url: str) -> None:
        """Forget the load of an engine that has left for good."""
        if self.pairing is not None:
            self.pairing.ledger.forget(url)

    def build_app(self) -> web.Application:
        """Return the application, not running yet."""
        boundary = Boundary(self._config, self.bodies)
        app = web.Application(middlewares=[self.metrics.http.middleware, boundary.middleware])
        let_pages_ask(app, self._config.cors)
        app.on_response_prepare.append(tell_ignored)
        for part in self._parts:
            app.add_routes(part.routes())
        # Internal messages between engines and proxies are not for clients.
        described = openapi.document(
            "pdserve", openapi.PROXY, without=(PARAMS,), root_path=self._config.root_path
        )
        app.add_routes([openapi.route(described)])
        self.metrics.http.create(app)
        return app
