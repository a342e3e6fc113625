"""The API server of one engine: routes, middlewares, and its life from bind to exit.

It binds before the engine is ready, so that `/livez` and `/readyz` can tell the two apart;
registers with proxies once it is; and on SIGTERM or SIGINT turns unready, leaves the
proxies, lets running requests finish within the shutdown timeout, and ends the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
from typing import TYPE_CHECKING

from aiohttp import web

from pdserve.errors import ConfigError, EngineDeadError
from pdserve.http import openapi
from pdserve.http.access import Access
from pdserve.http.bodies import Bodies
from pdserve.http.connection import HttpListener
from pdserve.http.control import Verifier
from pdserve.observe.clock import SystemClock
from pdserve.observe.heap import keep_flat
from pdserve.observe.log import log_event
from pdserve.observe.metrics import measure_loop_lag
from pdserve.observe.stats_log import log_stats
from pdserve.server import chat, completions, debug, status
from pdserve.server.metrics import ServerMetrics
from pdserve.server.reach import reach
from pdserve.server.registration import Registrar
from pdserve.server.reply import error_middleware, wants_stages
from pdserve.server.service import REQUEST_ID, SERVICE, START_S, Service, request_id_of
from pdserve.server.stats_log import EngineStatsLog
from pdserve.text.load import load_text
from pdserve.wire.hop import (
    INFO_PATH,
    LAYOUT_HEADER,
    REACH_PATH,
    RELEASE_PATH,
    REQUEST_ID_HEADER,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable
    from typing import Self

    from pdserve.config.http import ServerConfig
    from pdserve.config.schema import EngineConfig
    from pdserve.engine.client import EngineClient
    from pdserve.observe.clock import Clock
    from pdserve.server.reply import Handler
    from pdserve.text.load import Text

_log = logging.getLogger(__name__)

_POLL_S = 0.1
_CLOSE_TIMEOUT_S = 1.0
"""For the engine to end, and for streams to say so; requests had their time before."""


def build_app(
    client: EngineClient,
    text: Text | None,
    *,
    engine_config: EngineConfig,
    server_config: ServerConfig,
    clock: Clock | None = None,
) -> web.Application:
    """Return the application, not running yet.

    Run it with `handler_cancellation=True`: without it a client that leaves goes unnoticed.

    Args:
        client: The engine; it need not be ready.
        text: The model's text side; None if `app[SERVICE].text` is set later.
    """
    clock = clock or SystemClock()
    access = Access(server_config.api_keys, server_config.operator_keys)
    app = web.Application(
        middlewares=[_identify, error_middleware, _admitting(access)],
    )
    names = engine_config.model.served_model_name or (engine_config.model.model,)
    service = Service(
        client=client,
        engine_config=engine_config,
        server_config=server_config,
        metrics=ServerMetrics(
            names[0], lambda: client.stats, lambda: client.core_stats, lambda: client.info
        ),
        text=text,
        bodies=Bodies(server_config.limits),
        verifier=Verifier(
            engine_config.transfer.secret, accept_former=server_config.accept_former_signatures
        ),
        clock=clock,
        created_s=int(clock.wall_s()),
    )
    app[SERVICE] = service
    app.cleanup_ctx.append(_loop_lag)
    app.cleanup_ctx.append(_stats_log)
    app.cleanup_ctx.append(_text_work)
    app.on_response_prepare.append(_return_id)
    app.add_routes(
        [
            web.post("/v1/completions", completions.create_completion),
            web.post("/v1/chat/completions", chat.create_chat_completion),
            web.get("/v1/models", status.list_models),
            web.get("/v1/models/{model:.+}", status.retrieve_model),
            web.get("/health", status.health),
            web.get("/livez", status.livez),
            web.get("/readyz", status.readyz),
            web.get("/metrics", status.metrics),
            web.get("/version", status.version),
            web.get("/debug/clock", debug.clock),
            web.get("/debug/requests", debug.requests),
            web.get("/debug/trace", debug.trace),
            web.post("/tokenize", status.tokenize),
            web.post("/detokenize", status.detokenize),
            web.post("/reset_prefix_cache", status.reset_prefix_cache),
            web.post(RELEASE_PATH, status.release),
            web.get(INFO_PATH, status.info),
            web.post(REACH_PATH, reach),
            openapi.route(openapi.document("pdserve engine", openapi.ENGINE)),
        ]
    )
    return app


async def run_server(
    client: EngineClient,
    *,
    engine_config: EngineConfig,
    server_config: ServerConfig,
    on_ready: Callable[[str], None],
) -> signal.Signals:
    """Serve until SIGINT or SIGTERM; return which one it was.

    A second signal ends running requests at once.

    Args:
        on_ready: Called once with the server's URL when requests can be served, and no proxy
            that was named refuses the engine.

    Raises:
        ConfigError: The address cannot be bound, or the model's text files are unusable.
        EngineDeadError: The engine ended by itself.
    """
    app = build_app(client, None, engine_config=engine_config, server_config=server_config)
    service = app[SERVICE]
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        handle_signals=False,
        shutdown_timeout=_CLOSE_TIMEOUT_S,
    )
    await runner.setup()
    with _StopSignals() as stop:
        close_timeout_s = _CLOSE_TIMEOUT_S
        registration: Registrar | None = None
        try:
            url = await _bind(runner, server_config)
            await _until_ready(service, stop)
            if stop.first is None and client.info is not None:
                # To look through what is there by now takes 10 ms, in which every stream waits.
                keep_flat()
                registration = Registrar(
                    server_config.proxy_urls,
                    url=server_config.advertise_url or url,
                    info=client.info,
                    secret=engine_config.transfer.secret,
                )
                service.registration = registration
                await registration.start()
                await _until_taken(service, registration, stop)
            if stop.first is None and client.dead_reason is None:
                on_ready(url)
            await _until_stopped(service, stop)
            service.draining = True
            if stop.first is not None:  # what ends by itself is told by who runs this
                log_event(_log, "shutting down", cause=stop.first.name, running=len(service.jobs))
            if registration is not None:
                await registration.stop()
            left_s = await _drain(service, stop, server_config.shutdown_timeout_s)
            close_timeout_s = max(close_timeout_s, left_s)
        finally:
            await _end_engine(client, stop, close_timeout_s)
            await runner.cleanup()
    if stop.first is None:
        raise EngineDeadError(f"the engine has ended: {client.dead_reason}")
    return stop.first


class _StopSignals:
    """Counts SIGINT and SIGTERM while the block runs; the first asks, the second insists."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self.asked = asyncio.Event()
        self.insisted = asyncio.Event()

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._receive, number)
        return self

    def __exit__(self, *_: object) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    def _receive(self, number: signal.Signals) -> None:
        if self.first is None:
            self.first = number
            self.asked.set()
        else:
            self.insisted.set()


