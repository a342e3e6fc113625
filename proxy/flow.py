"""The life of one request in the proxy: one coroutine, cancel-safe at every await.

    QUEUED -> PREFILL -> TRANSFER -> DECODE -> end
      |          |          |          |
      |          +----------+----------+---> LOCAL -> end
      +-------- no prefill engine ---------^

QUEUED    waits for a place (`Admission`), then for a plan (`Router`).
PREFILL   the prefill engine has the request. Its first token goes to the client the moment
          it comes; a handoff follows it, or the end of the stream if the request ends there.
TRANSFER  the decode engine has the handoff and reads the KV; nothing has come from it yet.
DECODE    its bytes are passed on as they come.
LOCAL     one engine does everything: because there is no pair, or as the last resort.

The ladder when an engine fails: other prefill engines, then other decode engines with the
same handoff (its lease still holds), then the whole request on one engine, then an error.
Retries are counted over all rungs, so that a request that kills engines kills few of them;
the last rung is tried once in any case.
Whatever the client has already been sent is swallowed from the repeated stream (`Replay`),
so a failure shows as a pause and never as other text.

Who holds what: a handoff is this coroutine's from the moment it is parsed until the decode
leg has ended well. On every other way out, cancellation included, it is given back.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiohttp import web

from pdserve.errors import DeadlineError, PdserveError, UnavailableError
from pdserve.observe.log import log_event
from pdserve.proxy.bodies import (
    Handoff,
    handoff_in,
    merged,
    stages_in,
    usage_at_end,
    usage_in,
    without_internals,
)
from pdserve.proxy.errors import (
    ClientGoneError,
    RefusedError,
    WorkerError,
    error_body,
    error_event,
    error_headers,
    is_clients_fault,
)
from pdserve.proxy.relay import Relay, SseParser
from pdserve.proxy.replay import DivergedError, Replay
from pdserve.proxy.routing import Disaggregate, RunLocally
from pdserve.proxy.story import Mode, Stage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.config.schema import ProxyConfig
    from pdserve.proxy.admission import Admission
    from pdserve.proxy.backends import Backend, Backends, Breaker, Use
    from pdserve.proxy.bodies import ClientBody, EngineStages
    from pdserve.proxy.client import EngineHttp, Leg
    from pdserve.proxy.metrics import Metrics
    from pdserve.proxy.relay import Event
    from pdserve.proxy.routing import Router
    from pdserve.proxy.story import Story

log = logging.getLogger(__name__)

SSE = "text/event-stream"
RESUMABLE_BYTES = 512 << 10
"""What is remembered of a stream so that it can be begun again; about 2000 tokens."""
BACKOFF_S = 0.01
MAX_BACKOFF_S = 0.5


@dataclass(frozen=True, slots=True)
class Services:
    """What every request shares."""

    config: ProxyConfig
    http: EngineHttp
    backends: Backends
    router: Router
    admission: Admission
    metrics: Metrics


class Delivery:
    """The client's side of a stream: begun with the first byte, remembered for a replay."""

    def __init__(self, request: web.Request, headers: Mapping[str, str]) -> None:
        self._request = request
        self._headers = headers
        self._response: web.StreamResponse | None = None
        self._sent: list[bytes] = []
        self._sent_bytes = 0
        self._replay: Replay | None = None

    @property
    def has_begun(self) -> bool:
        """Whether the client has a status and its first bytes."""
        return self._response is not None

    @property
    def can_begin_again(self) -> bool:
        """Whether all that was sent is still remembered."""
        return self._sent_bytes <= RESUMABLE_BYTES

    def begin_again(self) -> None:
        """From here on the stream repeats itself: swallow what the client already has."""
        if self._sent:
            self._replay = Replay(self._sent)

    async def send(self, data: bytes) -> bool:
        """Send whole events; tell whether any of it was left to send.

        Raises:
            ClientGoneError: Nobody listens.
            DivergedError: A repeated stream is another one than was begun.
        """
        if self._replay is not None:
            data = self._unsent(self._replay, data)
            if not data:
                return False
        try:
            if self._response is None:
                await self._begin()
            assert self._response is not None
            await self._response.write(data)
        except ConnectionResetError:
            raise ClientGoneError from None
        self._sent_bytes += len(data)
        if self.can_begin_again:
            self._sent.append(data)
        else:
            self._sent.clear()
        return True

    async def end(self) -> web.StreamResponse:
        """Close the stream."""
        assert self._response is not None
        try:
            await self._response.write_eof()
        except ConnectionResetError:
            raise ClientGoneError from None
        return self._response

    async def end_with_error(self, body: bytes) -> web.StreamResponse:
        """Send an error event and the end mark, whatever came before."""
        self._replay = None
        await self.send(error_event(body))
        return await self.end()

    async def _begin(self) -> None:
        response = web.StreamResponse(
            headers={
                **self._headers,
                "Content-Type": f"{SSE}; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
            }
        )
        await response.prepare(self._request)
        self._response = response

    def _unsent(self, replay: Replay, data: bytes) -> bytes:
        unsent = b"".join([replay.feed(event) for event in SseParser().feed(data)])
        if replay.is_over:
            self._replay = None
        return unsent


