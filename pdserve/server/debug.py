"""What an engine's server shows for debugging: its requests, the trace, its clock.

Under the API key, like everything that tells of requests.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from pdserve.errors import EngineDeadError
from pdserve.http.answers import json_answer
from pdserve.observe.trace import reading, whole
from pdserve.observe.trace_query import trace_query
from pdserve.server.account import running, traced
from pdserve.server.service import SERVICE
from pdserve.wire.trace import Alignment, Collected, Collection, Missing, Part

if TYPE_CHECKING:
    from pdserve.server.service import Service
    from pdserve.wire.trace import ProcessTrace

_CORE_TIMEOUT_S = 5.0


async def clock(request: web.Request) -> web.Response:
    """The time by this process's monotonic clock, and which clock that is."""
    return json_answer(reading(request.app[SERVICE].clock))


async def requests(request: web.Request) -> web.Response:
    """What runs; and with `?finished=N` the newest N that ended, those after `&after=SEQ`."""
    service = request.app[SERVICE]
    finished = service.recent.asked_for(request.query)
    told = [running(job) for job in service.jobs.values()]
    return json_answer({"running": told, "finished": msgspec.Raw(finished)})


async def trace(request: web.Request) -> web.Response:
    """The last `?seconds=N` of this server and its engine cores, as `Collection`.

    With `?format=chrome` as a trace that viewers read.
    """
    query = trace_query(request.query)
    collection = await _collect(request.app[SERVICE], query.seconds)
    body = await asyncio.to_thread(query.encode, collection)
    return web.Response(body=body, content_type="application/json")


async def _collect(service: Service, seconds: float) -> Collection:
    own = await _own(service, seconds)
    missing: list[Missing] = []
    cores: list[ProcessTrace] = []
    try:
        async with asyncio.timeout(_CORE_TIMEOUT_S):
            cores = await service.client.trace(seconds)
    except EngineDeadError as error:
        missing.append(Missing(who="engine core", reason=error.message))
    except TimeoutError:
        reason = f"no answer within {_CORE_TIMEOUT_S:g} s"
        missing.append(Missing(who="engine core", reason=reason))
    return Collection(
        seconds=seconds,
        until_s=own.process.monotonic_s,
        wall_s=own.process.wall_s,
        # Cores are processes of this machine, started by this one: their clock is the same.
        processes=[Collected(trace=each, alignment=Alignment()) for each in (own, *cores)],
        missing=missing,
    )


async def _own(service: Service, seconds: float) -> ProcessTrace:
    info = service.client.info
    dump = service.recorder.dump(
        seconds,
        clock=service.clock,
        part=Part.SERVER,
        role=service.engine_config.role.value,
        engine_id=info.engine_id if info is not None else service.engine_config.engine_id,
        running=[traced(service, job, "") for job in service.jobs.values()],
    )
    pieces = []
    for piece in dump.pieces:
        pieces.append(piece)
        await asyncio.sleep(0)  # streams go on between two of them
    return whole(dump.process, pieces)
