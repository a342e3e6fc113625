"""The legs of one request: one exchange each with one engine.

A failed leg is a value (`LegFailure`); `flow` decides what to do about it. Anything that ends the
request itself (a client that left, the request's own fault, its deadline) is an exception.
`strategies` decides the order of legs; `Handoff` gives back the leases they read.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from pdserve.http.answers import SSE
from pdserve.http.pooling_bodies import POOLING
from pdserve.proxy.bodies import merged, stages_in, usage_at_end, usage_in, without_internals
from pdserve.proxy.brain.prompt import UNKNOWN, RoutePrompt
from pdserve.proxy.errors import (
    MovedError,
    RefusedError,
    WorkerError,
    failure_in_stream,
)
from pdserve.proxy.handoff import leave
from pdserve.proxy.passing import Passing
from pdserve.proxy.setbacks import LegFailure
from pdserve.proxy.story import Mode, Stage
from pdserve.wire.hop import (
    KV_MODE_HEADER,
    REQUEST_ID_HEADER,
    TIME_LEFT_HEADER,
    YIELDS_HEADER,
)
from pdserve.wire.transfer import KVMode

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from aiohttp import web

    from pdserve.proxy.backend import Backend, Breaker
    from pdserve.proxy.bodies import ClientBody
    from pdserve.proxy.brain.ledger import LedgerEntry
    from pdserve.proxy.breakers import TransferAttempt
    from pdserve.proxy.delivery import Delivery
    from pdserve.proxy.handoff import Handoff
    from pdserve.proxy.leg import Leg
    from pdserve.proxy.relay import Event
    from pdserve.proxy.services import Services
    from pdserve.proxy.story import Story
    from pdserve.wire.hop import EngineStages


class Legs:
    """One client's request, and its exchanges with engines.

    Args:
        path: The endpoint, the same at the engines.
        until_s: The request's deadline, by the event loop's clock.
        headers: Headers for the engines; the request's id is added.

    Attributes:
        body: The client's request.
        delivery: The answer to the client.
        story: The record of the request.
        prompt: The prompt as routing sees it.
    """

    def __init__(
        self,
        services: Services,
        body: ClientBody,
        delivery: Delivery,
        story: Story,
        *,
        path: str,
        until_s: float,
        headers: Mapping[str, str],
    ) -> None:
        self.services = services
        self.body = body
        self.delivery = delivery
        self.story = story
        self.until_s = until_s
        self.prompt = RoutePrompt(body.num_bytes)
        self._entry: LedgerEntry | None = None
        self._expected: dict[tuple[str, Backend], tuple[int, ExitStack]] = {}
        self._path = path
        self._headers = headers

    @property
    def ends_with_prompt(self) -> bool:
        """Whether nothing is generated: one engine computes the prompt and nothing more."""
        return self._path in POOLING

    async def local(
        self, backend: Backend, *, is_fallback: bool
    ) -> web.StreamResponse | LegFailure:
        """Let one engine do everything.

        Args:
            is_fallback: Whether it computes the prompt in another engine's place.
        """
        leg = self._send(backend, self.body.for_local(is_fallback=is_fallback), None)
        self.story.leg_sent(Stage.LOCAL, backend.url)
        try:
            with self._exchange("local", backend, leg) as breaker:
                try:
                    if not await self._opens_stream(leg):
                        answer = await leg.read()
                        stages = stages_in(answer)
                        response: web.StreamResponse = self._whole(answer)
                        breaker.succeed()
                    else:
                        stages = await self._pass_on(leg, breaker, backend, Stage.LOCAL)
                        response = await self.delivery.end()
                except MovedError:  # it has ended well
                    raise
                except BaseException:
                    leave(leg, backend, self.services, self.story)
                    raise
        except (WorkerError, RefusedError) as error:
            return LegFailure("local", backend, error)
        if self.story.mode is Mode.LOCAL:
            self.story.prefill_stages = stages
        else:
            self.story.fallback_stages = stages
        return response

    # --- prefill

    async def prefill(
        self, handoff: Handoff, ticket: str | None = None
    ) -> web.StreamResponse | LegFailure | None:
        """Prefill, for a push if there is a ticket.

        Args:
            handoff: Read, and completed if the leg ends well.

        Returns:
            None with the handoff; the answer itself if the request ends there.

        Raises:
            DivergedError: The client's part of an earlier attempt cannot be compared.
        """
        if self.delivery.has_begun:
            self.delivery.begin_again()
        backend = handoff.prefill
        mode = KVMode.PULL if ticket is None else KVMode.PUSH
        leg = self._send(backend, self.body.for_prefill(ticket), mode)
        self.story.leg_sent(Stage.PREFILL, backend.url)
        try:
            with self._exchange("prefill", backend, leg) as breaker:
                return await self._prefilled(leg, breaker, handoff)
        except (WorkerError, RefusedError) as error:
            return LegFailure("prefill", backend, error)

    async def _prefilled(
        self, leg: Leg, breaker: Breaker, handoff: Handoff
    ) -> web.StreamResponse | None:
        try:
            if await self._opens_stream(leg):
                return await self._first_of_stream(leg, breaker, handoff)
            answer = await leg.read()
            self.story.prefill_stages = stages_in(answer)
            response = None if handoff.read(answer) else self._whole(answer)
            breaker.succeed()
            if response is None:
                self.story.first_token(self._now_s())
                self._note_handoff(handoff)
                handoff.complete(answer)
            return response
        except BaseException:
            if handoff.is_read:
                leg.close()
            else:
                leg.abandon(handoff.read)
            raise

    async def _first_of_stream(
        self, leg: Leg, breaker: Breaker, handoff: Handoff
    ) -> web.StreamResponse | None:
        """Deliver a prefill engine's stream, up to its handoff or its end mark."""
        self._keep_to_layout(leg, handoff.prefill)
        is_first = True
        async for events in leg.batches():
            if is_first:
                breaker.succeed()
                is_first = False
            visible = []
            for event in events:
                if event.is_internal:
                    if not handoff.is_read:
                        handoff.read(event.data)
                    self._note_prefill_stages(event)
                elif event.is_error:
                    raise failure_in_stream(handoff.prefill.url, event.data)
                elif not handoff.is_read:  # after a handoff the end mark is the other leg's
                    visible.append(event)
            if visible:
                await self._deliver_first(visible)
            if handoff.is_read:
                leg.drain(self._note_prefill_stages)
                self._note_handoff(handoff)
                handoff.complete()
                self._computed()
                return None
            if visible and visible[-1].is_done:
                leg.drain(self._note_prefill_stages)
                return await self.delivery.end()
        raise WorkerError(f"{handoff.prefill.url} ended before its handoff", reason="dropped")

    # --- decode

    async def decode(
        self, backend: Backend, body: bytes, transfer: TransferAttempt, handoff: Handoff
    ) -> web.StreamResponse | LegFailure:
        """Continue from KV that is computed, or being computed, elsewhere.

        Nothing is passed on before `handoff` is complete.
        """
        leg = handoff.reader = self._send(backend, body, transfer.mode)
        try:
            with self._exchange("decode", backend, leg, coming=not handoff.is_complete) as breaker:
                return await self._decoded(leg, breaker, backend, transfer, handoff)
        except (WorkerError, RefusedError) as error:
            return LegFailure("decode", backend, error, was_idle=not handoff.is_complete)

    async def _decoded(
        self,
        leg: Leg,
        breaker: Breaker,
        backend: Backend,
        transfer: TransferAttempt,
        handoff: Handoff,
    ) -> web.StreamResponse:
        """Pass on a decode engine's output, and learn from it whether the KV arrived."""
        response: web.StreamResponse
        sent_s = self._now_s()
        try:
            if await self._opens_stream(leg):
                transfer.report(
                    has_come=leg.has_kv, load_failures=leg.load_failures, at_s=self._now_s()
                )
                await handoff.completed()
                stages = await self._pass_on(leg, breaker, backend, Stage.DECODE)
                response = await self.delivery.end()
                self._note_decode_stages(transfer, stages, sent_s)
            else:
                answer = await leg.read()
                await handoff.completed()
                response = self._whole(merged(handoff.answer, answer) if handoff.answer else answer)
                self._note_decode_stages(transfer, stages_in(answer), sent_s)
                breaker.succeed()
            return response
        except MovedError:  # it has ended well
            raise
        except BaseException:
            leave(leg, backend, self.services, self.story)
            raise

    async def _pass_on(
        self, leg: Leg, breaker: Breaker, backend: Backend, stage: Stage
    ) -> EngineStages | None:
        """Relay a stream to its end mark; return the engine's account of it.

        Raises:
            WorkerError: It broke off, or the engine reported its own failure.
            MovedError: Another engine must continue it.
        """
        self._keep_to_layout(leg, backend)
        passing = Passing(
            leg,
            self.delivery,
            self.story,
            stage,
            begun=lambda: self._begun(breaker),
            stalled=self.services.metrics.stalls.observe,
        )
        relay = passing.relay
        while await leg.read_to(passing.take):
            await self.delivery.flush()
            if relay.done:
                leg.drain()
                stages = next(filter(None, map(stages_in, relay.internal)), None)
                if relay.handoff is not None:
                    self.story.moved_from(stages)
                    raise MovedError(backend.url, relay.handoff)
                self._count_tokens(usage_at_end(passing.last), stages)
                return stages
            if relay.error is not None:
                raise failure_in_stream(backend.url, relay.error)
        raise WorkerError(f"{backend.url} ended its stream too early", reason="dropped")

    # --- parts of the legs

    def _begun(self, breaker: Breaker) -> None:
        """Note that an engine's output has begun: it works."""
        breaker.succeed()
        self._computed()

    def _computed(self) -> None:
        """Tell the stream's engine, if its work is counted, that the prompt is computed."""
        if self._entry is not None:
            self._entry.computed()

    def expect(self, kind: str, backend: Backend, *, coming: bool = False) -> None:
        """Count a leg as its engine's work from now on, before it is sent; once, however often.

        A decode is `coming` until another engine has computed its prompt.
        """
        if (kind, backend) in self._expected:
            return
        services, prompt, counted = self.services, self.prompt, ExitStack()
        known = services.prefixes.sent(prompt, backend) if services.prefixes else UNKNOWN
        self.story.looked_up(kind, prompt, known)
        if services.pairing is not None:
            work = "receive" if coming else kind
            held = services.pairing.hold(backend, work, prompt, known.num_tokens)
            entry = counted.enter_context(held)
            if kind != "decode":
                self.story.prompt_entry = entry
            if kind != "prefill":
                self._entry = self.story.stream_entry = entry
        self._expected[kind, backend] = prompt.num_tokens - known.num_tokens, counted

    def expect_nothing(self) -> None:
        """Stop counting the legs that were expected and have not been sent."""
        for _, counted in self._expected.values():
            counted.close()
        self._expected.clear()

    @contextmanager
    def _exchange(
        self, kind: str, backend: Backend, leg: Leg, *, coming: bool = False
    ) -> Iterator[Breaker]:
        """Count a leg while the block runs; see `expect` and `Breakers.exchange`."""
        self.expect(kind, backend, coming=coming)
        num_tokens, counted = self._expected.pop((kind, backend))
        exchange = self.services.breakers.exchange(backend, leg, kind=kind, num_tokens=num_tokens)
        with counted, exchange as breaker:
            yield breaker

    def begin(self, mode: KVMode) -> None:
        """Count the start of a hand-over; `mode` says which engine moves the KV."""
        self.services.metrics.kv_mode.labels(mode.value).inc()
        self.story.kv_mode = mode
        self.story.tell(f"kv by {mode.value}")

    def _send(self, backend: Backend, body: bytes, mode: KVMode | None) -> Leg:
        left_s = self.until_s - asyncio.get_running_loop().time()
        headers = {
            **self._headers,
            REQUEST_ID_HEADER: self.story.request_id,
            TIME_LEFT_HEADER: f"{left_s:.3f}",
        }
        if yields_s := self.services.gate.yields_s(self.prompt):
            headers[YIELDS_HEADER] = f"{yields_s:g}"
        if mode is not None:
            headers[KV_MODE_HEADER] = mode.value
        return self.services.http.leg(f"{backend.url}{self._path}", body, headers)

    async def _opens_stream(self, leg: Leg) -> bool:
        """Wait for a leg's answer to begin; return whether it is a stream.

        Raises:
            WorkerError: The engine failed, or sends something its client did not ask for.
            RefusedError, DeadlineError: See `Leg.open`.
        """
        content_type = await leg.open()
        if (content_type == SSE) is not self.body.stream:
            asked = SSE if self.body.stream else "application/json"
            message = f"{leg.url} answered with {content_type} instead of {asked}"
            raise WorkerError(message, reason="garbled")
        return self.body.stream

    def _keep_to_layout(self, leg: Leg, backend: Backend) -> None:
        """Note the layout that a stream begins with, or check that it continues with the same.

        Raises:
            WorkerError: The engine was replaced by one with other weights, whose text differs
                even if it begins alike.
        """
        layout, begun_with = leg.layout or backend.layout, self.delivery.layout
        if not self.delivery.has_begun:
            self.delivery.layout = layout
        elif None not in (layout, begun_with) and layout != begun_with:
            message = (
                f"{backend.url} now has the layout {layout}, but the stream started with "
                f"{begun_with}"
            )
            raise WorkerError(message, reason="lost")

    async def _deliver_first(self, events: list[Event]) -> None:
        """Send the prefill engine's events on."""
        data = b"".join([event.raw for event in events])
        num_tokens = sum(not event.is_done for event in events)
        sent_s = self._now_s()
        num_known = self.delivery.num_swallowed
        if await self.delivery.send(data):
            if self.story.first_token_s is None:
                self.story.first_token(sent_s)
            elif num_tokens:
                self.story.last_chunk_s = sent_s
        self.story.num_output_tokens += num_tokens - (self.delivery.num_swallowed - num_known)
        if events[-1].is_done:
            self._count_tokens(usage_at_end(data), self.story.prefill_stages)

    def _note_handoff(self, handoff: Handoff) -> None:
        self.body.note_cached(handoff.cached_tokens)
        self.story.tell(f"handoff of {self.story.num_known_prompt_tokens} tokens")

    def _note_prefill_stages(self, event: Event) -> None:
        if (stages := stages_in(event.data)) is not None:
            self.story.prefill_stages = stages

    def _note_decode_stages(
        self, transfer: TransferAttempt, stages: EngineStages | None, sent_s: float
    ) -> None:
        """Learn from the decode engine's account whether the KV came from this pair, and when."""
        if self.story.is_moved:
            self.story.fallback_stages = stages
        else:
            self.story.decode_stages = stages
        if stages is not None:
            transfer.report(
                has_come=stages.kv_bytes > 0,
                load_failures=stages.load_failures,
                at_s=sent_s + stages.ttft_s,
            )

    def _now_s(self) -> float:
        return self.story.clock.monotonic_s()

    def _count_tokens(
        self, usage: tuple[int, int] | None, stages: EngineStages | None = None
    ) -> None:
        """Take an engine's counts, as an event of a stream may have several tokens."""
        if usage is not None:
            self.story.num_prompt_tokens, self.story.num_output_tokens = usage
        elif stages is not None and stages.output_tokens:
            self.story.num_output_tokens = stages.output_tokens

    def _whole(self, body: bytes) -> web.Response:
        """Return the answer in one piece."""
        if self.story.first_token_s is None:
            self.story.first_token(self._now_s())
        shown = without_internals(body)
        self._count_tokens(usage_in(shown))
        return self.delivery.whole(body, shown)
