"""The legs of one request: one exchange with one engine.

A leg that fails is a value (`LegFailure`): what is done about it is `flow`'s. Whatever ends the
request itself (its client left, its own fault, its deadline) is an exception. In which order legs
run is `pull`'s and `push`'s; who gives a handoff back that they read is `handoff`'s.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.proxy.bodies import (
    Handoff,
    handoff_in,
    merged,
    stages_in,
    usage_at_end,
    usage_in,
    without_internals,
)
from pdserve.proxy.delivery import SSE
from pdserve.proxy.errors import KvFailedError, RefusedError, WorkerError, failure_in_stream
from pdserve.proxy.relay import Relay
from pdserve.proxy.story import Mode, Stage
from pdserve.wire.hop import KV_MODE_HEADER, TIME_LEFT_HEADER
from pdserve.wire.transfer import KVMode

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from aiohttp import web

    from pdserve.proxy.backend import Backend
    from pdserve.proxy.breakers import Exchange, HandOver
    from pdserve.proxy.client import Leg
    from pdserve.proxy.handoff import OwnedHandoff
    from pdserve.proxy.relay import Event
    from pdserve.proxy.services import Call, Services
    from pdserve.wire.hop import EngineStages
    from pdserve.wire.ids import Incarnation


@dataclass(frozen=True, slots=True)
class LegFailure:
    """A leg that failed.

    Attributes:
        leg: prefill, decode or local.
    """

    leg: str
    backend: Backend
    error: WorkerError | RefusedError

    @property
    def reason(self) -> str:
        """One of `metrics.FAILURES`, or why it was refused: busy or refused."""
        if isinstance(self.error, RefusedError):
            return "busy" if self.is_busy else "refused"
        return self.error.reason

    @property
    def is_busy(self) -> bool:
        """Whether the engine has no room: no failure, but another may have some."""
        return isinstance(self.error, RefusedError) and self.error.status == 429

    @property
    def is_kv(self) -> bool:
        """Whether the engine is well and only the KV did not get there."""
        return isinstance(self.error, KvFailedError)

    @property
    def load_failures(self) -> tuple[str, ...]:
        """Labels of the KV loads that failed there, if it tells."""
        return self.error.load_failures if isinstance(self.error, KvFailedError) else ()

    def blame(self, hand_over: HandOver) -> None:
        """If the KV did not get there, that is the pair's fault, not an engine's."""
        if isinstance(self.error, KvFailedError):
            hand_over.failed(self.error, kind=self.leg)


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prompt whose KV is computed: what a decode engine goes on from.

    Attributes:
        life: The prefill engine's, when it gave the handoff; None where it does not say.
        answer: The prefill engine's JSON where the client wants one piece, else None.
        lost: How the leg failed that was to receive the KV of a push.
    """

    backend: Backend
    handoff: Handoff
    life: Incarnation | None
    answer: bytes | None
    lost: LegFailure | None = None


