"""The proxy's process: its HTTP endpoints, its background work, its beginning and its end.

Knows which path is served by what. How a request is served is `flow`'s; which engines there
are is `backends`'s. The proxy is stateless: a restarted one learns its engines again from its
command line and from their registrations.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import logging
import random
import re
import secrets
import signal
import uuid
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from aiohttp import hdrs, web

import pdserve
from pdserve.config.schema import Role
from pdserve.errors import (
    BadRequestError,
    BodyTooLargeError,
    ConfigError,
    HandshakeError,
    InternalError,
    NotFoundError,
    PdserveError,
    UnauthorizedError,
    UnavailableError,
    UpstreamError,
)
from pdserve.observe.clock import SystemClock
from pdserve.observe.log import log_event
from pdserve.observe.metrics import CONTENT_TYPE, measure_loop_lag
from pdserve.observe.trace_query import trace_query
from pdserve.proxy.admission import Admission
from pdserve.proxy.backends import Backends, Deregistration, Health, Registration
from pdserve.proxy.bodies import ClientBody
from pdserve.proxy.client import AUTH_HEADER, EngineHttp, signature
from pdserve.proxy.dashboard.handlers import Dashboard
from pdserve.proxy.errors import (
    ClientGoneError,
    RefusedError,
    WorkerError,
    error_body,
    error_headers,
)
from pdserve.proxy.flow import Flow
from pdserve.proxy.heap import keep_flat
from pdserve.proxy.keys import CHALLENGE, is_for_people, is_known, needs_key
from pdserve.proxy.legs import DEADLINE_HEADER, Services
from pdserve.proxy.metrics import Metrics
from pdserve.proxy.recent import Recent
from pdserve.proxy.routing import Router
from pdserve.proxy.story import Story
from pdserve.proxy.trace import Tracer
from pdserve.wire.finished import NUM_KEPT

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from pdserve.config.schema import ProxyConfig
    from pdserve.observe.clock import Clock
    from pdserve.proxy.backends import Backend

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

Message = TypeVar("Message")

log = logging.getLogger(__name__)

REQUEST_ID = "X-Request-Id"
_GOOD_ID = re.compile(r"[\x21-\x7e]{1,128}")
BACKLOG = 2048
"""Connections that may wait to be accepted: a burst of streams arrives at once."""
_RELEASE_TIMEOUT_S = 5.0
_MAX_REFUSALS = 1000
"""Refused engines that are remembered: their number is up to whoever sends registrations."""
_REQUEST_ID_KEY: web.RequestKey[str] = web.RequestKey("request_id", str)


async def run_proxy(config: ProxyConfig, *, on_ready: Callable[[str], None]) -> signal.Signals:
    """Serve until SIGINT or SIGTERM; return which one it was.

    What runs may finish within the shutdown timeout; a second signal cuts it off.

    Args:
        on_ready: Called with the base URL once connections are accepted.

    Raises:
        ConfigError: The address cannot be bound, or a setting names nothing that exists.
    """
    loop = asyncio.get_running_loop()
    received: list[signal.Signals] = []
    stopped, insisted = asyncio.Event(), asyncio.Event()

    def receive(number: signal.Signals) -> None:
        (insisted if received else stopped).set()
        received.append(number)

    proxy = Proxy(config)
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, receive, number)
    try:
        on_ready(await proxy.start())
        keep_flat()
        await stopped.wait()
    finally:
        await proxy.stop(cut=insisted)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
    return received[0]


class Proxy:
    """One proxy: start it, let it serve, stop it.

    Args:
        clock: Measures requests and leases.
        rng: Draws the seeds of requests that bring none.
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
        self._rng = rng or random.SystemRandom()
        self._http = EngineHttp(secret=config.secret)
        self.metrics = Metrics()
        self.backends = Backends(config, self._http, self._clock, self._engine_headers({}))
        self.admission = Admission(
            config.max_concurrent_requests, config.queue_size, config.queue_timeout_s
        )
        self._router = Router(config, self.backends)
        self._services = Services(
            config=config,
            http=self._http,
            backends=self.backends,
            router=self._router,
            admission=self.admission,
            metrics=self.metrics,
            new_nonce=new_nonce,
        )
        self.recent = Recent()
        self._tracer = Tracer(self._http, self._clock, self.recent)
        self.dashboard = Dashboard(
            config,
            self.backends,
            self._http,
            self._clock,
            recent=self.recent,
            exposition=self._exposition,
            headers=self._engine_headers({}),
        )
        self._refusals: dict[str, str] = {}
        self._live: dict[int, Story] = {}
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._is_draining = False
        self._runner: web.AppRunner | None = None
        self._lag_task: asyncio.Task[None] | None = None

    # --- life cycle

    async def start(self) -> str:
        """Check the engines once and accept connections; return the base URL.

        Raises:
            ConfigError: The address cannot be bound.
        """
        runner = self._runner = web.AppRunner(
            self._app(),
            handler_cancellation=True,  # or a client that leaves would go unnoticed
            access_log=None,
            shutdown_timeout=0.1,  # `stop` has waited for them already
        )
        await runner.setup()
        host, port = self._config.host, self._config.port
        try:
            await web.TCPSite(runner, host, port, backlog=BACKLOG).start()
        except OSError as error:
            await self.stop()
            raise _bind_error(host, port, error) from error
        self._lag_task = asyncio.create_task(measure_loop_lag(self.metrics.loop_lag, self._clock))
        await self.backends.start()
        bound_port = runner.addresses[0][1]
        return f"http://{f'[{host}]' if ':' in host else host}:{bound_port}"

    async def stop(self, *, cut: asyncio.Event | None = None) -> None:
        """Refuse what is asked from now on, finish what runs, give leases back, close.

        Args:
            cut: Once set, what still runs is cut off.
        """
        self._is_draining = True
        ends = [asyncio.create_task(self._is_idle.wait())]
        if cut is not None:
            ends.append(asyncio.create_task(cut.wait()))
        await asyncio.wait(
            ends,
            timeout=self._config.shutdown_timeout_s,
            return_when=asyncio.FIRST_COMPLETED,
        )
        for end in ends:
            end.cancel()
        if self._live:
            log_event(log, "requests cut off", level=logging.WARNING, num=len(self._live))
        if self._runner is not None:
            await self._runner.cleanup()
        await self.dashboard.stop()
        await self.backends.stop()
        if self._lag_task is not None:
            self._lag_task.cancel()
            await asyncio.gather(self._lag_task, return_exceptions=True)
        await self._http.close(_RELEASE_TIMEOUT_S)

    @property
    def num_background_tasks(self) -> int:
        """Releases and drains under way."""
        return len(self._http.background)

    def _app(self) -> web.Application:
        app = web.Application(
            client_max_size=self._config.max_body_bytes, middlewares=[self._boundary]
        )
        app.add_routes(
            [
                web.post("/v1/completions", self._generate),
                web.post("/v1/chat/completions", self._generate),
                web.post("/tokenize", self._forward),
                web.post("/detokenize", self._forward),
                web.post("/reset_prefix_cache", self._reset_prefix_cache),
                web.get("/v1/models", self._models),
                web.get("/v1/models/{model:.+}", self._model),
                web.get("/health", self._alive),
                web.get("/livez", self._alive),
                web.get("/readyz", self._readyz),
                web.get("/metrics", self._metrics_page),
                web.get("/version", self._version),
                web.get("/debug/requests", self._debug_requests),
                web.get("/debug/trace", self._debug_trace),
                *self.dashboard.routes(),
                web.post("/pdserve/register", self._register),
                web.delete("/pdserve/register", self._deregister),
            ]
        )
        return app

    # --- what every request passes through

    @web.middleware
    async def _boundary(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Give every request an id, check its key, and every error OpenAI's shape."""
        given = request.headers.get(REQUEST_ID, "")
        request_id = given if _GOOD_ID.fullmatch(given) else uuid.uuid4().hex
        request[_REQUEST_ID_KEY] = request_id
        try:
            if needs_key(request.path):
                self._check_key(request)
            response = await handler(request)
        except PdserveError as error:
            response = _error_response(error)
            if isinstance(error, UnauthorizedError) and is_for_people(request.path):
                response.headers[hdrs.WWW_AUTHENTICATE] = CHALLENGE
        except web.HTTPException as error:
            response = _error_response(_from_http(request, error, self._config.max_body_bytes))
            if error.status == 405:
                response.set_status(405)
                response.headers[hdrs.ALLOW] = error.headers.get(hdrs.ALLOW, "")
        except web.RequestPayloadError:
            unreadable = BadRequestError("the body is not in its encoding, or was cut off")
            response = _error_response(unreadable)
        except ClientGoneError:
            response = web.Response(status=499)  # written to nobody
        except Exception:
            log.exception("request failed: request=%s path=%s", request_id, request.path)
            response = _error_response(PdserveError("the proxy failed; its log says why"))
        if not response.prepared:
            response.headers[REQUEST_ID] = request_id
        return response

    def _check_key(self, request: web.Request) -> None:
        given = request.headers.get(hdrs.AUTHORIZATION, "")
        if not is_known(given, self._config.api_keys, request.path):
            raise UnauthorizedError("the API key is missing or wrong")

    def _engine_headers(self, client: Mapping[str, str]) -> dict[str, str]:
        """Headers for the engines: the deployment's key, or the client's where it has none."""
        if self._config.api_keys:
            return {hdrs.AUTHORIZATION: f"Bearer {self._config.api_keys[0]}"}
        # One that is not ASCII is no key, and could not be sent on.
        if client.get(hdrs.AUTHORIZATION, "\x80").isascii():
            return {hdrs.AUTHORIZATION: client[hdrs.AUTHORIZATION]}
        return {}

    # --- generation

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        request_id = request[_REQUEST_ID_KEY]
        story = Story(request_id, request.path, self._clock)
        deadline_s = self._clock.wall_s() + self._config.request_timeout_s
        outcome = "error"
        self._live[id(story)] = story
        self._is_idle.clear()
        try:
            if self._is_draining:
                outcome = "shed"
                raise UnavailableError("this proxy is shutting down", retry_after_s=1.0)
            try:
                body = ClientBody(
                    await request.read(),
                    created=int(self._clock.wall_s()),
                    fallback_seed=self._rng.getrandbits(48),
                )
            except (PdserveError, web.HTTPException, web.RequestPayloadError):
                outcome = "client_error"
                raise
            story.streamed = body.stream
            flow = Flow(
                self._services,
                request,
                body,
                story,
                headers={
                    **self._engine_headers(request.headers),
                    hdrs.CONTENT_TYPE: "application/json",
                    REQUEST_ID: request_id,
                    "X-Pdserve-Stages": "1",
                    DEADLINE_HEADER: f"{deadline_s:.3f}",
                },
                reply_headers={REQUEST_ID: request_id},
            )
            response = await flow.run()
            outcome = flow.outcome
            return response
        except (ClientGoneError, asyncio.CancelledError):
            outcome = "disconnected"
            self.metrics.disconnects.labels(story.stage.value).inc()
            raise
        finally:
            del self._live[id(story)]
            if not self._live:
                self._is_idle.set()
            self.metrics.requests.labels(outcome).inc()
            if outcome == "ok":
                self.metrics.observe(story)
            log.info("%s", self.recent.add(story, outcome).line)

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        """Ask any engine; a failing one is replaced by another."""
        body = await request.read()
        headers = {
            **self._engine_headers(request.headers),
            hdrs.CONTENT_TYPE: "application/json",
            REQUEST_ID: request[_REQUEST_ID_KEY],
        }
        failed: set[Backend] = set()
        for attempt in range(self._config.retry_max_retries + 1):
            engine = self._router.any_engine(failed)
            leg = self._http.leg(f"{engine.url}{request.path}", body, headers)
            try:
                with self.backends.use(engine, leg) as use:
                    content_type = await leg.open()
                    answer = await leg.read()
                    use.ok()
                return web.Response(body=answer, content_type=content_type)
            except RefusedError as refusal:
                refused = web.Response(
                    status=refusal.status, body=refusal.body, content_type="application/json"
                )
                if refusal.retry_after is not None:
                    refused.headers[hdrs.RETRY_AFTER] = refusal.retry_after
                return refused
            except WorkerError as failure:
                self.metrics.leg_failures.labels("forward", failure.reason).inc()
                if attempt == self._config.retry_max_retries:
                    raise
                failed.add(engine)
                self.metrics.retries.labels("forward").inc()
            finally:
                leg.close()
        raise InternalError("the last attempt returns or raises")

    # --- models

    def _known_models(self) -> list[dict[str, Any]]:
        """The engines' models, each once; the shortest context of those that serve it."""
        merged: dict[str, dict[str, Any]] = {}
        for backend in self.backends:
            for model in backend.models:
                known = merged.setdefault(model["id"], dict(model))
                lengths = [known.get("max_model_len"), model.get("max_model_len")]
                known["max_model_len"] = min((n for n in lengths if n is not None), default=None)
        return list(merged.values())

    async def _models(self, request: web.Request) -> web.Response:
        return _json({"object": "list", "data": self._known_models()})

    async def _model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        for model in self._known_models():
            if model["id"] == name:
                return _json(model)
        raise NotFoundError(
            f"the model {name!r} does not exist", param="model", code="model_not_found"
        )

    # --- operations

    async def _alive(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _readyz(self, request: web.Request) -> web.Response:
        if self._is_draining:
            raise UnavailableError("this proxy is shutting down", retry_after_s=1.0)
        if (reason := self._router.readiness()) is not None:
            raise UnavailableError(reason, retry_after_s=1.0)
        counts = self.backends.count()
        engines = {role.value: counts[role.value, Health.READY.value] for role in Role}
        return _json({"status": "ready", "engines": engines})

    async def _metrics_page(self, request: web.Request) -> web.Response:
        return web.Response(body=self._exposition(), headers={hdrs.CONTENT_TYPE: CONTENT_TYPE})

    def _exposition(self) -> bytes:
        return self.metrics.exposition(
            backends=self.backends.count(),
            open_edges=self.backends.open_edges(),
            running=self.admission.num_running,
            waiting=self.admission.num_waiting,
            stages=[story.stage for story in self._live.values()],
        )

    async def _reset_prefix_cache(self, request: web.Request) -> web.Response:
        """Have every engine forget its cached prefixes, so that runs do not find each other's."""
        engines = list(self.backends)
        if not engines:
            raise UnavailableError("this proxy knows no engine", retry_after_s=1.0)
        headers = self._engine_headers(request.headers)
        path = f"/reset_prefix_cache?{request.query_string}".removesuffix("?")
        failures = await asyncio.gather(
            *(self._http.post_empty(f"{engine.url}{path}", headers) for engine in engines)
        )
        if told := [failure for failure in failures if failure is not None]:
            raise UpstreamError(f"not every engine forgot its prefixes: {'; '.join(told)}")
        return web.Response()

    async def _version(self, request: web.Request) -> web.Response:
        return _json({"version": pdserve.__version__})

    async def _debug_requests(self, request: web.Request) -> web.Response:
        """What runs; and with `?finished=N` the newest N that ended, those after `&after=SEQ`."""
        running = [story.as_json() for story in self._live.values()]
        finished = self.recent.as_json(
            _number_in(request, "finished", NUM_KEPT), after_seq=_number_in(request, "after")
        )
        return _json({"running": running, "finished": msgspec.Raw(finished)})

    async def _debug_trace(self, request: web.Request) -> web.Response:
        """The last `?seconds=N` of this proxy and of all engines."""
        query = trace_query(request.query)
        collection = await self._tracer.collect(
            query.seconds,
            engines=[backend.url for backend in self.backends],
            running=self._live.values(),
            headers=self._engine_headers(request.headers),
        )
        body = await asyncio.to_thread(query.encode, collection)
        return web.Response(body=body, content_type="application/json")

    # --- registration

    async def _register(self, request: web.Request) -> web.Response:
        registration = await self._signed(request, Registration)
        try:
            self.backends.register(registration)
        except HandshakeError as error:
            # The engine goes on asking: once is enough.
            if self._refusals.get(registration.url) != error.message:
                if len(self._refusals) >= _MAX_REFUSALS:
                    self._refusals.clear()
                self._refusals[registration.url] = error.message
                log_event(
                    log,
                    "registration refused",
                    level=logging.ERROR,
                    engine=registration.url,
                    reason=error.message,
                )
            return _error_response(error, status=409)
        self._refusals.pop(registration.url, None)
        return _json({"lease_s": registration.lease_s})

    async def _deregister(self, request: web.Request) -> web.Response:
        self.backends.deregister((await self._signed(request, Deregistration)).url)
        return _json({})

    async def _signed(self, request: web.Request, type_: type[Message]) -> Message:
        """Read a message that only the deployment's own parts may send.

        Raises:
            UnauthorizedError: Its signature is not made with the deployment's secret.
            BadRequestError: It is not such a message.
        """
        body = await request.read()
        if self._config.secret:
            offered = request.headers.get(AUTH_HEADER, "").encode("utf-8", "surrogateescape")
            expected = signature(self._config.secret, body).encode()
            if not hmac.compare_digest(offered, expected):
                raise UnauthorizedError(
                    f"{AUTH_HEADER} does not fit: engine and proxy need the same secret, given to "
                    "both as PDSERVE_SECRET",
                    code="invalid_signature",
                )
        try:
            return msgspec.json.decode(body, type=type_)
        except msgspec.MsgspecError as error:
            raise BadRequestError(f"the registration cannot be read: {error}") from None


def _number_in(request: web.Request, name: str, largest: int | None = None) -> int:
    """Return a number of the query; 0 without it, `largest` for more than that.

    Raises:
        BadRequestError: It is none, or below 0.
    """
    given = request.query.get(name, "0")
    if not (given.isascii() and given.isdecimal() and len(given) <= 18):
        raise BadRequestError(f"{name} is {given!r}: a whole number is needed", param=name)
    return int(given) if largest is None else min(int(given), largest)


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def _error_response(error: PdserveError, *, status: int | None = None) -> web.Response:
    return web.Response(
        status=status or error.status,
        body=error_body(error),
        headers=error_headers(error),
        content_type="application/json",
    )


def _from_http(request: web.Request, error: web.HTTPException, max_bytes: int) -> PdserveError:
    """Say in OpenAI's shape what aiohttp found wrong with a request."""
    match error.status:
        case 404:
            return NotFoundError(
                f"there is no {request.path} here; the OpenAI API is under /v1, "
                "for example /v1/chat/completions"
            )
        case 405:
            return BadRequestError(
                f"{request.path} does not take {request.method}", code="method_not_allowed"
            )
        case 413:
            return BodyTooLargeError(f"the body is larger than {max_bytes} bytes")
        case _:
            return BadRequestError(error.reason)


def _bind_error(host: str, port: int, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"port {port} on {host} is in use: choose another one with --port", param="port"
        )
    return ConfigError(
        f"cannot listen on {host}:{port} ({error.strerror or error}): see --host and --port",
        param="host",
    )
