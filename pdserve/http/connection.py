"""Client connections: deadlines for headers and for reading, and one format for all errors.

aiohttp alone would wait for headers without limit, and would answer in plain text what its parser
or dispatcher refuses. Knows no path and no application.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import os
import socket
from typing import TYPE_CHECKING, Any

from aiohttp import HttpVersion11, hdrs, web
from aiohttp.http_exceptions import ContentEncodingError, LineTooLong

from pdserve.errors import (
    BadRequestError,
    ConfigError,
    HeadersTooLargeError,
    MediaTypeError,
    PdserveError,
    RequestTimeoutError,
)
from pdserve.http.answers import error_answer, error_body, refusal_of
from pdserve.http.tls import server_context
from pdserve.observe.log import log_event

if TYPE_CHECKING:
    from asyncio.trsock import TransportSocket

    from aiohttp.abc import AbstractStreamWriter
    from aiohttp.http import RawRequestMessage
    from aiohttp.streams import StreamReader

    from pdserve.config.http import HttpConfig, HttpLimits

_log = logging.getLogger(__name__)

BACKLOG = 2048
"""Connections that may wait to be accepted, because a burst of streams can arrive at once."""
_LONGEST_MS = (1 << 31) - 1
"""Of an option of Linux: 25 days."""
_TOO_MANY_HEADERS = "Too many headers"
"""What aiohttp's parser says of them: it has no class for it."""
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class ClientConnection(web.RequestHandler):
    """One connection of a client, from its first byte to its last.

    Args:
        limits: Of them, `header_timeout_s` and `send_timeout_s`.
    """

    __slots__ = ("_body", "_has_headers_begun", "_header_timer", "_is_serving", "_limits")

    def __init__(self, server: web.Server, *, limits: HttpLimits, **options: Any) -> None:
        super().__init__(server, **options)
        self._limits = limits
        self._header_timer: asyncio.TimerHandle | None = None
        self._has_headers_begun = False
        self._is_serving = False
        self._body: StreamReader | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See the base class."""
        super().connection_made(transport)
        # The kernel ends a connection whose client is gone without a word, or reads nothing more.
        timeout_ms = math.ceil(min(self._limits.send_timeout_s * 1e3, _LONGEST_MS))
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
        self._expect_headers()

    def connection_lost(self, exc: BaseException | None) -> None:
        """See the base class."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See the base class."""
        # An answer may come before its request's body, which is then read and dropped.
        is_body = self._body is not None and not self._body.is_eof()
        if data and not self._is_serving and not is_body:
            self._has_headers_begun = True
            if self._header_timer is None:
                self._expect_headers()
        super().data_received(data)

    def request_began(self, body: StreamReader) -> None:
        """Handle a request whose headers are complete."""
        self._is_serving = True
        self._body = body
        self._has_headers_begun = False
        self._stop_timer()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """See the base class."""
        if isinstance(resp, web.HTTPException):
            resp = error_answer(refusal_of(resp, request))
        finished = await super().finish_response(request, resp, start_time)
        sent = finished[0]
        if request.version < HttpVersion11 and sent.content_length is None:
            sent.force_close()  # such a body has no other end, and aiohttp would keep it open
        self._is_serving = False
        return finished

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer bytes that are not HTTP, and errors that no middleware caught; then hang up."""
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has already started, so no error can be sent")
        error: PdserveError
        if isinstance(exc, ContentEncodingError):
            error = MediaTypeError(
                "the body's Content-Encoding cannot be read here: use gzip or deflate, or none",
                param="Content-Encoding",
            )
        elif isinstance(exc, LineTooLong):
            error = HeadersTooLargeError(
                f"a header or the request line is longer than {exc.args[1]} bytes"
            )
        elif (message or "").startswith(_TOO_MANY_HEADERS):
            error = HeadersTooLargeError("the request has too many headers")
        elif isinstance(exc, UnicodeEncodeError) and hdrs.EXPECT in request.headers:
            # aiohttp refuses an unknown expectation in its own words, which cannot be encoded.
            error = refusal_of(web.HTTPExpectationFailed(), request)
        elif status < 500:
            reason = (message or "it cannot be read").strip().split("\n", 1)[0].rstrip(":")
            error = BadRequestError(f"this is not an HTTP request: {reason}", code="invalid_http")
        else:
            failed = "request failed"
            log_event(_log, failed, level=logging.ERROR, exc_info=exc, endpoint=request.path)
            error = PdserveError("the server failed: its log has the details")
        answer = error_answer(error)
        answer.force_close()
        return answer

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Log our own faults; an unreadable body has already been answered."""
        if not isinstance(kw.get("exc_info"), web.RequestPayloadError):
            super().log_exception(*args, **kw)

    def _expect_headers(self) -> None:
        loop = asyncio.get_running_loop()
        self._header_timer = loop.call_later(self._limits.header_timeout_s, self._give_up)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _give_up(self) -> None:
        """Hang up; tell a client that has started a request why."""
        self._header_timer = None
        if self._has_headers_begun and isinstance(self.transport, asyncio.Transport):
            late = RequestTimeoutError(
                f"the headers were not complete within {self._limits.header_timeout_s:g} s"
            )
            self.transport.write(_raw_answer(late))
        self.force_close()


