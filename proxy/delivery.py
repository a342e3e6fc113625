"""The client's side of a request: an answer in one piece, or a stream that can be resumed.

Knows the client's connection and what went over it; knows no engine.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiohttp import web

from pdserve.http.answers import StreamAnswer, error_body, error_headers
from pdserve.proxy.boundary import REQUEST_ID_KEY
from pdserve.proxy.errors import ClientGoneError, error_event
from pdserve.proxy.relay import SseParser
from pdserve.proxy.replay import Replay, Transcript
from pdserve.wire.hop import REQUEST_ID_HEADER

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.dialects.answer import Dialect
    from pdserve.errors import PdserveError
    from pdserve.proxy.errors import RefusedError

LAST_WORDS_S = 2.0
"""How long a client may take to read why its stream ends; it may read nothing at all."""


class Delivery:
    """One client's answer.

    Args:
        dialect: What the client speaks in place of the engines' protocol.

    Attributes:
        layout: Digest of the layout that the stream began with; None before that, and if its engine
            does not say. Nothing of engines with another one is sent then.
        num_swallowed: Events of repeated streams that gave the client nothing.
    """

    def __init__(self, request: web.Request, dialect: Dialect | None = None) -> None:
        self._request = request
        self._dialect = dialect
        self._response: web.StreamResponse | None = None
        self._transcript = Transcript()
        self._replay: Replay | None = None
        self.layout: str | None = None
        self.num_swallowed = 0

    @property
    def has_begun(self) -> bool:
        """Whether the client has a status and its first bytes."""
        return self._response is not None

    def begin_again(self) -> None:
        """Swallow what the client already has: from here on the stream repeats itself.

        Raises:
            DivergedError: What it has cannot be compared with anything.
        """
        self._replay = Replay(self._transcript) if self.has_begun else None

    async def send(self, data: bytes) -> bool:
        """Send whole events; tell whether any of it was left to send.

        Raises:
            ClientGoneError: Nobody listens.
            DivergedError: A repeated stream is another one than was begun.
        """
        if self._replay is not None:
            data = self._unsent(self._replay, data)
            if not data:
                return False
        try:
            if self._response is None:
                await self._begin()
            assert self._response is not None
            # Noted first: whoever is cancelled while the client is slow to read has sent it.
            self._transcript.add(data)
            if self._dialect is not None:
                data = self._dialect.events(data)
            if data:
                await self._response.write(data)
        except ConnectionResetError:
            raise ClientGoneError from None
        return True

    async def end(self) -> web.StreamResponse:
        """Close the stream."""
        assert self._response is not None
        try:
            await self._response.write_eof()
        except ConnectionResetError:
            raise ClientGoneError from None
        return self._response

    def whole(self, body: bytes) -> web.Response:
        """Return an answer in one piece."""
        return self._json(200, body if self._dialect is None else self._dialect.whole(body), {})

    async def refuse(self, refusal: RefusedError) -> web.StreamResponse:
        """Pass on what an engine says against the request.

        Raises:
            ClientGoneError: See `_end_with_error`.
        """
        if self.has_begun:
            return await self._end_with_error(refusal.body)
        again = refusal.retry_after
        headers = {} if again is None else {"Retry-After": again}
        return self._json(refusal.status, refusal.body, headers)

    async def fail(self, error: PdserveError) -> web.StreamResponse:
        """Say why there is no answer, or no more of it.

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
            ClientGoneError: Nobody listens, or nobody reads: then the connection is cut.
        """
        self._replay = None
        try:
            async with asyncio.timeout(LAST_WORDS_S):
                await self.send(error_event(body))
                return await self.end()
        except TimeoutError:
            if (transport := self._request.transport) is not None:
                transport.abort()
            raise ClientGoneError from None

    async def _begin(self) -> None:
        response = StreamAnswer({REQUEST_ID_HEADER: self._request[REQUEST_ID_KEY]})
        await response.prepare(self._request)
        self._response = response

    def _unsent(self, replay: Replay, data: bytes) -> bytes:
        unsent = [replay.feed(event) for event in SseParser().feed(data)]
        self.num_swallowed += unsent.count(b"")
        if replay.is_over:
            self._replay = None
        return b"".join(unsent)
