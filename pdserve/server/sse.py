"""Server-sent events as OpenAI's clients expect them (WHATWG HTML, section 9.2).

A stream that has begun always ends in `[DONE]`, also after an error; only a client that
has gone gets nothing more.
"""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from pdserve.errors import PdserveError
from pdserve.server.errors import error_object, log_internal_error

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Self

    from pdserve.server.job import Delta

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would collect the stream otherwise
}
_DONE = b"data: [DONE]\n\n"
_MARK = uuid.uuid4().hex


class EventStream:
    """One response of events. Entering it sends the headers, leaving it ends the stream.

    An error inside the block becomes an error event. Once the block was entered there is no
    way back to another status, so enter it with the first thing to send at hand.
    """

    def __init__(self, request: web.Request, headers: dict[str, str] | None = None) -> None:
        self._request = request
        self._encoder = msgspec.json.Encoder()
        self._around: dict[int, tuple[bytes, bytes]] = {}
        self.response = web.StreamResponse(headers=_HEADERS | (headers or {}))

    async def __aenter__(self) -> Self:
        await self.response.prepare(self._request)
        return self

    async def send(self, event: dict[str, Any]) -> None:
        """Send one event.

        Raises:
            ConnectionError: The client has gone.
        """
        await self.response.write(b"data: " + self._encoder.encode(event) + b"\n\n")

    async def send_text(self, delta: Delta, chunk_of: Callable[[Delta], dict[str, Any]]) -> None:
        """Send the event for a delta that differs from its choice's others only in its text.

        What stands around the text is encoded once per choice.

        Raises:
            ConnectionError: The client has gone.
        """
        around = self._around.get(delta.index)
        if around is None:
            event = self._encoder.encode(chunk_of(replace(delta, text=_MARK)))
            head, tail = event.split(self._encoder.encode(_MARK))
            around = self._around[delta.index] = (b"data: " + head, tail + b"\n\n")
        await self.response.write(around[0] + self._encoder.encode(delta.text) + around[1])

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if isinstance(error, ConnectionError):
            return True
        if error is not None and not isinstance(error, Exception):
            return False  # cancelled: nobody reads any more
        try:
            if isinstance(error, PdserveError):
                await self.send(error_object(error))
            elif error is not None:
                log_internal_error(self._request, error)
                await self.send(
                    error_object(PdserveError("the server failed; its log has the details"))
                )
            await self.response.write(_DONE)
            await self.response.write_eof()
        except ConnectionError:
            pass
        return True
