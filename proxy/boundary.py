"""The middleware of every request: gives it an id, checks its key, shapes its errors.

Also chooses the key that is sent on to the engines: the deployment's, or the client's own.

Knows no path's handler. Whatever a handler raises is answered here, in OpenAI's shape.
"""

from __future__ import annotations

import logging
import re
import uuid
from typing import TYPE_CHECKING

from aiohttp import hdrs, web

from pdserve.dialects.paths import error_of
from pdserve.errors import PdserveError
from pdserve.http.access import API_KEY_HEADER, Access
from pdserve.http.answers import IS_TOLD, error_answer, is_work, refusal_of
from pdserve.observe.log import log_event
from pdserve.observe.request_log import log_refusal
from pdserve.proxy.errors import ClientGoneError
from pdserve.wire.hop import REQUEST_ID_HEADER

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from pdserve.config.http import ProxyConfig
    from pdserve.http.bodies import Bodies

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

log = logging.getLogger(__name__)

REQUEST_ID_KEY: web.RequestKey[str] = web.RequestKey("request_id", str)
"""Where handlers find the id of the request that they serve."""
_GOOD_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Boundary:
    """The one middleware of a proxy.

    Args:
        bodies: Freed of a request's body when it is over.
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
            response = web.Response(status=499)  # written to nobody
        except Exception as error:  # noqa: BLE001 - the top of a request: the proxy goes on
            log_event(
                log,
                "request failed",
                level=logging.ERROR,
                exc_info=error,
                request=request_id,
                endpoint=request.path,
            )
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
    """Say what is wrong as the clients of this path expect it."""
    if isinstance(body := refusal.body, bytes):
        refusal.body = error_of(request.path, refusal.status, body)


def _refuse(request: web.Request, error: PdserveError) -> web.Response:
    """Answer with an error; a request to the API that has no line yet gets one."""
    if is_work(request) and IS_TOLD not in request:
        log_refusal(request[REQUEST_ID_KEY], request.path, error)
    return error_answer(error)


def engine_headers(keys: Sequence[str], client: Mapping[str, str]) -> dict[str, str]:
    """Return the header that engines want: with the first of `keys`, or the client's own key."""
    if keys:
        return {hdrs.AUTHORIZATION: f"Bearer {keys[0]}"}
    given = client.get(hdrs.AUTHORIZATION)
    if given is None and API_KEY_HEADER in client:
        given = f"Bearer {client[API_KEY_HEADER]}"
    # One that is not ASCII is no key, and could not be sent on.
    return {hdrs.AUTHORIZATION: given} if given is not None and given.isascii() else {}


def operator_headers(config: ProxyConfig, client: Mapping[str, str]) -> dict[str, str]:
    """The same for what only operators may ask."""
    return engine_headers(config.operator_keys or config.api_keys, client)
