"""What a proxy shows for debugging: its requests, and the trace of the whole deployment.

Under the API key, like everything that tells of requests.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from pdserve.errors import BadRequestError
from pdserve.http.answers import json_answer
from pdserve.observe.trace_query import trace_query
from pdserve.proxy.boundary import operator_headers
from pdserve.proxy.trace import Tracer
from pdserve.wire.finished import NUM_KEPT

if TYPE_CHECKING:
    from pdserve.observe.clock import Clock
    from pdserve.proxy.live import LiveRequests
    from pdserve.proxy.services import Services
    from pdserve.wire.finished import FinishedRequests


class Debug:
    """Serves `/debug/requests` and `/debug/trace`."""

    def __init__(
        self, services: Services, clock: Clock, live: LiveRequests, recent: FinishedRequests
    ) -> None:
        self._services = services
        self._live = live
        self._recent = recent
        self._tracer = Tracer(services.http, clock, recent)

    def routes(self) -> list[web.RouteDef]:
        """Its paths."""
        return [
            web.get("/debug/requests", self._requests),
            web.get("/debug/trace", self._trace),
        ]

    async def _requests(self, request: web.Request) -> web.Response:
        """What runs; and with `?finished=N` the newest N that ended, those after `&after=SEQ`."""
        running = [story.as_json() for story in self._live.stories]
        finished = self._recent.as_json(
            _number_in(request, "finished", NUM_KEPT), after_seq=_number_in(request, "after")
        )
        return json_answer({"running": running, "finished": msgspec.Raw(finished)})

    async def _trace(self, request: web.Request) -> web.Response:
        """The last `?seconds=N` of this proxy and of all engines."""
        query = trace_query(request.query)
        collection = await self._tracer.collect(
            query.seconds,
            engines=[backend.url for backend in self._services.backends],
            running=self._live.stories,
            headers=operator_headers(self._services.config, request.headers),
        )
        body = await asyncio.to_thread(query.encode, collection)
        return web.Response(body=body, content_type="application/json")


def _number_in(request: web.Request, name: str, largest: int | None = None) -> int:
    """Return a number of the query; 0 without it, `largest` for more than that.

    Raises:
        BadRequestError: It is none, or below 0.
    """
    given = request.query.get(name, "0")
    if not (given.isascii() and given.isdecimal() and len(given) <= 18):
        raise BadRequestError(f"{name} is {given!r}: a whole number is needed", param=name)
    return int(given) if largest is None else min(int(given), largest)
