"""Every failure as an OpenAI error object: `{"error": {message, type, param, code}}`."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from pdserve.errors import (
    BadRequestError,
    BodyTooLargeError,
    KvTransferError,
    NotFoundError,
    PdserveError,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_log = logging.getLogger(__name__)

LOAD_FAILURES_HEADER = "X-Pdserve-Load-Failures"


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


def error_object(error: PdserveError) -> dict[str, Any]:
    """Return `error` as the API shows it."""
    return {
        "error": {
            "message": error.message,
            "type": error.type,
            "param": error.param,
            "code": error.error_code,
        }
    }


def error_response(error: PdserveError) -> web.Response:
    """Return `error` as a response, with Retry-After where that is known.

    A proxy also learns why KV did not arrive: whether another engine may still read it.
    """
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, KvTransferError) and error.load_failures:
        headers[LOAD_FAILURES_HEADER] = ",".join(error.load_failures)
    if isinstance(error, MethodNotAllowedError):
        headers["Allow"] = error.allowed
    return web.Response(
        status=error.status,
        body=msgspec.json.encode(error_object(error)),
        content_type="application/json",
        headers=headers,
    )


def from_http_exception(error: web.HTTPException, request: web.Request) -> PdserveError:
    """Return aiohttp's own refusals in our terms."""
    match error:
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            return MethodNotAllowedError(
                f"{request.method} is not allowed for {request.path}; use {allowed}",
                allowed=allowed,
            )
        case web.HTTPRequestEntityTooLarge():
            return BodyTooLargeError(
                "the request body is larger than this server accepts "
                f"({request.client_max_size} bytes)"
            )
        case web.HTTPNotFound():
            return NotFoundError(
                f"there is no {request.path} here; the OpenAI API is under /v1, "
                "for example /v1/chat/completions"
            )
        case _:
            return PdserveError(error.reason, code=str(error.status))


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn what a handler raises before its response began into an error response."""
    try:
        return await handler(request)
    except PdserveError as error:
        return error_response(error)
    except web.HTTPException as error:
        return error_response(from_http_exception(error, request))
    except web.RequestPayloadError:
        return error_response(BadRequestError("the body is not in its encoding, or was cut off"))
    except Exception as error:  # noqa: BLE001 (the top of a request: the server goes on)
        log_internal_error(request, error)
        return error_response(PdserveError("the server failed; its log has the details"))


def log_internal_error(request: web.Request, error: BaseException) -> None:
    """Log what a handler raised; the client learns no details."""
    _log.error("request failed path=%s", request.path, exc_info=error)
