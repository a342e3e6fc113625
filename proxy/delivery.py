"""The client side: the middleware of every request, and the delivery of answers.

The middleware gives a request an id, checks its key, and shapes its errors: anything a handler
raises is answered there, in the shape that the clients of its path expect. An answer is one piece,
or a stream that can be resumed. Knows the client's connection and what was sent on it; knows no
engine, and no path's handler.
"""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from typing import TYPE_CHECKING

from aiohttp import web

from pdserve.dialects.paths import error_of
from pdserve.errors import PdserveError
from pdserve.http.access import Access
from pdserve.http.answers import (
    IS_LOGGED,
    StreamAnswer,
    error_answer,
    error_body,
    error_headers,
    is_work,
    refusal_of,
)
from pdserve.observe.log import log_event
from pdserve.observe.request_log import log_refusal
from pdserve.proxy.errors import ClientGoneError, error_event
from pdserve.proxy.relay import SseParser
from pdserve.proxy.replay import Replay, Transcript
from pdserve.wire.hop import REQUEST_ID_HEADER

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.config.http import ProxyConfig
    from pdserve.dialects.answer import Dialect
    from pdserve.http.answers import Handler
    from pdserve.http.bodies import Bodies
    from pdserve.proxy.errors import RefusedError

log = logging.getLogger(__name__)

LAST_WORDS_S = 2.0
"""How long a client may take to read why its stream ends; it may read nothing at all."""
REQUEST_ID_KEY: web.RequestKey[str] = web.RequestKey("request_id", str)
"""Where handlers find the id of the request that they serve."""
_GOOD_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Boundary:
    """The one middleware of a proxy.

    Args:
        bodies: Holds request bodies; a request's is freed when it is over.
    """

    def __init__(self, config: ProxyConfig, bodies: Bodies) -> None:
        self._access = Access(config.api_keys, config.operator_keys)
        self._bodies = bodies

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Give a request an id, check its key, and give every error OpenAI's shape."""
        given = request.headers.get(REQUEST_ID_HEADER, "")
        request_id = given if _GOOD_ID.fullmatch(given) else uuid.uuid4().hex
        request[REQUEST_ID_KEY] = request_id
        try:
            self._access.check(request)
            response = await handler(request)
        except PdserveError as error:
            response = _refuse(request, error)
        except web.HTTPException as error:
            response = _refuse(request, refusal_of(error, request))
        except ClientGoneError:
            response = web.Response(status=499)  # no client is left to receive it
        except Exception as error:  # the top of a request: the proxy goes on
            log_event(
                log,
                "request failed",
                level=logging.ERROR,
                exc_info=error,
                request=request_id,
                endpoint=request.path,
            )
            if request.writer.output_size > 0:
                raise  # the connection cuts an answer that has begun
            failed = "the proxy failed; its log says why, under this request's id"
            response = error_answer(PdserveError(failed))
        finally:
            self._bodies.free(request)
        if not response.prepared:
            if isinstance(response, web.Response) and response.status >= 400:
                _shape(request, response)
            response.headers[REQUEST_ID_HEADER] = request_id
        return response


def _shape(request: web.Request, refusal: web.Response) -> None:
    """Format an error as the clients of this path expect it."""
    if isinstance(body := refusal.body, bytes):
        refusal.body = error_of(request.path, refusal.status, body)


def _refuse(request: web.Request, error: PdserveError) -> web.Response:
    """Answer with an error; log an API request that has no line yet."""
    if is_work(request) and IS_LOGGED not in request:
        log_refusal(request[REQUEST_ID_KEY], request.path, error)
    return error_answer(error)