class Legs:
    """One request's way to the engines and back."""

    def __init__(self, services: Services, call: Call) -> None:
        self._http = services.http
        self._breakers = services.breakers
        self._metrics = services.metrics
        self._call = call
        self._body = call.body
        self._story = call.story
        self._delivery = call.delivery

    async def local(
        self, backend: Backend, *, is_fallback: bool
    ) -> web.StreamResponse | LegFailure:
        """Let one engine do everything.

        Args:
            is_fallback: It computes the prompt in another engine's place.
        """
        leg = self._send(backend, self._body.for_local(is_fallback=is_fallback), None)
        self._story.leg_sent(Stage.LOCAL, backend.url)
        try:
            with self._exchange("local", backend, leg) as exchange:
                try:
                    if not await self._opens_stream(leg):
                        answer = await leg.read()
                        stages = stages_in(answer)
                        response: web.StreamResponse = self._whole(answer)
                        exchange.ok()
                    else:
                        stages = await self._pass_on(leg, exchange, backend, Stage.LOCAL)
                        response = await self._delivery.end()
                except BaseException:
                    leg.close()
                    raise
        except (WorkerError, RefusedError) as error:
            return LegFailure("local", backend, error)
        if self._story.mode is Mode.LOCAL:
            self._story.prefill_stages = stages
        return response

    # --- prefill

    async def prefill(
        self, backend: Backend, owned: OwnedHandoff, ticket: str | None = None
    ) -> Prefilled | web.StreamResponse | LegFailure:
        """Prefill, for a push if there is a ticket; the answer itself if the request ends there.

        Args:
            owned: Takes the handoff.

        Raises:
            DivergedError: What the client has of a former attempt cannot be compared.
        """
        if self._delivery.has_begun:
            self._delivery.begin_again()
        leg = self._send(
            backend,
            self._body.for_prefill(ticket),
            KVMode.PULL if ticket is None else KVMode.PUSH,
        )
        self._story.leg_sent(Stage.PREFILL, backend.url)
        try:
            with self._exchange("prefill", backend, leg) as exchange:
                return await self._prefilled(leg, exchange, backend, owned)
        except (WorkerError, RefusedError) as error:
            return LegFailure("prefill", backend, error)

    async def _prefilled(
        self, leg: Leg, exchange: Exchange, backend: Backend, owned: OwnedHandoff
    ) -> Prefilled | web.StreamResponse:
        handoff: Handoff | None = None
        life = backend.info.incarnation if backend.info is not None else None
        try:
            if not await self._opens_stream(leg):
                answer = await leg.read()
                self._story.prefill_stages = stages_in(answer)
                handoff = _taken(answer, backend, owned)
                if handoff is None:
                    response = self._whole(answer)
                    exchange.ok()
                    return response
                exchange.ok()
                self._story.first_token(self._now_s())
                self._note_handoff(handoff)
                return Prefilled(backend, handoff, life, answer)
            self._keep_to_layout(leg, backend)
            async for events in leg.batches():
                exchange.ok()
                visible = []
                for event in events:
                    if event.is_internal:
                        handoff = handoff or _taken(event.data, backend, owned)
                        self._note_prefill_stages(event)
                    elif event.is_error:
                        raise failure_in_stream(backend.url, event.data)
                    elif handoff is None:  # after a handoff the end mark is the other leg's
                        visible.append(event)
                if visible:
                    await self._deliver_first(visible)
                if handoff is not None:
                    leg.drain(self._note_prefill_stages)
                    self._note_handoff(handoff)
                    return Prefilled(backend, handoff, life, None)
                if visible and visible[-1].is_done:
                    leg.drain(self._note_prefill_stages)
                    return await self._delivery.end()
            raise WorkerError(
                f"{backend.url} ended its stream before the handoff", reason="dropped"
            )
        except BaseException:
            if handoff is not None:
                leg.close()
            else:
                leg.abandon(lambda data: _taken(data, backend, owned) is not None)
            raise

    # --- decode

    async def decode(
        self,
        backend: Backend,
        body: bytes,
        hand_over: HandOver,
        gate: asyncio.Future[Prefilled],
        owned: OwnedHandoff,
    ) -> web.StreamResponse | LegFailure:
        """Go on from KV that is computed, or being computed, elsewhere.

        Args:
            gate: Nothing is passed on before it has the handoff.
            owned: Learns of the leg that gets the KV.
        """
        leg = owned.reader = self._send(backend, body, hand_over.mode)
        try:
            with self._exchange("decode", backend, leg) as exchange:
                return await self._decoded(leg, exchange, backend, hand_over, gate)
        except (WorkerError, RefusedError) as error:
            return LegFailure("decode", backend, error)

    async def _decoded(
        self,
        leg: Leg,
        exchange: Exchange,
        backend: Backend,
        hand_over: HandOver,
        gate: asyncio.Future[Prefilled],
    ) -> web.StreamResponse:
        """What a decode engine says."""
        try:
            if not await self._opens_stream(leg):
                answer = await leg.read()
                response = self._joined(hand_over, await gate, answer)
                exchange.ok()
                return response
            await gate
            return await self._streamed(leg, exchange, backend, hand_over)
        except WorkerError:
            leg.close()
            raise
        except BaseException:
            leg.hang_up()
            raise

    def _joined(self, hand_over: HandOver, prefilled: Prefilled, answer: bytes) -> web.Response:
        """Both engines' JSON as one answer."""
        stages = stages_in(answer)
        whole = merged(prefilled.answer, answer) if prefilled.answer else answer
        response = self._whole(whole)
        self._note_decode_stages(hand_over, stages)
        return response

    async def _streamed(
        self,
        leg: Leg,
        exchange: Exchange,
        backend: Backend,
        hand_over: HandOver,
    ) -> web.StreamResponse:
        stages = await self._pass_on(leg, exchange, backend, Stage.DECODE)
        response = await self._delivery.end()
        self._note_decode_stages(hand_over, stages)
        return response

    async def _pass_on(
        self, leg: Leg, exchange: Exchange, backend: Backend, stage: Stage
    ) -> EngineStages | None:
        """Relay a stream to its end mark; return the engine's account of it.

        Raises:
            WorkerError: It broke off, or the engine reported its own failure.
        """
        self._keep_to_layout(leg, backend)
        relay = Relay()
        num_events = 0
        previous = b""
        async for chunk in leg.chunks():
            data = relay.feed(chunk)
            if data:
                exchange.ok()
                self._story.stage = stage
                sent_s = self._now_s()
                num_known = self._delivery.num_swallowed
                if await self._delivery.send(data) and relay.num_events > num_events:
                    self._story.chunk(sent_s)
                num_known = self._delivery.num_swallowed - num_known
                self._story.num_output_tokens += relay.num_events - num_events - num_known
                num_events = relay.num_events
            if relay.done:
                leg.drain()
                self._count_tokens(usage_at_end(previous + data))
                return next(filter(None, map(stages_in, relay.internal)), None)
            if relay.error is not None:
                raise failure_in_stream(backend.url, relay.error)
            previous = data or previous
        raise WorkerError(f"{backend.url} broke off its stream", reason="dropped")

    # --- parts of the legs

    def hand_over(
        self, prefill: Backend, decode: Backend, mode: KVMode
    ) -> AbstractContextManager[HandOver]:
        """KV goes from one engine to another while the block runs."""
        request_id = self._story.request_id
        return self._breakers.hand_over(prefill, decode, mode, request_id=request_id)

    def _exchange(self, kind: str, backend: Backend, leg: Leg) -> AbstractContextManager[Exchange]:
        request_id = self._story.request_id
        return self._breakers.exchange(backend, leg, kind=kind, request_id=request_id)

    def begin(self, mode: KVMode) -> None:
        """A hand-over begins; `mode` says who is to move the KV."""
        self._metrics.kv_mode.labels(mode.value).inc()
        self._story.kv_mode = mode
        self._story.tell(f"kv by {mode.value}")

    def _send(self, backend: Backend, body: bytes, mode: KVMode | None) -> Leg:
        left_s = self._call.until_s - asyncio.get_running_loop().time()
        headers = {**self._call.headers, TIME_LEFT_HEADER: f"{left_s:.3f}"}
        if mode is not None:
            headers[KV_MODE_HEADER] = mode.value
        return self._http.leg(f"{backend.url}{self._call.path}", body, headers)

    async def _opens_stream(self, leg: Leg) -> bool:
        """Wait for a leg's answer to begin; tell whether it is a stream.

        Raises:
            WorkerError: The engine failed, or what it sends is not what its client asked for.
            RefusedError, DeadlineError: See `Leg.open`.
        """
        content_type = await leg.open()
        if (content_type == SSE) is not self._body.stream:
            asked = SSE if self._body.stream else "application/json"
            message = f"{leg.url} answers with {content_type}, where {asked} was asked for"
            raise WorkerError(message, reason="garbled")
        return self._body.stream

    def _keep_to_layout(self, leg: Leg, backend: Backend) -> None:
        """Note what a stream begins with, or see that it goes on with the same.

        Raises:
            WorkerError: The engine was replaced by one of other weights: its text is another one,
                even where it begins alike.
        """
        layout, begun_with = leg.layout or backend.layout, self._delivery.layout
        if not self._delivery.has_begun:
            self._delivery.layout = layout
        elif None not in (layout, begun_with) and layout != begun_with:
            message = f"{backend.url} has the layout {layout} now, the stream began with another"
            raise WorkerError(f"{message}: {begun_with}", reason="lost")

    async def _deliver_first(self, events: list[Event]) -> None:
        """Send the prefill engine's events on."""
        data = b"".join([event.raw for event in events])
        num_tokens = sum(not event.is_done for event in events)
        sent_s = self._now_s()
        if await self._delivery.send(data) and self._story.first_token_s is None:
            self._story.first_token(sent_s)
            self._story.num_output_tokens += num_tokens
        if events[-1].is_done:
            self._count_tokens(usage_at_end(data))

    def _note_handoff(self, handoff: Handoff) -> None:
        self._body.note(handoff)
        self._story.num_prompt_tokens = handoff.num_prompt_tokens
        self._story.tell(f"handoff of {handoff.num_prompt_tokens} tokens")

    def _note_prefill_stages(self, event: Event) -> None:
        if (stages := stages_in(event.data)) is not None:
            self._story.prefill_stages = stages

    def _note_decode_stages(self, hand_over: HandOver, stages: EngineStages | None) -> None:
        """Learn from the decode engine's account whether the KV came over this pair."""
        self._story.decode_stages = stages
        if stages is None:
            return
        if stages.load_failures:
            hand_over.lost(stages.load_failures)
        elif stages.kv_bytes:
            hand_over.arrived()

    def _now_s(self) -> float:
        return self._story.clock.monotonic_s()

    def _count_tokens(self, usage: tuple[int, int] | None) -> None:
        if usage is not None:
            self._story.num_prompt_tokens, self._story.num_output_tokens = usage

    def _whole(self, body: bytes) -> web.Response:
        """The whole answer in one piece."""
        if self._story.first_token_s is None:
            self._story.first_token(self._now_s())
        body = without_internals(body)
        self._count_tokens(usage_in(body))
        return self._delivery.whole(body)


def _taken(data: bytes, backend: Backend, owned: OwnedHandoff) -> Handoff | None:
    """Return the handoff in an event's data or in an answer, owned from now on.

    Raises:
        WorkerError: There is one and it cannot be read.
    """
    handoff = handoff_in(data, backend.url)
    if handoff is not None:
        owned.take(handoff)
    return handoff
