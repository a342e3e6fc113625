"""What a handler raises, as an answer; and the end of what its request has held."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from aiohttp import web

from pdserve.errors import KvTransferError, PdserveError
from pdserve.http.answers import error_answer, refusal_of
from pdserve.server.service import SERVICE
from pdserve.wire.hop import LOAD_FAILURES_HEADER

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_log = logging.getLogger(__name__)


def error_response(error: PdserveError) -> web.Response:
    """Return `error` as a response.

    A proxy also learns why KV did not arrive: whether another engine may still read it.
    """
    answer = error_answer(error)
    if isinstance(error, KvTransferError) and error.load_failures:
        answer.headers[LOAD_FAILURES_HEADER] = ",".join(error.load_failures)
    return answer


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn what a handler raises before its response began into an error response."""
    try:
        return await handler(request)
    except PdserveError as error:
        return error_response(error)
    except web.HTTPException as error:
        return error_response(refusal_of(error, request))
    except Exception as error:  # noqa: BLE001 (the top of a request: the server goes on)
        log_internal_error(request, error)
        return error_response(PdserveError("the server failed; its log has the details"))
    finally:
        request.app[SERVICE].bodies.free(request)


def log_internal_error(request: web.Request, error: BaseException) -> None:
    """Log what a handler raised; the client learns no details."""
    _log.error("request failed path=%s", request.path, exc_info=error)
