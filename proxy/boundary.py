"""What every request passes through: it gets an id, its key is checked, its errors get a shape.

Knows no path's handler. Whatever a handler raises is answered here, in OpenAI's shape.
"""

from __future__ import annotations

import logging
import re
import uuid
from typing import TYPE_CHECKING

from aiohttp import hdrs, web

from pdserve.errors import (
    BadRequestError,
    BodyTooLargeError,
    NotFoundError,
    PdserveError,
    UnauthorizedError,
)
from pdserve.proxy.answers import error_answer
from pdserve.proxy.errors import ClientGoneError
from pdserve.proxy.keys import CHALLENGE, is_for_people, is_known, needs_key

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from pdserve.config.schema import ProxyConfig

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

log = logging.getLogger(__name__)

REQUEST_ID = "X-Request-Id"
REQUEST_ID_KEY: web.RequestKey[str] = web.RequestKey("request_id", str)
"""Where handlers find the id of the request that they serve."""
_GOOD_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Boundary:
    """The one middleware of a proxy."""

    def __init__(self, config: ProxyConfig) -> None:
        self._config = config

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Give a request an id, check its key, and every error OpenAI's shape."""
        given = request.headers.get(REQUEST_ID, "")
        request_id = given if _GOOD_ID.fullmatch(given) else uuid.uuid4().hex
        request[REQUEST_ID_KEY] = request_id
        try:
            if needs_key(request.path):
                self._check_key(request)
            response = await handler(request)
        except PdserveError as error:
            response = error_answer(error)
            if isinstance(error, UnauthorizedError) and is_for_people(request.path):
                response.headers[hdrs.WWW_AUTHENTICATE] = CHALLENGE
        except web.HTTPException as error:
            response = error_answer(_from_http(request, error, self._config.max_body_bytes))
            if error.status == 405:
                response.set_status(405)
                response.headers[hdrs.ALLOW] = error.headers.get(hdrs.ALLOW, "")
        except web.RequestPayloadError:
            unreadable = BadRequestError("the body is not in its encoding, or was cut off")
            response = error_answer(unreadable)
        except ClientGoneError:
            response = web.Response(status=499)  # written to nobody
        except Exception:
            log.exception("request failed: request=%s path=%s", request_id, request.path)
            response = error_answer(PdserveError("the proxy failed; its log says why"))
        if not response.prepared:
            response.headers[REQUEST_ID] = request_id
        return response

    def _check_key(self, request: web.Request) -> None:
        given = request.headers.get(hdrs.AUTHORIZATION, "")
        if not is_known(given, self._config.api_keys, request.path):
            raise UnauthorizedError("the API key is missing or wrong")


def _from_http(request: web.Request, error: web.HTTPException, max_bytes: int) -> PdserveError:
    """Say in OpenAI's shape what aiohttp found wrong with a request."""
    match error.status:
        case 404:
            return NotFoundError(
                f"there is no {request.path} here; the OpenAI API is under /v1, "
                "for example /v1/chat/completions"
            )
        case 405:
            return BadRequestError(
                f"{request.path} does not take {request.method}", code="method_not_allowed"
            )
        case 413:
            return BodyTooLargeError(f"the body is larger than {max_bytes} bytes")
        case _:
            return BadRequestError(error.reason)
