"""Status of a proxy, its requests and its engines, and the command that resets their caches.

Answers from the proxy's own knowledge; only that command and a trace ask the engines.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import hdrs, web

import pdserve
from pdserve.config.schema import Role
from pdserve.errors import (
    BadRequestError,
    NotFoundError,
    ShuttingDownError,
    UnavailableError,
    UpstreamError,
)
from pdserve.http.access import operator_headers
from pdserve.http.answers import json_answer
from pdserve.http.replies import ServerLoad
from pdserve.observe.metrics import CONTENT_TYPE
from pdserve.observe.trace_query import trace_query
from pdserve.proxy.backend import Health
from pdserve.proxy.story import Stage
from pdserve.proxy.trace import Tracer
from pdserve.wire.finished import number_in

if TYPE_CHECKING:
    from pdserve.proxy.services import Services


class Status:
    """The status of a proxy and of its engines as a whole."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._live = services.live

    def routes(self) -> list[web.RouteDef]:
        """Its paths."""
        return [
            web.get("/v1/models", self._models),
            web.get("/v1/models/{model:.+}", self._model),
            web.get("/health", self._alive),
            web.get("/ping", self._alive),
            web.post("/ping", self._alive),
            web.get("/load", self._load),
            web.get("/livez", self._alive),
            web.get("/readyz", self._readyz),
            web.get("/metrics", self._metrics),
            web.get("/version", self._version),
            web.post("/reset_prefix_cache", self._reset_prefix_cache),
        ]

    def exposition(self) -> bytes:
        """Return the current answer of `/metrics`, without the process's own series."""
        backends, admission = self._services.backends, self._services.admission
        metrics, stories = self._services.metrics, self._live.stories
        if self._services.prefixes is not None:
            self._services.prefixes.measure()
        if self._services.pairing is not None:
            self._services.pairing.measure()
        metrics.route.set_homes({each.url: each.home.value for each in backends})
        metrics.totals.look(list(backends), stories)
        by_stage = Counter(story.stage for story in stories)
        for stage in Stage:
            metrics.in_flight.labels(stage.value).set(by_stage[stage])
        for (role, state), number in backends.count().items():
            metrics.backends.labels(role, state).set(number)
        metrics.open_edges.set(self._services.breakers.num_open_pairs)
        metrics.running.set(admission.num_running)
        metrics.waiting.set(admission.num_waiting)
        return metrics.exposition()

    def _known_models(self) -> list[dict[str, Any]]:
        """Return the engines' models, each once, with the shortest context of its engines."""
        merged: dict[str, dict[str, Any]] = {}
        for backend in self._services.backends:
            for model in backend.models:
                known = merged.setdefault(model["id"], dict(model))
                lengths = [known.get("max_model_len"), model.get("max_model_len")]
                known["max_model_len"] = min((n for n in lengths if n is not None), default=None)
        return list(merged.values())

    async def _models(self, request: web.Request) -> web.Response:
        return json_answer({"object": "list", "data": self._known_models()})

    async def _model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        for model in self._known_models():
            if model["id"] == name:
                return json_answer(model)
        raise NotFoundError(
            f"the model {name!r} does not exist", param="model", code="model_not_found"
        )

    async def _alive(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _load(self, request: web.Request) -> web.Response:
        return json_answer(ServerLoad(len(self._live.stories)))

    async def _readyz(self, request: web.Request) -> web.Response:
        if self._live.is_leaving:
            raise ShuttingDownError("this proxy")
        self._services.router.check_ready()
        counts = self._services.backends.count()
        engines = {role.value: counts[role.value, Health.READY.value] for role in Role}
        return json_answer({"status": "ready", "engines": engines})

    async def _metrics(self, request: web.Request) -> web.Response:
        body = self.exposition() + await self._services.metrics.process.exposition()
        return web.Response(body=body, headers={hdrs.CONTENT_TYPE: CONTENT_TYPE})

    async def _version(self, request: web.Request) -> web.Response:
        return json_answer({"version": pdserve.__version__})

    async def _reset_prefix_cache(self, request: web.Request) -> web.Response:
        """Make every engine forget its cached prefixes, so that runs do not share them."""
        engines = list(self._services.backends)
        if not engines:
            raise UnavailableError(
                "this proxy knows no engine: start engines with --proxy URL, or name them with "
                "--prefill URL and --decode URL",
                code="no_engine_known",
            )
        headers = operator_headers(self._services.config, request.headers)
        path = f"/reset_prefix_cache?{request.query_string}".removesuffix("?")
        http = self._services.http
        failures = await asyncio.gather(
            *(http.post_empty(f"{engine.url}{path}", headers) for engine in engines)
        )
        if known := [failure for failure in failures if failure is not None]:
            message = f"not every engine forgot its prefixes: {'; '.join(why for _, why in known)}"
            if all(status == 400 for status, _ in known):  # they do not do what was requested
                raise BadRequestError(message)
            raise UpstreamError(message, code="prefix_cache_not_reset")
        return web.Response()


class Debug:
    """Serves `/debug/requests`, `/debug/decisions` and `/debug/trace`: for operators alone."""

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
        """Answer running requests, and `?finished=N` newest ended ones, after `&after=SEQ`."""
        running = [story.as_json() for story in self._live.stories]
        finished = self._live.recent.asked_for(request.query)
        return json_answer({"running": running, "finished": msgspec.Raw(finished)})

    async def _decisions(self, request: web.Request) -> web.Response:
        """Answer the fits, engines' homes, and the newest `?limit=N` decisions (default: all kept).

        Only those after `&after=SEQ`, or the one of `&request=ID`.
        """
        pairing, homes = self._services.pairing, self._services.homes
        if pairing is None:
            raise NotFoundError(
                "this proxy does not choose pairs of engines: start it with --split-policy "
                "shadow or predicted"
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
        """Answer the last `?seconds=N` of this proxy and of all engines."""
        query = trace_query(request.query)
        collection = await self._tracer.collect(
            query.seconds,
            engines=[backend.url for backend in self._services.backends],
            running=self._live.stories,
            headers=operator_headers(self._services.config, request.headers),
        )
        body = await asyncio.to_thread(query.encode, collection)
        return web.Response(body=body, content_type="application/json")
