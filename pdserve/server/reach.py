"""`POST /pdserve/reach`: does this engine's host reach the side channels of others?

A proxy asks it of engines that are to exchange KV, before they do. Who has heard a question may ask
it again: it has the engine connect to the same addresses, and say nothing there.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
from typing import TYPE_CHECKING, Final

from pdserve.http.answers import json_answer
from pdserve.http.parsing import parse_body
from pdserve.server.service import SERVICE, read_body
from pdserve.wire.hop import ReachReport, ReachRequest

if TYPE_CHECKING:
    from aiohttp import web

    from pdserve.wire.transfer import Endpoint

_TIMEOUT_S: Final = 1.0


async def reach(request: web.Request) -> web.Response:
    """Try to connect to each endpoint, all at once, and say why it cannot be reached."""
    service = request.app[SERVICE]
    data = await read_body(request)
    service.verifier.check(request, data)
    service.require_ready()
    asked = parse_body(data, ReachRequest)
    reasons = await asyncio.gather(*map(_why_not, asked.endpoints))
    return json_answer(ReachReport(reasons=list(reasons)))


async def _why_not(endpoint: Endpoint) -> str | None:
    try:
        ipaddress.ip_address(endpoint.host)
    except ValueError:
        return None  # of KV within one process: there is nothing to connect to
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            _, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
    except TimeoutError:
        return f"no answer within {_TIMEOUT_S:g} s"
    except OSError as error:
        return str(error) if error.errno is None else os.strerror(error.errno)
    writer.close()
    return None