class HttpListener(web.TCPSite):
    """A bound address whose connections are `ClientConnection`s.

    Args:
        runner: Its server handles the requests; it has been set up.
        config: Address, TLS, limits, and the prefix of paths.
    """

    __slots__ = ("_config", "_is_leaving", "_spare")

    def __init__(self, runner: web.AppRunner, config: HttpConfig) -> None:
        super().__init__(runner, config.host, config.port, backlog=BACKLOG)
        self._config = config
        self._spare = _SpareDescriptor()
        self._is_leaving = False

    async def start(self) -> None:
        """Accept connections.

        Raises:
            ConfigError: The address cannot be bound, or a TLS file cannot be used.
        """
        config = self._config
        tls = await asyncio.to_thread(server_context, config.tls)
        await web.BaseSite.start(self)
        server = self._runner.server
        assert server is not None
        make_request = server.request_factory
        loop = asyncio.get_running_loop()

        def request_began(
            message: RawRequestMessage,
            payload: StreamReader,
            protocol: web.RequestHandler,
            writer: AbstractStreamWriter,
            task: asyncio.Task[None],
        ) -> web.BaseRequest:
            assert isinstance(protocol, ClientConnection)
            protocol.request_began(payload)
            return make_request(self._as_served(message), payload, protocol, writer, task)

        limits = config.limits

        def connect() -> ClientConnection:
            return ClientConnection(server, limits=limits, loop=loop, access_log=None)

        server.request_factory = request_began
        loop.set_exception_handler(self._spare.on_loop_error)
        host = None if config.host in ("", "::") else config.host  # of both families, as in vLLM
        try:
            self._server = await loop.create_server(
                connect,
                host,
                config.port or (_free_port() if host is None else 0),
                backlog=BACKLOG,
                ssl=tls,
                ssl_handshake_timeout=None if tls is None else limits.header_timeout_s,
            )
        except OSError as error:
            raise _bind_error(config.host, config.port, error) from error

    async def stop(self) -> None:
        """Accept no more connections."""
        await super().stop()
        self._spare.close()

    @property
    def url(self) -> str:
        """The URL at which it listens."""
        host = self._config.host or "0.0.0.0"
        port = self._runner.addresses[0][1]
        scheme = "https" if self._config.tls.certfile else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    def leave(self) -> None:
        """Close each connection after its next answer, which announces it."""
        self._is_leaving = True

    def _as_served(self, message: RawRequestMessage) -> RawRequestMessage:
        """Return a request as if no reverse proxy were in front of this server."""
        root = self._config.root_path
        path = message.url.raw_path
        if root and path.startswith(f"{root}/"):
            url = message.url.with_path(path.removeprefix(root), encoded=True, keep_query=True)
            message = message._replace(url=url)
        return message._replace(should_close=True) if self._is_leaving else message


class _SpareDescriptor:
    """Kept to hang up on clients while no other descriptor is free.

    asyncio alone would let them wait, and would try to accept them `BACKLOG` times a second or
    more, each time with a stack trace in the log, while every stream stands still.
    """

    def __init__(self) -> None:
        self._descriptor = -1
        self._open()

    def close(self) -> None:
        """Give it back."""
        with contextlib.suppress(OSError):
            os.close(self._descriptor)
        self._descriptor = -1

    def on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle an error of the event loop: hang up on all who wait if it could not accept one."""
        error, listening = context.get("exception"), context.get("socket")
        if listening is None or not isinstance(error, OSError) or error.errno not in _EXHAUSTED:
            loop.default_exception_handler(context)
            return
        self.close()
        if num_refused := _hang_up_on_waiting(listening):
            event = "connections refused"
            log_event(_log, event, level=logging.WARNING, num=num_refused, reason=error.strerror)
        # Not before asyncio sees that nobody waits: Linux takes the descriptor before it looks.
        loop.call_soon(self._open)

    def _open(self) -> None:
        with contextlib.suppress(OSError):  # another thread may have been faster
            self._descriptor = os.open(os.devnull, os.O_RDONLY)


def _hang_up_on_waiting(listening: TransportSocket) -> int:
    """Return the number of connections to a non-blocking socket that were accepted and closed."""
    num = 0
    ours = socket.socket(listening.family, listening.type, fileno=listening.fileno())
    with contextlib.suppress(OSError):  # nobody waits, or still no descriptor is free
        while num < BACKLOG:
            ours.accept()[0].close()
            num += 1
    ours.detach()
    return num


def _free_port() -> int:
    """Return a free port for both families: without one, each would take a port of its own."""
    with socket.create_server(("", 0)) as probe:
        return int(probe.getsockname()[1])


def _bind_error(host: str, port: int, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"--port is {port}, which is in use on {host}: choose another port", param="port"
        )
    return ConfigError(
        f"cannot listen on {host}:{port} ({error.strerror or error}): check --host and --port",
        param="host",
    )


def _raw_answer(error: PdserveError) -> bytes:
    """Return an error as bytes, for a request that is not complete."""
    body = error_body(error)
    head = (
        f"HTTP/1.1 {error.status} Request Timeout\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode("ascii") + body