@dataclass(frozen=True, slots=True)
class _Prefilled:
    """A handoff in hand.

    Attributes:
        answer: The prefill engine's JSON where the client wants one piece, else None.
    """

    backend: Backend
    handoff: Handoff
    answer: bytes | None


class Flow:
    """Serves one request.

    Args:
        headers: For the engines.
        reply_headers: For the client.
    """

    def __init__(
        self,
        services: Services,
        request: web.Request,
        body: ClientBody,
        story: Story,
        *,
        headers: Mapping[str, str],
        reply_headers: Mapping[str, str],
    ) -> None:
        self._config = services.config
        self._http = services.http
        self._backends = services.backends
        self._router = services.router
        self._admission = services.admission
        self._metrics = services.metrics
        self._body = body
        self._path = request.path
        self._story = story
        self._headers = headers
        self._reply_headers = reply_headers
        self._delivery = Delivery(request, reply_headers)
        self._failed: set[Backend] = set()
        self._retries_left = services.config.retry_max_retries
        self._reader: Leg | None = None  # the newest leg that was sent the handoff
        self.outcome = "error"

    async def run(self) -> web.StreamResponse:
        """Answer the client, with the engines' words or with an OpenAI error.

        Raises:
            ClientGoneError: The client closed its connection.
        """
        try:
            self._story.queued()
            async with asyncio.timeout(self._config.request_timeout_s), self._admission.place():
                self._story.admitted()
                response = await self._serve()
                self.outcome = "ok"
                return response
        except RefusedError as refusal:
            self.outcome = "client_error"
            return await self._refuse(refusal)
        except TimeoutError:
            limit_s = self._config.request_timeout_s
            late = DeadlineError(f"the request was not finished within {limit_s:g} s")
            return await self._fail(late)
        except DivergedError as error:
            self._metrics.replays.labels("diverged").inc()
            return await self._fail(error)
        except PdserveError as error:
            return await self._fail(error)

    # --- the ladder

    async def _serve(self) -> web.StreamResponse:
        plan = self._router.plan(self._body.num_bytes)
        match plan:
            case RunLocally(engine=engine, reason=reason):
                return await self._run_locally(reason, engine)
            case Disaggregate(prefill=prefill):
                self._decide("disaggregated", "default")
                self._story.mode = Mode.DISAGGREGATED
        try:
            prefilled = await self._prefill(prefill)
        except WorkerError:
            return await self._run_locally("prefill_failed")
        if not isinstance(prefilled, _Prefilled):
            return prefilled
        try:
            return await self._decode(prefilled)
        except (WorkerError, UnavailableError):
            self._give_back(prefilled.handoff)
        except BaseException:
            self._give_back(prefilled.handoff)
            raise
        is_begun = self._story.stage is Stage.DECODE
        return await self._run_locally("stream_lost" if is_begun else "decode_failed")

    async def _prefill(self, backend: Backend) -> _Prefilled | web.StreamResponse:
        """Prefill on some engine. Returns the answer itself if the request ends there."""
        while True:
            try:
                return await self._prefill_on(backend)
            except (WorkerError, RefusedError) as failure:
                if not self._after(failure, "prefill", backend):
                    raise
                following = self._router.another_prefill(self._body.num_bytes, self._failed)
                if following is None or (_is_busy(failure) and following in self._failed):
                    raise
            await self._try_again("prefill")
            backend = following

    async def _decode(self, prefilled: _Prefilled) -> web.StreamResponse:
        """Go on from a handoff on some engine that can read it."""
        last: WorkerError | RefusedError | None = None
        while True:
            backend = self._router.decode_for(prefilled.backend, self._body.num_bytes, self._failed)
            if backend is None:
                raise last or UnavailableError("no decode engine can read from the prefill engine")
            if last is not None:
                if _is_busy(last) and backend in self._failed:
                    raise last
                await self._try_again("decode")
            try:
                return await self._decode_on(backend, prefilled)
            except (WorkerError, RefusedError) as failure:
                may_retry = self._after(failure, "decode", backend)
                if self._story.stage is Stage.DECODE or not may_retry:
                    raise
                last = failure

    async def _run_locally(self, reason: str, engine: Backend | None = None) -> web.StreamResponse:
        """Serve the whole request on one engine, swallowing what the client already has."""
        self._decide("local", reason)
        if not self._delivery.has_begun:
            self._story.mode = Mode.LOCAL
        while True:
            is_replay = self._delivery.has_begun
            if not self._delivery.can_begin_again:
                raise WorkerError(
                    "the engine was lost in mid stream", reason="lost", code="engine_dead"
                )
            self._delivery.begin_again()
            engine = engine or self._router.local_engine(self._body.num_bytes, self._failed)
            try:
                response = await self._run_on(engine)
            except (WorkerError, RefusedError) as failure:
                if not self._after(failure, "local", engine):
                    raise
                following = self._router.local_engine(self._body.num_bytes, self._failed)
                if _is_busy(failure) and following in self._failed:
                    raise
                engine = following
            else:
                if is_replay:
                    self._metrics.replays.labels("resumed").inc()
                return response
            await self._try_again("local")

    # --- the legs

    async def _prefill_on(self, backend: Backend) -> _Prefilled | web.StreamResponse:
        if self._delivery.has_begun:
            self._delivery.begin_again()
        leg = self._send_leg(Stage.PREFILL, backend, self._body.for_prefill())
        with self._backends.use(backend, leg) as use:
            handoff: Handoff | None = None
            try:
                if await leg.open() != SSE:
                    answer = await leg.read()
                    use.ok()
                    self._story.prefill_stages = stages_in(answer)
                    handoff = handoff_in(answer, backend.url)
                    if handoff is None:
                        return self._json(answer)
                    self._story.first_token()
                    self._note_handoff(handoff)
                    return _Prefilled(backend, handoff, answer)
                async for events in leg.batches():
                    use.ok()
                    visible = []
                    for event in events:
                        if event.is_internal:
                            handoff = handoff or handoff_in(event.data, backend.url)
                            self._note_prefill_stages(event)
                        elif event.is_error:
                            raise self._error_in_stream(event.data, backend)
                        elif handoff is None:  # after a handoff the end mark is the other leg's
                            visible.append(event)
                    if visible:
                        await self._deliver_first(visible)
                    if handoff is not None:
                        leg.drain(self._note_prefill_stages)
                        self._note_handoff(handoff)
                        return _Prefilled(backend, handoff, None)
                    if visible and visible[-1].is_done:
                        leg.drain(self._note_prefill_stages)
                        return await self._delivery.end()
                raise WorkerError(
                    f"{backend.url} ended its stream before the handoff", reason="dropped"
                )
            except BaseException:
                if handoff is not None:
                    self._give_back(handoff)
                    leg.close()
                else:
                    leg.abandon(backend.url)
                raise

    async def _decode_on(self, backend: Backend, prefilled: _Prefilled) -> web.StreamResponse:
        handoff = prefilled.handoff
        body = self._body.for_decode(handoff, first_delivered=prefilled.answer is None)
        edge = self._backends.edge(prefilled.backend, backend)
        leg = self._reader = self._send_leg(Stage.TRANSFER, backend, body)
        with self._backends.use(backend, leg) as use:
            edge.begin()
            try:
                if await leg.open() != SSE:
                    answer = await leg.read()
                    use.ok()
                    stages = stages_in(answer)
                    whole = merged(prefilled.answer, answer) if prefilled.answer else answer
                    response: web.StreamResponse = self._json(whole)
                else:
                    stages = await self._pass_on(leg, use, backend, Stage.DECODE)
                    response = await self._delivery.end()
                self._story.decode_stages = stages
                self._judge_edge(edge, prefilled.backend, backend, stages)
                return response
            except WorkerError:
                leg.close()
                raise
            except BaseException:
                leg.hang_up()
                raise
            finally:
                edge.leave()

    async def _run_on(self, backend: Backend) -> web.StreamResponse:
        leg = self._send_leg(Stage.LOCAL, backend, self._body.for_local())
        with self._backends.use(backend, leg) as use:
            try:
                if await leg.open() != SSE:
                    answer = await leg.read()
                    use.ok()
                    stages = stages_in(answer)
                    response: web.StreamResponse = self._json(answer)
                else:
                    stages = await self._pass_on(leg, use, backend, Stage.LOCAL)
                    response = await self._delivery.end()
                if self._story.mode is Mode.LOCAL:
                    self._story.prefill_stages = stages
                return response
            except BaseException:
                leg.close()
                raise

    async def _pass_on(
        self, leg: Leg, use: Use, backend: Backend, stage: Stage
    ) -> EngineStages | None:
        """Relay a stream to its end mark; return the engine's account of it.

        Raises:
            WorkerError: It broke off, or the engine reported its own failure.
        """
        relay = Relay()
        num_events = 0
        previous = b""
        async for chunk in leg.chunks():
            data = relay.feed(chunk)
            if data:
                use.ok()
                self._story.stage = stage
                if await self._delivery.send(data) and relay.num_events > num_events:
                    self._story.chunk()
                self._story.num_output_tokens += relay.num_events - num_events
                num_events = relay.num_events
            if relay.done:
                leg.drain()
                self._count_tokens(usage_at_end(previous + data))
                return next(filter(None, map(stages_in, relay.internal)), None)
            if relay.error is not None:
                raise self._error_in_stream(relay.error, backend)
            previous = data or previous
        raise WorkerError(f"{backend.url} broke off its stream", reason="dropped")

    # --- parts of the legs

    def _send_leg(self, stage: Stage, backend: Backend, body: bytes) -> Leg:
        leg = self._http.leg(f"{backend.url}{self._path}", body, self._headers)
        self._story.leg_sent(stage, backend.url)
        return leg

    async def _deliver_first(self, events: list[Event]) -> None:
        """Send the prefill engine's events on."""
        data = b"".join([event.raw for event in events])
        num_tokens = sum(not event.is_done for event in events)
        if await self._delivery.send(data) and self._story.first_token_s is None:
            self._story.first_token()
            self._story.num_output_tokens += num_tokens
        if events[-1].is_done:
            self._count_tokens(usage_at_end(data))

    def _note_handoff(self, handoff: Handoff) -> None:
        self._story.num_prompt_tokens = handoff.num_prompt_tokens
        self._story.tell(f"handoff of {handoff.num_prompt_tokens} tokens")

    def _note_prefill_stages(self, event: Event) -> None:
        if (stages := stages_in(event.data)) is not None:
            self._story.prefill_stages = stages

    def _count_tokens(self, usage: tuple[int, int] | None) -> None:
        if usage is not None:
            self._story.num_prompt_tokens, self._story.num_output_tokens = usage

    def _json(self, body: bytes) -> web.Response:
        """The whole answer in one piece."""
        if self._story.first_token_s is None:
            self._story.first_token()
        body = without_internals(body)
        self._count_tokens(usage_in(body))
        return web.Response(
            body=body,
            headers={**self._reply_headers, "Content-Type": "application/json"},
        )

    def _error_in_stream(self, data: bytes, backend: Backend) -> WorkerError | RefusedError:
        """An error event: the request's own fault ends it, the engine's is a failed leg."""
        if is_clients_fault(data):
            return RefusedError(400, data)
        text = data[:300].decode("utf-8", "replace")
        return WorkerError(f"{backend.url} reported {text}", reason="error_event")

    def _judge_edge(
        self, edge: Breaker, prefill: Backend, decode: Backend, stages: EngineStages | None
    ) -> None:
        """Learn from the decode engine's account whether the KV came over this pair."""
        if stages is None:
            return
        if stages.load_failures:
            self._metrics.kv_load_failures.inc(len(stages.load_failures))
            edge.fail()
            log_event(
                log,
                "kv load failed",
                level=logging.WARNING,
                prefill=prefill.url,
                decode=decode.url,
                reasons=",".join(stages.load_failures),
                request=self._story.request_id,
            )
        elif stages.kv_bytes:
            edge.succeed()

    def _give_back(self, handoff: Handoff) -> None:
        self._metrics.releases.inc()
        self._story.tell("handoff given back")
        self._http.release(handoff, after=self._reader)

    # --- failing

    def _after(self, failure: WorkerError | RefusedError, leg: str, backend: Backend) -> bool:
        """Take note of a failed leg; tell whether another attempt may be made."""
        if isinstance(failure, RefusedError):
            if not _is_busy(failure):
                return False
            reason = "429"
        else:
            reason = failure.reason
            self._metrics.leg_failures.labels(leg, reason).inc()
        self._failed.add(backend)
        self._story.tell(f"{leg} at {backend.url} failed: {reason}")
        log_event(
            log,
            "leg failed",
            level=logging.WARNING,
            leg=leg,
            engine=backend.url,
            reason=reason,
            request=self._story.request_id,
            error=str(failure),
        )
        self._retries_left -= 1
        return self._retries_left >= 0

    async def _try_again(self, leg: str) -> None:
        self._metrics.retries.labels(leg).inc()
        num_retries = self._config.retry_max_retries - self._retries_left
        await asyncio.sleep(min(MAX_BACKOFF_S, BACKOFF_S * 2 ** (num_retries - 1)))

    def _decide(self, decision: str, reason: str) -> None:
        self._metrics.decisions.labels(decision, reason).inc()
        self._story.tell(f"{decision}: {reason}")

    async def _refuse(self, refusal: RefusedError) -> web.StreamResponse:
        if self._delivery.has_begun:
            return await self._delivery.end_with_error(refusal.body)
        headers = {**self._reply_headers, "Content-Type": "application/json"}
        if refusal.retry_after is not None:
            headers["Retry-After"] = refusal.retry_after
        return web.Response(status=refusal.status, body=refusal.body, headers=headers)

    async def _fail(self, error: PdserveError) -> web.StreamResponse:
        self.outcome = "shed" if error.status in {429, 503} else "error"
        self._story.tell(f"{error.error_code}: {error.message}")
        if self._delivery.has_begun:
            return await self._delivery.end_with_error(error_body(error))
        return web.Response(
            status=error.status,
            body=error_body(error),
            headers={
                **self._reply_headers,
                **error_headers(error),
                "Content-Type": "application/json",
            },
        )


def _is_busy(failure: WorkerError | RefusedError) -> bool:
    """Whether an engine has no room: no failure, but another may have some."""
    return isinstance(failure, RefusedError) and failure.status == 429
