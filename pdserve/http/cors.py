"""CORS: which other origins browsers may allow (WHATWG Fetch, section 3.3).

Pages of other origins may not use paths for operators, or those between engines and proxies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from aiohttp import hdrs, web

from pdserve.errors import BadRequestError
from pdserve.http.access import is_clients
from pdserve.http.answers import error_answer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.config.http import CorsConfig
    from pdserve.http.answers import Handler

_ALL: Final = "*"
_ALWAYS_ALLOWED: Final = ("Accept", "Accept-Language", "Content-Language", "Content-Type")
_MAX_AGE_S: Final = 600
"""How long a browser may cache the answer."""


def let_pages_ask(app: web.Application, config: CorsConfig) -> None:
    """Make `app` tell browsers which pages may use it; this must be its outermost middleware."""
    policy = _Policy(config)
    app.middlewares.insert(0, policy.middleware)
    app.on_response_prepare.append(policy.mark)


class _Policy:
    """Which origins may ask, and for what."""

    def __init__(self, config: CorsConfig) -> None:
        self._config = config
        self._headers = (*_ALWAYS_ALLOWED, *config.allowed_headers)
        # With credentials, browsers want the origin by its name.
        self._names_origin = _ALL not in config.allowed_origins or config.allow_credentials

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer a browser's preflight request, which carries no key."""
        method = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_METHOD)
        is_question = request.method == hdrs.METH_OPTIONS and hdrs.ORIGIN in request.headers
        if method is None or not is_question or not is_clients(request.path):
            return await handler(request)
        return self._answer(
            request.headers[hdrs.ORIGIN],
            method,
            request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, ""),
        )

    def _answer(self, origin: str, method: str, headers: str) -> web.Response:
        names = [name.strip() for name in headers.split(",") if name.strip()]
        for flag, value, allowed in (
            ("allowed-origins", origin, self._config.allowed_origins),
            ("allowed-methods", method, self._config.allowed_methods),
            *(("allowed-headers", name, self._headers) for name in names),
        ):
            if not _is_among(value, allowed):
                message = f"{value!r} is not among the --{flag} of this server"
                return error_answer(BadRequestError(message, code="cors_refused"))
        answer = web.Response(text="OK")
        answer.headers[hdrs.ACCESS_CONTROL_ALLOW_METHODS] = method
        answer.headers[hdrs.ACCESS_CONTROL_MAX_AGE] = str(_MAX_AGE_S)
        if names:
            answer.headers[hdrs.ACCESS_CONTROL_ALLOW_HEADERS] = ", ".join(names)
        return answer

    async def mark(self, request: web.Request, response: web.StreamResponse) -> None:
        """Add the headers that let the browser give the answer to a page."""
        if not is_clients(request.path):
            return
        if self._names_origin:
            response.headers.add(hdrs.VARY, hdrs.ORIGIN)
        origin = request.headers.get(hdrs.ORIGIN)
        if origin is None or not _is_among(origin, self._config.allowed_origins):
            return
        response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = origin if self._names_origin else _ALL
        if self._config.allow_credentials:
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_CREDENTIALS] = "true"


def _is_among(value: str, allowed: Sequence[str]) -> bool:
    return _ALL in allowed or value.lower() in map(str.lower, allowed)
