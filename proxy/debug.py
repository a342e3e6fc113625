"""What a proxy shows for debugging: its requests, and the trace of the whole deployment.

Under the API key, like everything that tells of requests.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from pdserve.errors import NotFoundError
from pdserve.http.answers import json_answer
from pdserve.observe.trace_query import trace_query
from pdserve.proxy.boundary import operator_headers
from pdserve.proxy.trace import Tracer
from pdserve.wire.finished import number_in

if TYPE_CHECKING:
    from pdserve.proxy.services import Services


class Debug:
    """Serves `/debug/requests`, `/debug/decisions` and `/debug/trace`."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._live = services.live
        self._tracer = Tracer(services.http, services.clock, services.live.recent)

    def routes(self) -> list[web.RouteDef]:
        """Its paths."""
        return [
            web.get("/debug/requests", self._requests),
            web.get("/debug/decisions", self._decisions),
            web.get("/debug/trace", self._trace),
        ]

    async def _requests(self, request: web.Request) -> web.Response:
        """What runs; and with `?finished=N` the newest N that ended, those after `&after=SEQ`."""
        running = [story.as_json() for story in self._live.stories]
        finished = self._live.recent.asked_for(request.query)
        return json_answer({"running": running, "finished": msgspec.Raw(finished)})

    async def _decisions(self, request: web.Request) -> web.Response:
        """What was learned, engines' homes, and the newest `?limit=N` decisions (all that are).

        Those after `&after=SEQ`, or the one of `&request=ID`.
        """
        pairing, homes = self._services.pairing, self._services.homes
        if pairing is None:
            raise NotFoundError(
                "this proxy chooses no pairs: start it with --split-policy shadow or predicted"
            )
        after_seq, limit = number_in(request.query, "after"), number_in(request.query, "limit")
        name = request.query.get("request")
        if name is None:
            decisions = pairing.log.newest(after_seq=after_seq)[: limit or None]
        else:
            decisions = [each for each in [pairing.log.of(name)] if each is not None]
        shown = pairing.shown(decisions)
        if homes is not None:
            shown = msgspec.structs.replace(shown, homes=homes.shown())
        return json_answer(shown)

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
