"""Connections of clients: a deadline for headers, and every error in one shape.

aiohttp waits for headers for as long as they take, and answers what its parser or its dispatcher
refuse as plain text. Knows no path and no application.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from aiohttp import web

from pdserve.errors import BadRequestError, PdserveError, RequestTimeoutError
from pdserve.http.answers import error_answer, error_body, refusal_of
from pdserve.observe.log import log_event

if TYPE_CHECKING:
    from aiohttp.abc import AbstractStreamWriter
    from aiohttp.http import RawRequestMessage
    from aiohttp.streams import StreamReader

_log = logging.getLogger(__name__)

BACKLOG = 2048
"""Connections that may wait to be accepted: a burst of streams arrives at once."""


class ClientConnection(web.RequestHandler):
    """One connection of a client, from its first byte to its last.

    Args:
        header_timeout_s: How long the headers of a request may take from their first byte; of
            the first request, from the connection on.
    """

    __slots__ = ("_has_headers_begun", "_header_timeout_s", "_header_timer", "_is_serving")

    def __init__(self, server: web.Server, *, header_timeout_s: float, **options: Any) -> None:
        super().__init__(server, **options)
        self._header_timeout_s = header_timeout_s
        self._header_timer: asyncio.TimerHandle | None = None
        self._has_headers_begun = False
        self._is_serving = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See the base class."""
        super().connection_made(transport)
        self._expect_headers()

    def connection_lost(self, exc: BaseException | None) -> None:
        """See the base class."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See the base class."""
        if not self._is_serving:
            self._has_headers_begun = True
            if self._header_timer is None:
                self._expect_headers()
        super().data_received(data)

    def request_began(self) -> None:
        """The headers of a request are complete."""
        self._is_serving = True
        self._has_headers_begun = False
        self._stop_timer()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """See the base class."""
        if isinstance(resp, web.HTTPException):
            resp = error_answer(refusal_of(resp, request))
        finished = await super().finish_response(request, resp, start_time)
        self._is_serving = False
        return finished

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what is no HTTP, and what no middleware has caught; then hang up."""
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun: there is no place for an error")
        error: PdserveError
        if status < 500:
            reason = (message or "it cannot be read").strip().split("\n", 1)[0].rstrip(":")
            error = BadRequestError(f"this is no HTTP request: {reason}", code="invalid_http")
        else:
            failed = "request failed"
            log_event(_log, failed, level=logging.ERROR, exc_info=exc, endpoint=request.path)
            error = PdserveError("the server failed; its log has the details")
        answer = error_answer(error)
        answer.force_close()
        return answer

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Log what is a fault of ours; a body that cannot be read has been answered already."""
        if not isinstance(kw.get("exc_info"), web.RequestPayloadError):
            super().log_exception(*args, **kw)

    def _expect_headers(self) -> None:
        loop = asyncio.get_running_loop()
        self._header_timer = loop.call_later(self._header_timeout_s, self._give_up)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _give_up(self) -> None:
        """Hang up; a client that has begun a request is told why."""
        self._header_timer = None
        if self._has_headers_begun and isinstance(self.transport, asyncio.Transport):
            late = RequestTimeoutError(
                f"the headers were not complete within {self._header_timeout_s:g} s"
            )
            self.transport.write(_raw_answer(late))
        self.force_close()


class HttpListener(web.TCPSite):
    """A bound address whose connections are `ClientConnection`s.

    Args:
        runner: Its server handles the requests; it has been set up.
    """

    __slots__ = ("_header_timeout_s",)

    def __init__(
        self, runner: web.AppRunner, host: str, port: int, *, header_timeout_s: float
    ) -> None:
        super().__init__(runner, host, port, backlog=BACKLOG)
        self._header_timeout_s = header_timeout_s

    async def start(self) -> None:
        """Accept connections.

        Raises:
            OSError: The address cannot be bound.
        """
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
            protocol.request_began()
            return make_request(message, payload, protocol, writer, task)

        def connect() -> ClientConnection:
            return ClientConnection(
                server, header_timeout_s=self._header_timeout_s, loop=loop, access_log=None
            )

        server.request_factory = request_began
        self._server = await loop.create_server(
            connect, self._host, self._port, backlog=self._backlog
        )


def _raw_answer(error: PdserveError) -> bytes:
    """An error as bytes, for a request that is none yet."""
    body = error_body(error)
    head = (
        f"HTTP/1.1 {error.status} Request Timeout\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode("ascii") + body
