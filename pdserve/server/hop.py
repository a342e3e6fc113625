"""What proxies ask of an engine beside generation: leases, its load."""

from __future__ import annotations

import msgspec
from aiohttp import web

from pdserve.http.protocol import parse_body
from pdserve.server.service import SERVICE, read_body
from pdserve.wire.hop import EngineReport, ReleaseRequest


async def release(request: web.Request) -> web.Response:
    """Give up a lease that nobody will read. Unknown nonces are ignored."""
    service = request.app[SERVICE]
    data = await read_body(request)
    service.verifier.check(request, data)
    await service.client.release_lease(parse_body(data, ReleaseRequest).nonce)
    return web.Response()


async def info(request: web.Request) -> web.Response:
    """What the engine is and how busy it is: the load view of a proxy."""
    service = request.app[SERVICE]
    return web.Response(
        body=msgspec.json.encode(
            EngineReport(
                ready=service.unready_reason is None,
                reason=service.unready_reason,
                models=service.model_names,
                engine=service.client.info,
                stats=service.client.stats,
                wall_s=service.clock.wall_s(),
            )
        ),
        content_type="application/json",
    )
