"""One HTTP request for text: its choices, from engine requests to pieces of text.

Its life: `intake` makes one engine request per choice; entering it submits them; `start` waits for
the engine's first word (until then another status than 200 is possible); `deltas` yields what each
choice gained; leaving it aborts what still runs and gives back KV leases that were never handed
over. Cancel-safe at every await. `account` counts and logs it; the
JSON that the text goes into is not known here.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from pdserve.engine.open_requests import MergedOutputs
from pdserve.errors import InternalError
from pdserve.observe.request_series import EndedRequest
from pdserve.server.choice import Choice, cached_by_prompt, raise_if_failed, usage_of
from pdserve.server.hop import stage_fields
from pdserve.wire.hop import EngineStages
from pdserve.wire.request import FinishReason, OnLoadFailure, RequestStages, sibling_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence
    from types import TracebackType
    from typing import Self

    from pdserve.engine.client import EngineClient
    from pdserve.observe.clock import Clock
    from pdserve.server.hop import PromptLogprobs
    from pdserve.server.metrics import ServerMetrics
    from pdserve.text.output import CallDelta, TextDelta
    from pdserve.wire.ids import RequestId
    from pdserve.wire.request import EngineOutput, GenerateRequest
    from pdserve.wire.sampling import TokenLogprobs
    from pdserve.wire.transfer import KVHandoff

PARTS_OF_STAGES = ("kv_digest_s", "step_wait_s", "store_s")
"""Stages that lie inside another one, and are no terms of the sum."""
_KEPT_PER_LEASE = 4
"""How often a lease is kept before it would end: one word may be late, or two."""


class Delta(msgspec.Struct, frozen=True):
    """New output of one choice.

    Attributes:
        offsets: Per token, the start of its text in the choice's text, in characters.
        reasoning, calls: Parts of a chat's answer other than content.
        num_calls: Whole calls of the choice so far, including these.
        finish_reason: STOP or LENGTH on the choice's last delta, HANDOFF when another
            engine goes on from here.
        stop_reason: The stop string or the user's stop token that ended it.
        prompt_logprobs: With the first delta, if asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    offsets: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    prompt_logprobs: PromptLogprobs | None
    reasoning: str = ""
    calls: Sequence[CallDelta] = ()
    num_calls: int = 0

    @property
    def is_text_only(self) -> bool:
        """Whether it has only text and its tokens."""
        return (
            self.finish_reason is None
            and self.logprobs is None
            and self.prompt_logprobs is None
            and not self.reasoning
            and not self.calls
        )


