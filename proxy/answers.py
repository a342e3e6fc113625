"""Values and errors as HTTP answers. Knows their shape and nothing of who asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from pdserve.proxy.errors import error_body, error_headers

if TYPE_CHECKING:
    from pdserve.errors import PdserveError


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
