"""The endpoints that engines serve: generation and tokenization.

Reads a request and records its end; `flow` serves it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import msgspec
from aiohttp import hdrs, web

from pdserve.dialects import paths
from pdserve.errors import (
    InternalError,
    PdserveError,
)
from pdserve.http.access import engine_headers
from pdserve.http.answers import IS_LOGGED
from pdserve.http.dialect_bodies import CountTokensRequest, MessagesRequest, ResponsesRequest
from pdserve.http.ignored import note_ignored
from pdserve.http.parsing import top_level
from pdserve.http.pooling_bodies import POOLING
from pdserve.http.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TextFields,
    TokenizeRequest,
)
from pdserve.observe.request_log import CLIENT_LEFT, outcome_of
from pdserve.proxy.bodies import ClientBody
from pdserve.proxy.brain.prompt import RoutePrompt
from pdserve.proxy.delivery import REQUEST_ID_KEY, Delivery
from pdserve.proxy.errors import ClientGoneError, RefusedError, WorkerError
from pdserve.proxy.flow import Flow
from pdserve.proxy.gate import as_asked, field_of, tenant_of
from pdserve.proxy.legs import Legs
from pdserve.proxy.story import Stage, Story
from pdserve.wire.hop import PARAMS, REQUEST_ID_HEADER, STAGES_HEADER, KVTransferParams

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping

    from pdserve.dialects.answer import Dialect
    from pdserve.proxy.backend import Backend
    from pdserve.proxy.services import Services


GENERATED: Final[Mapping[str, type[TextFields]]] = {
    "/v1/completions": CompletionRequest,
    paths.CHAT: ChatRequest,
    paths.RESPONSES: ResponsesRequest,
    paths.MESSAGES: MessagesRequest,
    **POOLING,
}
_FORWARDED: Final[Mapping[str, type[msgspec.Struct]]] = {
    paths.TOKENIZE: TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    paths.COUNT_TOKENS: CountTokensRequest,
}
"""What engines decode bodies into, by path."""


class Generation:
    """Serves requests, one coroutine each.

    Args:
        rng: Draws seeds for requests without one.
    """

    def __init__(self, services: Services, rng: random.Random) -> None:
        self._services = services
        self._config = services.config
        self._metrics = services.metrics
        self._clock = services.clock
        self._rng = rng
        self._live = services.live

    def routes(self) -> list[web.RouteDef]:
        """Its paths."""
        return [
            *(web.post(path, self._generate) for path in GENERATED),
            *(web.post(path, self._forward) for path in _FORWARDED),
        ]

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        story = Story(request[REQUEST_ID_KEY], request.path, self._clock)
        request[IS_LOGGED] = True
        limit_s = self._config.request_timeout_s
        until_s = asyncio.get_running_loop().time() + limit_s
        with self._live.hold(story):
            return await self._accounted(request, story, until_s=until_s)

    async def _accounted(
        self, request: web.Request, story: Story, *, until_s: float
    ) -> web.StreamResponse:
        """Serve a request, count its outcome, and write its log line.

        Args:
            until_s: Its deadline, by the event loop's clock.
        """
        outcome = "error"
        try:
            tenant = tenant_of(self._config, request.headers)
            body, dialect = await self._body_of(request, until_s, tenant)
            story.streamed, story.model = body.stream, body.model
            legs = Legs(
                self._services,
                body,
                Delivery(request, dialect, send_timeout_s=self._config.limits.send_timeout_s),
                story,
                path=request.path if dialect is None else paths.CHAT,
                until_s=until_s,
                headers={
                    **engine_headers(self._config.api_keys, request.headers),
                    hdrs.CONTENT_TYPE: "application/json",
                    STAGES_HEADER: "1",
                },
            )
            legs.prompt = as_asked(
                body, request.headers, request_id=story.request_id, tenant=tenant
            )
            flow = Flow(self._services, legs)
            response = await flow.run()
            outcome, story.status = flow.outcome, response.status
            return response
        except PdserveError as error:  # before any engine was asked
            outcome = "shed" if outcome_of(error.status) == "shed" else "client_error"
            story.status, story.reason = error.status, error.error_code
            raise
        except (ClientGoneError, asyncio.CancelledError):
            outcome, story.status, story.reason = "disconnected", CLIENT_LEFT, "client_left"
            self._metrics.disconnects.labels(story.stage.value).inc()
            raise
        finally:
            self._compare_hits(story)
            if outcome == "ok" and self._services.pairing is not None:
                self._services.pairing.learn(story)
            self._metrics.ended(story, outcome)
            story.model = story.model or self._model_of(story)
            self._live.ended(story, outcome)

    def _compare_hits(self, story: Story) -> None:
        """Compare the prefix that an engine was assumed to have with the one it reports."""
        prefixes, stages = self._services.prefixes, story.prefill_stages
        leg = "prefill" if story.prefill_url else "local"
        engine = self._services.backends.get(story.prefill_url or story.decode_url)
        if prefixes is None or story.prompt is None or stages is None or engine is None:
            return
        if leg in story.known:
            prefixes.answered(story.prompt, engine, story.known[leg], stages)

    def _model_of(self, story: Story) -> str:
        """Return the model serving a request that names none; empty if no engine was asked."""
        engine = self._services.backends.get(story.decode_url or story.prefill_url)
        return engine.info.model if engine is not None and engine.info is not None else ""

    async def _body_of(
        self, request: web.Request, until_s: float, tenant: str
    ) -> tuple[ClientBody, Dialect | None]:
        """Read a request, if it may be served, and return its client's dialect.

        Raises:
            OverloadedError: No more requests are accepted now.
            PdserveError: It cannot be read.
        """
        self._services.admission.require_room(tenant)
        data = await self._bytes_of(request, until_s)
        dialect = paths.dialect_of(request.path, data, request[REQUEST_ID_KEY])
        body = ClientBody(
            data if dialect is None else dialect.chat_body(),
            created=int(self._clock.wall_s()),
            fallback_seed=self._rng.getrandbits(48),
        )
        if dialect is None:
            # The proxy sends its own.
            own = [] if field_of(body, PARAMS, KVTransferParams | None) is None else [PARAMS]
            note_ignored(request, body.fields, GENERATED[request.path], also=own)
        else:
            fields = top_level(data)
            note_ignored(request, fields, GENERATED[request.path], also=dialect.ignored)
        return body, dialect

    async def _bytes_of(self, request: web.Request, until_s: float) -> bytes:
        """Read a body.

        Raises:
            DeadlineError: It has not arrived by then.
            PdserveError: It cannot be read: see `Bodies.read`; or the proxy ends.
        """
        try:
            async with self._live.limit(until_s):
                return await self._services.bodies.read(request)
        except TimeoutError:
            limit_s = self._config.request_timeout_s
            raise self._live.late(limit_s, "the body had not arrived") from None

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        """Ask any engine, within a request's time limit."""
        story = Story(request[REQUEST_ID_KEY], request.path, self._clock, stage=Stage.LOCAL)
        with self._live.hold(story):
            return await self._forwarded(request)

    async def _forwarded(self, request: web.Request) -> web.StreamResponse:
        limit_s = self._config.request_timeout_s
        until_s = asyncio.get_running_loop().time() + limit_s
        body = await self._bytes_of(request, until_s)
        note_ignored(request, top_level(body), _FORWARDED[request.path])
        path = request.path
        if path == paths.COUNT_TOKENS:
            path, body = paths.TOKENIZE, paths.tokens_asked(body)
        try:
            async with self._live.limit(until_s):
                return await self._answer_of_any(request, path, body)
        except TimeoutError:
            raise self._live.late(limit_s, "no engine answered") from None

    async def _answer_of_any(
        self, request: web.Request, path: str, body: bytes
    ) -> web.StreamResponse:
        """Ask any engine; replace a failing one by another."""
        headers = {
            **engine_headers(self._config.api_keys, request.headers),
            hdrs.CONTENT_TYPE: "application/json",
            REQUEST_ID_HEADER: request[REQUEST_ID_KEY],
        }
        services = self._services
        failed: set[Backend] = set()
        for attempt in range(self._config.retry_max_retries + 1):
            engine = services.router.local_engine(RoutePrompt(0), failed)
            leg = services.http.leg(f"{engine.url}{path}", body, headers)
            try:
                with services.breakers.exchange(engine, leg, kind="forward") as breaker:
                    content_type = await leg.open()
                    answer = await leg.read()
                    breaker.succeed()
                if request.path == paths.COUNT_TOKENS:
                    answer = paths.tokens_counted(answer)
                return web.Response(body=answer, content_type=content_type)
            except RefusedError as refusal:
                refused = web.Response(
                    status=refusal.status, body=refusal.body, content_type="application/json"
                )
                if refusal.retry_after is not None:
                    refused.headers[hdrs.RETRY_AFTER] = refusal.retry_after
                return refused
            except WorkerError:
                if attempt == self._config.retry_max_retries:
                    raise
                failed.add(engine)
                self._metrics.retries.labels("forward").inc()
            finally:
                leg.close()
        raise InternalError("the last attempt returns or raises")
