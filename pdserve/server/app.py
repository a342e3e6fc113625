"""The API server of one engine: routes, middlewares, and its life from bind to exit.

It binds before the engine is ready, so that `/livez` and `/readyz` can tell the two apart;
registers with proxies once it is; and on SIGTERM or SIGINT turns unready, deregisters from the
proxies (without any, waits until others have noticed), lets running requests finish within the
shutdown timeout, and ends the engine.
"""

from __future__ import annotations

import asyncio
import logging
import math
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from aiohttp import web

from pdserve.config.checks import WILDCARDS
from pdserve.dialects import paths
from pdserve.errors import EngineDeadError
from pdserve.http import openapi
from pdserve.http.access import Access
from pdserve.http.bodies import Bodies
from pdserve.http.connection import HttpListener
from pdserve.http.control import Verifier
from pdserve.http.cors import let_pages_ask
from pdserve.http.ignored import tell_ignored
from pdserve.http.own_address import own_address
from pdserve.http.stopping import StopSignals, wait_for
from pdserve.observe.clock import SystemClock
from pdserve.observe.heap import keep_flat
from pdserve.observe.log import log_event
from pdserve.observe.metrics import measure_loop_lag
from pdserve.observe.stats_log import log_stats
from pdserve.server import chat, completions, embeddings, status
from pdserve.server.account import EngineStatsLog
from pdserve.server.metrics import ServerMetrics
from pdserve.server.prefill_leg import running_legs
from pdserve.server.registration import Registrar
from pdserve.server.reply import error_middleware, wants_stages
from pdserve.server.service import REQUEST_ID, SERVICE, START_S, UNDO, Service, request_id_of
from pdserve.text.load import load_text
from pdserve.wire.hop import (
    INFO_PATH,
    LAYOUT_HEADER,
    MIGRATE_PATH,
    REACH_PATH,
    RELEASE_PATH,
    REQUEST_ID_HEADER,
)

if TYPE_CHECKING:
    import signal
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from pdserve.config.http import ServerConfig
    from pdserve.config.schema import EngineConfig
    from pdserve.engine.client import EngineClient
    from pdserve.http.answers import Handler
    from pdserve.observe.clock import Clock
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
    names = engine_config.model.served_model_name or (engine_config.model.model,)
    metrics = ServerMetrics(names[0], client, engine_config.cache)
    app = web.Application(
        middlewares=[
            metrics.http.middleware,
            _identify,
            error_middleware,
            _admitting(access),
            _undo_if_failed,
        ],
    )
    service = Service(
        client=client,
        engine_config=engine_config,
        server_config=server_config,
        metrics=metrics,
        text=text,
        bodies=Bodies(server_config.limits),
        verifier=Verifier(
            engine_config.transfer.secret, accept_former=server_config.accept_former_signatures
        ),
        clock=clock,
        created_s=int(clock.wall_s()),
    )
    app[SERVICE] = service
    app.cleanup_ctx.append(_beside_requests)
    app.cleanup_ctx.append(running_legs)
    app.on_response_prepare.append(_return_id)
    app.on_response_prepare.append(tell_ignored)
    let_pages_ask(app, server_config.cors)
    app.add_routes(
        [
            web.post("/v1/completions", completions.create_completion),
            web.post("/v1/chat/completions", chat.create_chat_completion),
            web.post("/v1/embeddings", embeddings.create_embedding),
            web.post("/v1/score", embeddings.create_score),
            web.post("/score", embeddings.create_score),
            web.post("/v1/rerank", embeddings.create_rerank),
            web.post("/rerank", embeddings.create_rerank),
            web.post(paths.RESPONSES, chat.create_response),
            web.post(paths.MESSAGES, chat.create_message),
            web.post(paths.COUNT_TOKENS, status.count_tokens),
            web.get("/v1/models", status.list_models),
            web.get("/v1/models/{model:.+}", status.retrieve_model),
            web.get("/health", status.health),
            web.get("/ping", status.health),
            web.post("/ping", status.health),
            web.get("/load", status.load),
            web.get("/livez", status.livez),
            web.get("/readyz", status.readyz),
            web.get("/metrics", status.metrics),
            web.get("/version", status.version),
            web.get("/debug/clock", status.clock),
            web.get("/debug/requests", status.requests),
            web.get("/debug/trace", status.trace),
            web.post("/tokenize", status.tokenize),
            web.post("/detokenize", status.detokenize),
            web.post("/reset_prefix_cache", status.reset_prefix_cache),
            web.post(RELEASE_PATH, status.release),
            web.get(INFO_PATH, status.info),
            web.post(REACH_PATH, status.reach),
            web.post(MIGRATE_PATH, status.migrate),
            openapi.route(
                openapi.document(
                    "pdserve engine", openapi.ENGINE, root_path=server_config.root_path
                )
            ),
        ]
    )
    metrics.http.create(app)
    return app


