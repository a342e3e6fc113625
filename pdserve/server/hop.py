"""What proxies ask of an engine beside generation: leases, its load."""

from __future__ import annotations

import hashlib
import hmac
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from pdserve.errors import UnauthorizedError
from pdserve.server.protocol import ReleaseRequest, parse_body
from pdserve.server.service import SERVICE, read_body

if TYPE_CHECKING:
    from pdserve.server.service import Service

AUTH_HEADER = "X-Pdserve-Auth"


def signature(secret: str, body: bytes) -> str:
    """Return the hex HMAC-SHA256 (RFC 2104) that `AUTH_HEADER` carries for `body`."""
    return hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()


async def release(request: web.Request) -> web.Response:
    """Give up a lease that nobody will read. Unknown nonces are ignored."""
    data = await _authentic_body(request)
    await request.app[SERVICE].client.release_lease(parse_body(data, ReleaseRequest).nonce)
    return web.Response()


async def info(request: web.Request) -> web.Response:
    """What the engine is and how busy it is: the load view of a proxy."""
    service = request.app[SERVICE]
    return web.Response(
        body=msgspec.json.encode(
            {
                "ready": service.not_ready_reason is None,
                "reason": service.not_ready_reason,
                "models": service.model_names,
                "engine": service.client.info,
                "stats": service.client.stats,
            }
        ),
        content_type="application/json",
    )


async def _authentic_body(request: web.Request) -> bytes:
    data = await read_body(request)
    secret = _secret(request.app[SERVICE])
    given = request.headers.get(AUTH_HEADER, "").encode("utf-8", "surrogateescape")
    if secret and not hmac.compare_digest(given, signature(secret, data).encode()):
        raise UnauthorizedError(f"{AUTH_HEADER} is missing or was made with another secret")
    return data


def _secret(service: Service) -> str:
    return service.engine_config.transfer.secret
