"""The client's side of a stream: begun with the first byte, remembered so that it can be resumed.

Knows the client's connection and what went over it; knows no engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from pdserve.proxy.errors import ClientGoneError, error_event
from pdserve.proxy.relay import SseParser
from pdserve.proxy.replay import Replay

if TYPE_CHECKING:
    from collections.abc import Mapping

SSE = "text/event-stream"
RESUMABLE_BYTES = 512 << 10
"""What is remembered of a stream so that it can be begun again; about 2000 tokens."""


class Delivery:
    """One client's stream."""

    def __init__(self, request: web.Request, headers: Mapping[str, str]) -> None:
        self._request = request
        self._headers = headers
        self._response: web.StreamResponse | None = None
        self._sent: list[bytes] = []
        self._sent_bytes = 0
        self._replay: Replay | None = None

    @property
    def has_begun(self) -> bool:
        """Whether the client has a status and its first bytes."""
        return self._response is not None

    @property
    def can_begin_again(self) -> bool:
        """Whether all that was sent is still remembered."""
        return self._sent_bytes <= RESUMABLE_BYTES

    def begin_again(self) -> None:
        """From here on the stream repeats itself: swallow what the client already has."""
        if self._sent:
            self._replay = Replay(self._sent)

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
            await self._response.write(data)
        except ConnectionResetError:
            raise ClientGoneError from None
        self._sent_bytes += len(data)
        if self.can_begin_again:
            self._sent.append(data)
        else:
            self._sent.clear()
        return True

    async def end(self) -> web.StreamResponse:
        """Close the stream."""
        assert self._response is not None
        try:
            await self._response.write_eof()
        except ConnectionResetError:
            raise ClientGoneError from None
        return self._response

    async def end_with_error(self, body: bytes) -> web.StreamResponse:
        """Send an error event and the end mark, whatever came before."""
        self._replay = None
        await self.send(error_event(body))
        return await self.end()

    async def _begin(self) -> None:
        response = web.StreamResponse(
            headers={
                **self._headers,
                "Content-Type": f"{SSE}; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
            }
        )
        await response.prepare(self._request)
        self._response = response

    def _unsent(self, replay: Replay, data: bytes) -> bytes:
        unsent = b"".join([replay.feed(event) for event in SseParser().feed(data)])
        if replay.is_over:
            self._replay = None
        return unsent
