"""Reads request bodies within limits on size, slowness and total memory.

The memory of a body is reserved before it is read, by its declared length or as it grows, and freed
when its request is over. A body that does not fit is refused at once rather than kept waiting. It
must leave as much room as it takes itself, so that large bodies never shut out small ones.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from aiohttp import hdrs, web

from pdserve.errors import (
    BadRequestError,
    BodyTooLargeError,
    MediaTypeError,
    OverloadedError,
    RequestTimeoutError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, MutableMapping

    from pdserve.config.http import HttpLimits

_Holder: TypeAlias = "MutableMapping[Any, Any]"
"""A request, or an object that stands for one."""

COPIES = 3
"""Memory of a body, as a multiple of its size: the body itself and a copy for each of two engines;
while it is read, its pieces and their sum; at an engine, the values parsed from it."""
MIN_BYTES_PER_S = 500
"""A body that is slower than this over a whole time-out is refused."""
_ENCODINGS = frozenset({"", "identity", "gzip", "deflate", "br", "zstd"})
"""What aiohttp reads or, where it lacks the library for it, refuses; others it takes for plain."""
_HELD: web.RequestKey[int] = web.RequestKey("held_bytes", int)


class Bodies:
    """The bodies of all requests of one server.

    Attributes:
        num_held_bytes: Memory that they use, including copies.
    """

    def __init__(self, limits: HttpLimits) -> None:
        self._limits = limits
        self.num_held_bytes = 0

    async def read(self, request: web.Request) -> bytes:
        """Return a request's body; its memory counts until `free`.

        aiohttp would keep it with the request, which the connection keeps until the next request.

        Raises:
            MediaTypeError: It has an unknown encoding.
            BodyTooLargeError: It is, or declares to be, larger than allowed.
            OverloadedError: There is no memory for it now.
            RequestTimeoutError: It is too slow.
            BadRequestError: It does not match its encoding, or is incomplete.
        """
        encoding = request.headers.get(hdrs.CONTENT_ENCODING, "")
        if encoding.strip().lower() not in _ENCODINGS:
            raise MediaTypeError(
                f"Content-Encoding is {encoding!r}: use gzip or deflate, or none",
                param="Content-Encoding",
            )
        self._hold(request, request.content_length or 0)
        pieces: list[bytes] = []
        num_bytes = num_noted = 0
        timeout_s = self._limits.body_timeout_s
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s) as patience:
                while piece := await request.content.readany():
                    pieces.append(piece)
                    num_bytes += len(piece)
                    self._hold(request, num_bytes)
                    if num_bytes - num_noted >= MIN_BYTES_PER_S * timeout_s:
                        num_noted = num_bytes
                        patience.reschedule(loop.time() + timeout_s)
        except TimeoutError:
            raise RequestTimeoutError(
                f"the body did not arrive: after {num_bytes} bytes, fewer than {MIN_BYTES_PER_S} "
                f"came per second for {timeout_s:g} s"
            ) from None
        except web.RequestPayloadError:
            raise BadRequestError(
                "the body does not match its Content-Encoding, or is incomplete"
            ) from None
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def free(self, request: _Holder) -> None:
        """Free the memory of a request that is over."""
        self.num_held_bytes -= request.get(_HELD, 0)
        request[_HELD] = 0

    @contextmanager
    def counted(self) -> Iterator[Callable[[int], None]]:
        """Yield a function that counts a body read elsewhere, given its minimum length.

        It raises the same errors as `read` for size and memory. The block's end frees the body.
        """
        holder: dict[web.RequestKey[int], int] = {}
        try:
            yield partial(self._hold, holder)
        finally:
            self.free(holder)

    def _hold(self, request: _Holder, num_bytes: int) -> None:
        """Count a body with at least this length.

        It must leave as much room as it takes, so that no single body uses all of the memory.

        Raises:
            BodyTooLargeError: It is larger than allowed.
            OverloadedError: There is no memory for it; nothing has changed.
        """
        if num_bytes > self._limits.max_body_bytes:
            raise BodyTooLargeError(
                f"the request body has at least {num_bytes} bytes, and at most "
                f"{self._limits.max_body_bytes} are accepted (--max-body-bytes): send less"
            )
        more = COPIES * num_bytes - request.get(_HELD, 0)
        if more <= 0:
            return
        if self.num_held_bytes + more + COPIES * num_bytes > self._limits.body_memory:
            raise OverloadedError(
                f"there is no memory for a body of {num_bytes} bytes beside those of the running "
                "requests: try again later"
            )
        self.num_held_bytes += more
        request[_HELD] = request.get(_HELD, 0) + more