@dataclass(slots=True)
class TextRequest:
    """See the module. Use as an async context manager.

    Attributes:
        client: The engine.
        request_id: The client's.
        created: Timestamp of the answer.
        seed: The user's, or the one that was drawn.
        choices: In the order of their indexes.
        path: Path of the endpoint.
        has_prediction: Whether the user gave a prediction of the answer.
        may_move: Whether the caller can continue on another engine.
        tells_reasoning: Whether the client gets reasoning and the log-probabilities of its tokens.
        gaps_s: Seconds between outputs, each of one token, or more with a draft.
        failure: The engine's error, if it failed.
    """

    client: EngineClient
    clock: Clock
    metrics: ServerMetrics
    request_id: str
    model: str
    created: int
    seed: int
    prompts: list[list[int]]
    choices: list[Choice]
    start_s: float
    path: str = ""
    is_streamed: bool = False
    has_prediction: bool = False
    may_move: bool = False
    tells_reasoning: bool = True
    delivered: bool = False
    gaps_s: list[float] = field(default_factory=list)
    failure: Exception | None = None
    _index_of: dict[RequestId, int] = field(default_factory=dict)
    _outputs: MergedOutputs | None = None
    _held: deque[tuple[int, EngineOutput]] = field(default_factory=deque)
    _keeping: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        of_prompts: dict[int, list[GenerateRequest]] = {}
        for choice in self.choices:
            if choice.request is not None:
                self._index_of[choice.request.request_id] = choice.index
                of_prompts.setdefault(choice.prompt_index, []).append(choice.request)
        self._outputs = MergedOutputs(
            [
                self.client.generate(first, [sibling_of(other) for other in others])
                for first, *others in of_prompts.values()
            ]
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # A write may fail before the server hears that the connection is lost and cancels this.
        await asyncio.shield(asyncio.create_task(self._leave()))

    async def _leave(self) -> None:
        """Close what is open; give back leases that nobody was told of."""
        unread = await self._running.close()
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        if self.delivered:
            return
        unread += [output for _, output in self._held]
        handoffs = [*self.handoffs, *(output.handoff for output in unread)]
        for handoff in handoffs:
            if handoff is not None:
                await self.client.release_lease(handoff.nonce)

    async def start(self) -> None:
        """Wait for the engine's first output that is new to the client.

        Tokens that the client already has do not show that the engine can continue: its KV may
        still fail to arrive, which should become an HTTP status.

        Raises:
            PdserveError: The engine refused or failed the request.
        """
        num_known = dict.fromkeys(range(len(self.choices)), 0)
        while True:
            index, output = await self._next()
            self._held.append((index, output))
            num_known[index] += len(output.new_token_ids)
            if output.finish_reason is not None:
                return
            if num_known[index] > self.choices[index].num_to_swallow:
                return

    def kv_at_start(self) -> tuple[str, list[str]]:
        """Return how KV came from another engine and why loads failed, as known after `start`."""
        outputs = [output for _, output in self._held]
        modes = (output.kv_mode for output in outputs if output.kv_mode)
        failures = [label for output in outputs for label in output.load_failures]
        return next(modes, ""), failures

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Yield the choices' new output until all have ended.

        Raises:
            PdserveError: The engine failed the request.
        """
        num_open = sum(choice.request is not None for choice in self.choices)
        while num_open:
            index, output = self._held.popleft() if self._held else await self._next()
            choice = self.choices[index]
            if choice.finish_reason is None:
                deltas = await self._advance(choice, output)
                num_open -= choice.finish_reason is not None
                for delta in deltas:
                    yield delta

    async def _keep_leases(self, lease_s: float) -> None:
        """Keep handed-over leases while other choices run: no engine knows of them yet."""
        while True:
            await asyncio.sleep(lease_s / _KEPT_PER_LEASE)
            nonces = [handoff.nonce for handoff in self.handoffs if handoff is not None]
            await self.client.keep_leases(nonces)

    async def _next(self) -> tuple[int, EngineOutput]:
        try:
            output = await self._running.next()
            if output is None:
                raise InternalError(f"text request {self.request_id} ended before its choices")
            index = self._index_of[output.request_id]
            choice = self.choices[index]
            # What ends a choice in the engine after a stop string has ended it here is no news.
            if output.finish_reason is not None and choice.finish_reason is None:
                raise_if_failed(output, choice.request, self.clock.monotonic_s())
        except Exception as error:
            self.failure = error
            raise
        return index, output

    @property
    def _running(self) -> MergedOutputs:
        if self._outputs is None:
            raise InternalError(f"text request {self.request_id} was not entered")
        return self._outputs

    async def _advance(self, choice: Choice, output: EngineOutput) -> list[Delta]:
        """Apply an engine output; return what of it the client lacks."""
        self._note(choice, output)
        token_ids, logprobs, reason = output.new_token_ids, output.logprobs, output.finish_reason
        first = choice.processor.num_tokens == 0
        swallowed = min(choice.num_to_swallow, len(token_ids))
        if swallowed:
            choice.processor.push(token_ids[:swallowed], None)
            choice.num_to_swallow -= swallowed
            token_ids = token_ids[swallowed:]
            logprobs = logprobs[swallowed:] if logprobs is not None else None
            if not token_ids and reason is None:
                return []
        text = choice.processor.push(token_ids, reason)
        choice.finish_reason = text.finish_reason
        choice.handoff = output.handoff
        if choice.handoff is not None and self._keeping is None and len(self.choices) > 1:
            self._keeping = asyncio.create_task(self._keep_leases(choice.handoff.lease_s))
        if text.finish_reason is not reason:  # the text has ended, unknown to the engine
            await self.client.abort([output.request_id])
            if choice.handoff is not None:
                await self.client.release_lease(choice.handoff.nonce)
                choice.handoff = None
        if output.prompt_logprobs is not None:
            choice.prompt_logprobs = output.prompt_logprobs
        self._count_parsed(choice, text)
        parts = [text, *text.rest]
        stop_reason: str | int | None = text.stop_reason
        if stop_reason is None and sum(len(part.offsets) for part in parts) == len(token_ids):
            stop_reason = output.stop_reason  # else it ended before
        if choice.finish_reason is not None:
            self._count(choice)
        deltas, end = [], 0
        for part in parts:
            start, end, is_last = end, end + len(part.offsets), part is parts[-1]
            scored = start if self.tells_reasoning else start + part.num_thought
            deltas.append(
                Delta(
                    index=choice.index,
                    text=part.text,
                    token_ids=token_ids[start:end],
                    offsets=part.offsets,
                    logprobs=logprobs[scored:end] if logprobs is not None else None,
                    finish_reason=text.finish_reason if is_last else None,
                    stop_reason=stop_reason if is_last else None,
                    prompt_logprobs=choice.prompt_logprobs if first and not swallowed else None,
                    reasoning=part.reasoning if self.tells_reasoning else "",
                    calls=part.calls,
                    num_calls=choice.processor.num_calls,
                )
            )
            first = False
        return deltas

    def _count_parsed(self, choice: Choice, text: TextDelta) -> None:
        """Count, as vLLM does, the output parsed for tool calls."""
        if choice.processor.reads_calls and (self.is_streamed or text.finish_reason is not None):
            told = any(part.calls for part in (text, *text.rest))
            has_calls = told if self.is_streamed else choice.processor.num_calls > 0
            self.metrics.parsed(self.path, is_streamed=self.is_streamed, has_calls=has_calls)

    @property
    def handoffs(self) -> list[KVHandoff | None]:
        """Return the lease for another engine to read, per choice."""
        return [choice.handoff for choice in self.choices]

    def usage(self, choice_index: int | None = None) -> dict[str, Any]:
        """Return OpenAI's usage object: of one choice so far, or of the whole text request."""
        choices = self.choices if choice_index is None else [self.choices[choice_index]]
        return usage_of(choices, self.prompts, has_prediction=self.has_prediction)

    @property
    def tells_of_lost_kv(self) -> bool:
        """Whether who asks has other ways if KV does not come."""
        request = self.leader().request
        return request is not None and request.on_load_failure is OnLoadFailure.REPORT

    @property
    def tokens_per_step(self) -> float | None:
        """Own tokens per engine step that gave some; None where nothing was drafted."""
        if not any(choice.num_drafted for choice in self.choices):
            return None
        num_events = sum(choice.num_events for choice in self.choices)
        return 1 + sum(choice.num_accepted for choice in self.choices) / num_events

    @property
    def ttft_s(self) -> float | None:
        """Seconds from its arrival to the first token computed here; None without one."""
        end_s = self.leader().own_token_s
        return None if end_s is None else end_s - self.start_s

    def stages(self) -> dict[str, float | int]:
        """Return where the time to the first own token went, by `RequestStages` field.

        `server_s` is the time outside the engine: HTTP, tokenizing, the way to the engine and
        back. All seconds except `ttft_s` itself and `PARTS_OF_STAGES` sum to `ttft_s`.
        """
        choice = self.leader()
        stages = choice.stages or RequestStages()
        fields = stage_fields(stages)
        end_s = choice.own_token_s or choice.last_token_s
        ttft_s = end_s - self.start_s if end_s is not None else 0.0
        in_engine_s = sum(
            value
            for name, value in fields.items()
            if name.endswith("_s") and name not in PARTS_OF_STAGES
        )
        return fields | {"server_s": max(0.0, ttft_s - in_engine_s), "ttft_s": ttft_s}

    def account(self) -> EngineStages:
        """Return the proxy's account: stages, tokens, how KV came or why it did not."""
        stages: dict[str, Any] = self.stages()
        served = [choice for choice in self.choices if choice.request is not None]
        return EngineStages(
            **stages,
            load_failures=tuple(label for choice in self.choices for label in choice.load_failures),
            prompt_tokens=self.num_prompt_tokens,
            cached_tokens=self.num_cached_tokens,
            kv_mode=self.leader().kv_mode,
            computed_tokens=sum(choice.num_computed_tokens for choice in served),
            finish_reasons=tuple(each.finish_reason.value for each in served if each.finish_reason),
            num_choices=len(self.choices) // len(self.prompts),
            max_tokens=max(each.request.sampling.max_tokens for each in served if each.request),
            output_tokens=self.num_output_tokens,
            num_preemptions=sum(choice.num_preemptions for choice in served),
        )

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens over all prompts."""
        return sum(map(len, self.prompts))

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that a prefix cache had."""
        return sum(cached_by_prompt(self.choices).values())

    @property
    def num_output_tokens(self) -> int:
        """Output tokens over all choices, so far."""
        return sum(choice.num_tokens for choice in self.choices)

    def leader(self) -> Choice:
        """The choice that represents the text request in timings: its first one here."""
        return next(choice for choice in self.choices if choice.request is not None)

    def _note(self, choice: Choice, output: EngineOutput) -> None:
        """Keep times and counts of an output."""
        if output.stages is not None:
            choice.stages = output.stages
        choice.load_failures = output.load_failures or choice.load_failures
        choice.kv_mode = output.kv_mode or choice.kv_mode
        choice.core = output.core or choice.core
        choice.num_computed_tokens = choice.num_computed_tokens or output.num_computed_tokens
        choice.pooled = output.pooled or choice.pooled
        choice.num_preemptions = output.num_preemptions
        choice.num_drafted = output.num_drafted or choice.num_drafted
        choice.num_accepted = output.num_accepted or choice.num_accepted
        if not output.new_token_ids:
            return
        if choice.num_cached_tokens is None:
            choice.num_cached_tokens = output.num_cached_tokens
        now_s = self.clock.monotonic_s()
        if choice.last_token_s is None:
            choice.first_token_s = now_s
            self.metrics.of_core[choice.core].first_token(now_s - self.start_s)
        else:
            gap_s = now_s - choice.last_token_s
            self.gaps_s.append(gap_s)
            self.metrics.of_core[choice.core].token_gap(gap_s)
        choice.last_token_s = now_s
        num_tokens = choice.processor.num_tokens + len(output.new_token_ids)
        if num_tokens > choice.num_from_handoff:
            choice.num_events += 1
            self.metrics.event(len(output.new_token_ids))
        if choice.own_token_s is None and num_tokens > choice.num_from_handoff:
            choice.own_token_s = now_s

    def end_unfinished(self, reason: FinishReason) -> int:
        """Count unfinished choices as ended for `reason`; return their number."""
        unfinished = [c for c in self.choices if c.request is not None and c.finish_reason is None]
        for choice in unfinished:
            choice.finish_reason = reason
            self._count(choice)
        return len(unfinished)

    def _count(self, choice: Choice) -> None:
        """Count a choice that has ended."""
        assert choice.finish_reason is not None
        now_s = self.clock.monotonic_s()
        first_s, request = choice.first_token_s, choice.request
        ended = EndedRequest(
            num_prompt_tokens=len(self.prompts[choice.prompt_index]),
            num_output_tokens=choice.num_tokens,
            num_computed_tokens=choice.num_computed_tokens,
            max_tokens=request.sampling.max_tokens if request is not None else 0,
            num_preemptions=choice.num_preemptions,
            e2e_s=now_s - self.start_s,
            prefill_s=choice.stages.prefill_s if choice.stages is not None else 0.0,
            decode_s=now_s - first_s if first_s is not None else None,
        )
        self.metrics.choice_ended(choice.core, choice.finish_reason.value, ended)