async def run_server(
    client: EngineClient,
    *,
    engine_config: EngineConfig,
    server_config: ServerConfig,
    on_ready: Callable[[str], None],
) -> signal.Signals:
    """Serve until SIGINT, SIGTERM or SIGHUP; return which one it was.

    A second signal ends running requests at once.

    Args:
        on_ready: Called once with the server's URL when requests can be served and no configured
            proxy refuses the engine.

    Raises:
        ConfigError: The address cannot be bound, or files of TLS or of the model's text side
            cannot be used.
        EngineDeadError: The engine ended unasked.
    """
    app = build_app(client, None, engine_config=engine_config, server_config=server_config)
    service = app[SERVICE]
    service.is_registering = bool(server_config.proxy_urls)
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        handle_signals=False,
        shutdown_timeout=_CLOSE_TIMEOUT_S,
    )
    await runner.setup()
    with StopSignals() as stop:
        close_timeout_s = _CLOSE_TIMEOUT_S
        registration: Registrar | None = None
        try:
            listener = HttpListener(runner, server_config)
            await listener.start()
            url = listener.url
            service.text = text = await asyncio.to_thread(load_text, engine_config.model)
            service.grammars(text)
            if text.not_applied:
                log_event(
                    _log,
                    "generation_config.json asks for what is not applied",
                    level=logging.WARNING,
                    model=engine_config.model.model,
                    fields=", ".join(text.not_applied),
                )
            await _wait_while(lambda: client.info is None, service, stop.asked)
            if stop.first is None and client.info is not None:
                # A collection of all objects takes 10 ms, during which every stream waits.
                keep_flat()
                registration = Registrar(
                    server_config.proxy_urls,
                    url=await asyncio.to_thread(_announced_url, server_config, url),
                    info=service.info or client.info,
                    secret=engine_config.transfer.secret,
                    tls=server_config.tls,
                )
                service.registration = registration
                await registration.start()
                await _wait_while(lambda: not registration.is_settled, service, stop.asked)
            if stop.first is None and client.dead_reason is None:
                service.is_registering = False
                on_ready(url)
            await _wait_while(lambda: True, service, stop.asked, poll_s=_POLL_S)
            service.is_leaving = True
            listener.leave()
            if stop.first is not None:  # what ends by itself is told by who runs this
                log_event(
                    _log, "shutting down", cause=stop.first.name, running=len(service.text_requests)
                )
            if registration is not None:
                await registration.stop(deadline_s=server_config.shutdown_timeout_s)
            if not server_config.proxy_urls and service.not_ready_reason is None:
                delay_s = stop.delay_s(server_config.drain_delay_s)
                await _wait_while(lambda: True, service, stop.insisted, timeout_s=delay_s)
            service.draining = True
            timeout_s = server_config.shutdown_timeout_s
            left_s = await _wait_while(
                lambda: bool(service.text_requests), service, stop.insisted, timeout_s=timeout_s
            )
            close_timeout_s = max(close_timeout_s, left_s)
        finally:
            await _end_engine(client, stop, close_timeout_s)
            await runner.cleanup()
    if stop.first is None:
        raise EngineDeadError(f"the engine has ended: {client.dead_reason}")
    return stop.first


def _announced_url(config: ServerConfig, url: str) -> str:
    """Return the URL at which proxies should call an engine that listens at `url`."""
    if config.advertise_url or config.host not in WILDCARDS:
        return config.advertise_url or url
    address, parts = own_address(config), urlsplit(url)
    host = f"[{address}]" if ":" in address else address
    return f"{parts.scheme}://{host}:{parts.port}"


async def _wait_while(
    is_wanted: Callable[[], bool],
    service: Service,
    signalled: asyncio.Event,
    *,
    timeout_s: float = math.inf,
    poll_s: float = _POLL_S / 5,
) -> float:
    """Wait while that is wanted and the engine lives; return the rest of `timeout_s`.

    Args:
        signalled: Set by the signal that ends the wait.
    """
    deadline_s = service.clock.monotonic_s() + timeout_s
    while (
        is_wanted()
        and not signalled.is_set()
        and service.client.dead_reason is None
        and service.clock.monotonic_s() < deadline_s
    ):
        await wait_for(signalled, poll_s)
    return deadline_s - service.clock.monotonic_s()


async def _end_engine(client: EngineClient, stop: StopSignals, timeout_s: float) -> None:
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


async def _beside_requests(app: web.Application) -> AsyncGenerator[None, None]:
    """Measure the loop's lag and log statistics while the app runs; end the threads for texts."""
    service = app[SERVICE]
    tasks = [
        asyncio.create_task(measure_loop_lag(service.metrics.loop_lag, service.clock)),
        asyncio.create_task(log_stats(EngineStatsLog(service.client, service.clock).read)),
    ]
    yield
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    service.close_text()


@web.middleware
async def _identify(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Note a request's arrival time and id; the answer carries the id."""
    request[START_S] = request.app[SERVICE].clock.monotonic_s()
    request[REQUEST_ID] = request_id_of(request)
    return await handler(request)


@web.middleware
async def _undo_if_failed(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except BaseException:
        if (undo := request.get(UNDO)) is not None:
            undo()
        raise


async def _return_id(request: web.Request, response: web.StreamResponse) -> None:
    request_id = request.get(REQUEST_ID)
    if request_id is not None:
        response.headers[REQUEST_ID_HEADER] = request_id
    info = request.app[SERVICE].client.info
    if info is not None and wants_stages(request):
        response.headers[LAYOUT_HEADER] = info.layout_digest


def _admitting(access: Access) -> Callable[..., Awaitable[web.StreamResponse]]:
    """Return the middleware that checks API keys."""

    @web.middleware
    async def admit(request: web.Request, handler: Handler) -> web.StreamResponse:
        access.check(request)
        return await handler(request)

    return admit
