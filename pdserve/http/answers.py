"""Values and errors as HTTP answers: every error has the same shape.

Knows OpenAI's error object, but neither clients nor requests.
"""

from __future__ import annotations

import math
from http import HTTPStatus
from typing import TYPE_CHECKING, TypeAlias

import msgspec
from aiohttp import HttpVersion11, hdrs, web

from pdserve.errors import (
    BadRequestError,
    BodyTooLargeError,
    NotFoundError,
    PdserveError,
    UnauthorizedError,
)
from pdserve.http.pooling_bodies import POOLING
from pdserve.wire.hop import NONCE_HEADER

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable, Mapping

    from aiohttp.abc import AbstractStreamWriter

Handler: TypeAlias = "Callable[[web.Request], Awaitable[web.StreamResponse]]"
"""What a middleware stands before."""
SSE = "text/event-stream"
_TEMPORARY = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)

IS_LOGGED: web.RequestKey[bool] = web.RequestKey("is_logged", bool)
"""Set if the handler of a request logs its end."""


def is_work(request: web.BaseRequest) -> bool:
    """Whether a request is for work, which always has a line in the log."""
    return request.method == "POST" and request.path.startswith(("/v1/", *POOLING))


class MethodNotAllowedError(NotFoundError):
    """The path exists, but not for this method.

    Args:
        allowed: The methods it exists for, as the Allow header lists them (RFC 9110, 15.5.6).
    """

    status = 405
    code = "method_not_allowed"

    def __init__(self, message: str, *, allowed: str) -> None:
        super().__init__(message)
        self.allowed = allowed


class ExpectationError(BadRequestError):
    """The Expect header asks for something unsupported."""

    status = 417
    code = "expectation_failed"


class StaleProofError(UnauthorizedError):
    """The proof of a request is no longer valid, or not yet.

    Args:
        nonce: The nonce for the next proof.
    """

    code = "stale_signature"

    def __init__(self, *, nonce: str) -> None:
        super().__init__("the proof was already used, or was made before this server restarted")
        self.nonce = nonce


class StreamAnswer(web.StreamResponse):
    """A stream of events whose headers wait for the first bytes, and leave in the same packet.

    Sent separately they take two system calls here and two wake-ups of the reader, which on a busy
    machine runs between the two.
    """

    _send_headers_immediately = False

    def __init__(self, headers: Mapping[str, str] | None = None) -> None:
        self._transport: asyncio.Transport | None = None
        self._has_begun = False
        super().__init__(
            headers={
                **(headers or {}),
                hdrs.CONTENT_TYPE: f"{SSE}; charset=utf-8",
                hdrs.CACHE_CONTROL: "no-cache",
                "X-Accel-Buffering": "no",  # nginx would collect the stream otherwise
            }
        )

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """See the base class."""
        if request.version >= HttpVersion11:
            self.enable_chunked_encoding()
        self._transport = request.transport
        return await super().prepare(request)

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """See the base class."""
        if not isinstance(data, bytes) or not self.write_at_once(data):
            self._has_begun = True
            await super().write(data)

    def write_at_once(self, data: bytes) -> bool:
        """Write a chunk if the client keeps up with reading; return whether it was written.

        The first bytes are not for it: the headers go with them. It skips the base class's count
        of unread bytes, since the transport has one.
        """
        transport = self._transport
        if not self._has_begun or transport is None or transport.is_closing():
            return False
        if transport.get_write_buffer_size():
            return False
        if data:
            transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self.chunked else data)
        return True


def json_answer(value: object) -> web.Response:
    """Return `value` as JSON."""
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def error_answer(error: PdserveError, *, status: int | None = None) -> web.Response:
    """Return an error in OpenAI's shape, under its own status unless another is given."""
    return web.Response(
        status=status or error.status,
        body=error_body(error),
        headers=error_headers(error),
        content_type="application/json",
    )


def error_body(error: PdserveError) -> bytes:
    """Return `{"error": {...}}` as JSON."""
    return msgspec.json.encode(error_object(error))


def error_object(error: PdserveError) -> dict[str, dict[str, str | None]]:
    """Return an error as the API shows it."""
    return {
        "error": {
            "message": error.message,
            "type": error.type,
            "param": error.param,
            "code": error.error_code,
        }
    }


def error_headers(error: PdserveError) -> dict[str, str]:
    """Return the headers that go with an error.

    Retry-After is in whole seconds, at least 1. Each 429 and 503 has one: 1 if nothing better is
    known.
    """
    headers: dict[str, str] = {}
    if error.retry_after_s is not None or error.status in _TEMPORARY:
        headers[hdrs.RETRY_AFTER] = str(max(1, math.ceil(error.retry_after_s or 0)))
    if isinstance(error, MethodNotAllowedError):
        headers[hdrs.ALLOW] = error.allowed
    if isinstance(error, UnauthorizedError):
        headers[hdrs.WWW_AUTHENTICATE] = error.challenge
    if isinstance(error, StaleProofError):
        headers[NONCE_HEADER] = error.nonce
    return headers


def refusal_of(error: web.HTTPException, request: web.BaseRequest) -> PdserveError:
    """Return our error for what aiohttp found wrong with a request."""
    match error:
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            return MethodNotAllowedError(
                f"{request.method} is not allowed for {request.path}; use {allowed}",
                allowed=allowed,
            )
        case web.HTTPRequestEntityTooLarge():
            return BodyTooLargeError(
                "the request body is larger than this server accepts: send less"
            )
        case web.HTTPNotFound() if request.path.startswith("/v1/"):
            return NotFoundError(
                f"{request.path} is not served here: use /v1/chat/completions, /v1/completions, "
                "/v1/responses, /v1/messages, /v1/embeddings, /v1/score, /v1/rerank or /v1/models"
            )
        case web.HTTPNotFound():
            return NotFoundError(
                f"{request.path} does not exist here: the OpenAI API is under /v1, for example "
                "/v1/chat/completions"
            )
        case web.HTTPExpectationFailed():
            return ExpectationError(
                f"Expect is {request.headers.get(hdrs.EXPECT)!r}: only 100-continue is supported",
                param="Expect",
            )
        case _:
            return BadRequestError(error.reason)