class Delivery:
    """One client's answer.

    Args:
        dialect: The client's protocol, if it is not the engines'.
        send_timeout_s: How long it may read too little for anything more to be sent. Meanwhile the
            engine's stream is not read, and after as long the engine would hang up.

    Attributes:
        layout: Digest of the layout that the stream began with; None before that, and if its engine
            does not say. Once set, output of engines with another layout is not sent.
        num_swallowed: Number of events of repeated streams that gave the client nothing.
    """

    def __init__(
        self, request: web.Request, dialect: Dialect | None, *, send_timeout_s: float
    ) -> None:
        self._request = request
        self._dialect = dialect
        self._send_timeout_s = send_timeout_s
        self._response: StreamAnswer | None = None
        self._transcript: Transcript | None = None
        self._replay: Replay | None = None
        self._kept: bytes | None = None  # noted as sent; waits for `flush`
        self.layout: str | None = None
        self.num_swallowed = 0

    @property
    def has_begun(self) -> bool:
        """Whether the client has received a status and its first bytes."""
        return self._response is not None

    def begin_again(self) -> None:
        """Swallow what the client already has, as the stream repeats itself from here on.

        Raises:
            DivergedError: What it has is not comparable.
        """
        self._replay = None if self._transcript is None else Replay(self._transcript)

    async def send(self, data: bytes) -> bool:
        """Send whole events; return whether any part was still to be sent.

        Raises:
            ClientGoneError: The client has gone.
            DivergedError: A repeated stream differs from the original.
        """
        is_new = self.offer(data)
        await self.flush()
        return is_new

    def offer(self, data: bytes) -> bool:
        """Do what `send` does as far as the client reads at once, and keep the rest for `flush`.

        Raises:
            DivergedError: A repeated stream differs from the original.
        """
        if self._replay is not None:
            data = self._unsent(self._replay, data)
            if not data:
                return False
        if self._transcript is None:
            self._transcript = Transcript()
        # Noted first: a send cancelled while the client is slow to read has taken place.
        self._transcript.add(data)
        if self._dialect is not None:
            data = self._dialect.events(data)
        if self._kept is not None:
            self._kept += data
        elif self._response is None or not self._response.write_at_once(data):
            self._kept = data
        return True

    @property
    def keeps(self) -> bool:
        """Whether something waits for `flush`."""
        return self._kept is not None

    async def flush(self) -> None:
        """Send what is kept, once the client reads.

        Raises:
            ClientGoneError: The client has gone, or reads too little: then the connection is cut.
        """
        if self._kept is None:
            return
        try:
            async with asyncio.timeout(self._send_timeout_s):
                if self._response is None:
                    self._response = await self._begun()
                data, self._kept = self._kept, None
                if data:
                    await self._response.write(data)
        except ConnectionResetError:
            raise ClientGoneError from None
        except TimeoutError:
            self._cut()
            raise ClientGoneError from None

    async def end(self) -> web.StreamResponse:
        """Close the stream."""
        assert self._response is not None
        try:
            await self._response.write_eof()
        except ConnectionResetError:
            raise ClientGoneError from None
        return self._response

    def whole(self, body: bytes, shown: bytes) -> web.Response:
        """Return an answer in one piece.

        Args:
            body: The engine's, which a dialect reads.
            shown: The same as clients without one get it.
        """
        return self._json(200, shown if self._dialect is None else self._dialect.whole(body), {})

    async def refuse(self, refusal: RefusedError) -> web.StreamResponse:
        """Pass on an engine's refusal of the request.

        Raises:
            ClientGoneError: See `_end_with_error`.
        """
        if self.has_begun:
            return await self._end_with_error(refusal.body)
        again = refusal.retry_after
        headers = {} if again is None else {"Retry-After": again}
        return self._json(refusal.status, refusal.body, headers)

    async def fail(self, error: PdserveError) -> web.StreamResponse:
        """Send the reason why there is no answer, or no more of it.

        Raises:
            ClientGoneError: See `_end_with_error`.
        """
        if self.has_begun:
            return await self._end_with_error(error_body(error))
        return self._json(error.status, error_body(error), error_headers(error))

    def _json(self, status: int, body: bytes, headers: Mapping[str, str]) -> web.Response:
        headers = {**headers, "Content-Type": "application/json"}
        return web.Response(status=status, body=body, headers=headers)

    async def _end_with_error(self, body: bytes) -> web.StreamResponse:
        """Send an error event and the end mark, whatever came before.

        Raises:
            ClientGoneError: The client has gone, or does not read: then the connection is cut.
        """
        self._replay = None
        try:
            async with asyncio.timeout(LAST_WORDS_S):
                await self.send(error_event(body))
                return await self.end()
        except TimeoutError:
            self._cut()
            raise ClientGoneError from None

    def _cut(self) -> None:
        if (transport := self._request.transport) is not None:
            transport.abort()

    async def _begun(self) -> StreamAnswer:
        response = StreamAnswer({REQUEST_ID_HEADER: self._request[REQUEST_ID_KEY]})
        await response.prepare(self._request)
        return response

    def _unsent(self, replay: Replay, data: bytes) -> bytes:
        unsent = [replay.feed(event) for event in SseParser().feed(data)]
        self.num_swallowed += unsent.count(b"")
        if replay.is_over:
            self._replay = None
        return b"".join(unsent)