async def _wait(event: asyncio.Event, seconds: float) -> None:
    """Wait for `event`, but not longer than `seconds`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


async def _bind(runner: web.AppRunner, config: ServerConfig) -> str:
    """Listen; return the URL."""
    if config.proxy_urls and not config.advertise_url and config.host in ("0.0.0.0", "::", ""):
        raise ConfigError(
            f"--host is {config.host!r}, which proxies cannot call back: say where they reach "
            "this engine with --advertise-url",
            param="advertise-url",
        )
    timeout_s = config.limits.header_timeout_s
    site = HttpListener(runner, config.host, config.port, header_timeout_s=timeout_s)
    try:
        await site.start()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {config.port} on {config.host} is in use: choose another with --port",
                param="port",
            ) from error
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port}: {error.strerror or error}",
            param="host",
        ) from error
    host, port = runner.addresses[0][:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def _until_ready(service: Service, stop: _StopSignals) -> None:
    """Wait for the text side and the engine, or for a reason not to."""
    service.text = await asyncio.to_thread(load_text, service.engine_config.model)
    while service.client.info is None and service.client.dead_reason is None and stop.first is None:
        await _wait(stop.asked, _POLL_S / 5)


async def _until_taken(service: Service, registration: Registrar, stop: _StopSignals) -> None:
    """Wait until no proxy refuses the engine, of those that are there, or for a reason not to."""
    while not registration.is_settled and stop.first is None and service.client.dead_reason is None:
        await _wait(stop.asked, _POLL_S / 5)


async def _until_stopped(service: Service, stop: _StopSignals) -> None:
    while stop.first is None and service.client.dead_reason is None:
        await _wait(stop.asked, _POLL_S)


async def _drain(service: Service, stop: _StopSignals, timeout_s: float) -> float:
    """Let running requests end; return the seconds that are left of `timeout_s`."""
    deadline_s = service.clock.monotonic_s() + timeout_s
    while (
        service.jobs
        and not stop.insisted.is_set()
        and service.client.dead_reason is None
        and service.clock.monotonic_s() < deadline_s
    ):
        await _wait(stop.insisted, _POLL_S / 5)
    return deadline_s - service.clock.monotonic_s()


async def _end_engine(client: EngineClient, stop: _StopSignals, timeout_s: float) -> None:
    """End the engine; it may use the time to settle KV leases that peers still read."""
    ending = asyncio.create_task(client.close(timeout_s=timeout_s))
    insisted = asyncio.create_task(stop.insisted.wait())
    try:
        await asyncio.wait({ending, insisted}, return_when=asyncio.FIRST_COMPLETED)
        if not ending.done():
            ending.cancel()
            await asyncio.wait({ending})
            await client.close(timeout_s=0.0)
        else:
            await ending
    finally:
        insisted.cancel()


async def _text_work(app: web.Application) -> AsyncGenerator[None, None]:
    service = app[SERVICE]
    yield
    service.prompt_work.close()
    service.tool_work.close()


async def _loop_lag(app: web.Application) -> AsyncGenerator[None, None]:
    service = app[SERVICE]
    task = asyncio.create_task(measure_loop_lag(service.metrics.loop_lag, service.clock))
    yield
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def _stats_log(app: web.Application) -> AsyncGenerator[None, None]:
    service = app[SERVICE]
    task = asyncio.create_task(log_stats(EngineStatsLog(service.client, service.clock).read))
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@web.middleware
async def _identify(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Note when a request came and what it is called; the answer carries its id."""
    request[START_S] = request.app[SERVICE].clock.monotonic_s()
    request[REQUEST_ID] = request_id_of(request)
    return await handler(request)


async def _return_id(request: web.Request, response: web.StreamResponse) -> None:
    request_id = request.get(REQUEST_ID)
    if request_id is not None:
        response.headers[REQUEST_ID_HEADER] = request_id
    info = request.app[SERVICE].client.info
    if info is not None and wants_stages(request):
        response.headers[LAYOUT_HEADER] = info.layout_digest


def _admitting(access: Access) -> Callable[..., Awaitable[web.StreamResponse]]:
    """Return the middleware that asks for keys."""

    @web.middleware
    async def admit(request: web.Request, handler: Handler) -> web.StreamResponse:
        access.check(request)
        return await handler(request)

    return admit
