"""An engine without a model: the same promises as a real one, in this process, at once.

The next token is a function of all tokens so far (and of the seed where the request
samples), so a request that is prefilled by one fake and decoded by another ends in the same
text as one that stays at home. Delays, deaths and refusals are parameters. What was
submitted, aborted and leased is kept for tests to look at.

It knows no scheduler, no KV and no connector: a lease is an entry in a `FakeFabric`, and so
is a push: the decode side registers there and waits, the prefill side waits for that and then
hands its first token over.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdserve.engine.merge import MergedOutputs
from pdserve.errors import EngineDeadError, OverloadedError, StartingError
from pdserve.wire.hashing import prompt_digest
from pdserve.wire.ids import BlockId, EngineId, Incarnation, RequestId
from pdserve.wire.outputs import TokenLogprobs
from pdserve.wire.request import (
    EngineInfo,
    EngineOutput,
    EngineStats,
    ErrorCode,
    FinishReason,
    GenerateRequest,
    OnLoadFailure,
    RequestStages,
    Sibling,
    with_siblings,
)
from pdserve.wire.seal import PROTOCOL
from pdserve.wire.transfer import Endpoint, KVHandoff, KVMode, KVShape, LeaseEnd, LoadFailure

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from pdserve.wire.trace import ProcessTrace

_MULTIPLIER = 6364136223846793005
_INCREMENT = 1442695040888963407
_BYTES_PER_TOKEN = 1024
_NUM_BLOCKS = 4096


@dataclass(slots=True)
class FakePush:
    """One push, from the first of its two engines that speaks of it.

    Attributes:
        is_registered: The decode side has room and waits.
        is_over: One of the sides will do no more for it.
        handoff: What came with the last byte.
        changed: Set at the next change, for whoever waits; then there is a fresh one.
    """

    is_registered: bool = False
    is_over: bool = False
    handoff: KVHandoff | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def register(self) -> None:
        """The decode side has room."""
        self.is_registered = True
        self._wake()

    def hand_over(self, handoff: KVHandoff) -> None:
        """All is written."""
        self.handoff = handoff
        self._wake()

    def end(self) -> None:
        """There will be no more of it."""
        self.is_over = True
        self._wake()

    def _wake(self) -> None:
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()


class FakeFabric:
    """The leases that a group of fakes can read from one another, and the pushes among them."""

    def __init__(self) -> None:
        self.leases: dict[str, KVHandoff] = {}
        self.pushes: dict[str, FakePush] = {}

    def end(self, nonce: str) -> KVHandoff | None:
        """End a lease and return it; None if there is no such lease."""
        return self.leases.pop(nonce, None)


class FakeEngineClient:
    """An `EngineClient` whose tokens come out of arithmetic.

    Args:
        vocab_size: Tokens are below it.
        first_token_id: Tokens are at or above it (special ids usually come first).
        next_token: Replaces the arithmetic: gets the request and the output so far.
        eos_after: The token at this output position (from 0) is the end of sequence.
        prefill_s, step_s: Seconds before the first token, and before each later one.
        die_after: The engine ends when it has given out so many tokens, over all requests.
        max_waiting: Further requests than this at once are refused; None refuses none.
        fabric: Where leases live; None takes every handoff at its word.
        num_ranks: Ranks it says it has; handoffs of an engine with another number of them
            are not taken.
        ready: Whether the engine is ready from the start; else `become_ready` makes it so.
        can_push: Whether it takes tickets; it needs a fabric for that.
        failing_loads: So many loads do not arrive, pulls and pushes alike.
        max_recompute_tokens: Prompt tokens it computes in place of others, all in all; None
            is any number.
        num_cached_tokens: What it says that its prefix cache has of every prompt.

    Attributes:
        requests: Everything submitted, in order.
        running: Ids of the requests being answered now.
        aborted: Ids of the requests that were closed before their end.
        released: Nonces given up by `release_lease`, known or not.
        lease_ends: How many leases ended how.
        num_prefix_cache_resets: Calls of `reset_prefix_cache`.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 256,
        first_token_id: int = 0,
        next_token: Callable[[GenerateRequest, Sequence[int]], int] | None = None,
        eos_after: int | None = None,
        prefill_s: float = 0.0,
        step_s: float = 0.0,
        die_after: int | None = None,
        max_waiting: int | None = None,
        fabric: FakeFabric | None = None,
        role: str = "both",
        engine_id: str = "fake",
        max_model_len: int = 2048,
        block_size: int = 16,
        lease_s: float = 30.0,
        layout_digest: str = "fake-layout",
        num_ranks: int = 1,
        ready: bool = True,
        can_push: bool = False,
        failing_loads: int = 0,
        max_recompute_tokens: int | None = None,
        num_cached_tokens: int = 0,
    ) -> None:
        self._num_cached_tokens = num_cached_tokens
        self._vocab_size = vocab_size
        self._first_token_id = first_token_id
        self._next_token = next_token or self._arithmetic
        self._eos_after = eos_after
        self._prefill_s = prefill_s
        self._step_s = step_s
        self._die_after = die_after
        self._max_waiting = max_waiting
        self._fabric = fabric
        self._block_size = block_size
        self._lease_s = lease_s
        self._info = EngineInfo(
            engine_id=EngineId(engine_id),
            incarnation=Incarnation(uuid.uuid4().hex),
            role=role,
            model="fake",
            dtype="float32",
            max_model_len=max_model_len,
            block_size=block_size,
            num_blocks=_NUM_BLOCKS,
            max_num_seqs=128,
            endpoints=[Endpoint(host="127.0.0.1", port=1 + rank) for rank in range(num_ranks)],
            layout_digest=layout_digest,
            layout={"fake": layout_digest},
            kv_shape=_shape(block_size, num_ranks),
            can_push=can_push,
            protocol=PROTOCOL,
        )
        self._failing_loads = failing_loads
        self._max_recompute_tokens = max_recompute_tokens
        self._num_recomputed = 0
        self._loads = {mode.value: 0 for mode in KVMode}
        self._ladder: dict[str, int] = {}
        self._ready = ready
        self._closing = False
        self._died = asyncio.Event()
        self._dead_reason: str | None = None
        self.stall_reason: str | None = None
        self._leases: dict[str, KVHandoff] = fabric.leases if fabric is not None else {}
        self._own_leases: set[str] = set()
        self._num_out = 0
        self._num_prompt = 0
        self._num_external = 0
        self._bytes_received = 0
        self._load_failures: dict[str, int] = {}
        self.requests: list[GenerateRequest] = []
        self.running: set[RequestId] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.aborted: list[RequestId] = []
        self.released: list[str] = []
        self.lease_ends: dict[str, int] = {end.value: 0 for end in LeaseEnd}
        self.num_prefix_cache_resets = 0

    @property
    def info(self) -> EngineInfo | None:
        """See `EngineClient`."""
        return self._info if self._ready else None

    @property
    def stats(self) -> EngineStats | None:
        """See `EngineClient`."""
        if not self._ready:
            return None
        num_leased = len(self.leases)
        return EngineStats(
            num_running=len(self.running),
            num_waiting=0,
            num_receiving=0,
            blocks={
                "free": _NUM_BLOCKS - len(self.running) - num_leased,
                "cached": 0,
                "held": len(self.running),
                "leased": num_leased,
                "receiving": 0,
            },
            num_blocks=_NUM_BLOCKS,
            num_preemptions=0,
            num_steps=self._num_out,
            prefix_cache_queries=self._num_prompt,
            prefix_cache_hits=0,
            prompt_tokens=self._num_prompt,
            generation_tokens=self._num_out,
            local_compute_tokens=self._num_prompt - self._num_external,
            local_cache_hit_tokens=0,
            external_kv_tokens=self._num_external,
            kv_bytes_received=self._bytes_received,
            kv_descriptors=int(self._bytes_received > 0),
            kv_load_failures=dict(self._load_failures),
            lease_ends=dict(self.lease_ends),
            kv_loads=dict(self._loads),
            kv_ladder=dict(self._ladder),
            recompute_tokens=self._num_recomputed,
        )

    @property
    def core_stats(self) -> list[EngineStats | None]:
        """See `EngineClient`."""
        return [self.stats]

    @property
    def dead_reason(self) -> str | None:
        """See `EngineClient`."""
        return self._dead_reason

    @property
    def leases(self) -> set[str]:
        """Nonces of the leases this engine has granted and that have not ended."""
        return {nonce for nonce in self._own_leases if nonce in self._leases}

    def become_ready(self) -> None:
        """The weights are loaded now."""
        self._ready = True

    def die(self, reason: str) -> None:
        """End the engine, for the first reason given: its requests fail, and later ones."""
        if self._dead_reason is None:
            self._dead_reason = reason
        self._died.set()

    async def generate(
        self, request: GenerateRequest, siblings: Sequence[Sibling] = ()
    ) -> AsyncGenerator[EngineOutput, None]:
        """See `EngineClient`."""
        choices = list(with_siblings(request, siblings))
        outputs = MergedOutputs([self._generate(choice) for choice in choices])
        try:
            while (output := await outputs.next()) is not None:
                yield output
        finally:
            for unread in await outputs.close():
                if unread.handoff is not None:
                    await self.release_lease(unread.handoff.nonce)

    async def abort(self, request_ids: Sequence[RequestId]) -> None:
        """See `EngineClient`. Each of them ends at its next token."""
        for request_id in request_ids:
            self._leave(request_id)

    async def _generate(self, request: GenerateRequest) -> AsyncGenerator[EngineOutput, None]:
        if self._dead_reason is not None:
            raise EngineDeadError(f"the engine has ended: {self._dead_reason}")
        if not self._ready or self._closing:
            raise StartingError
        if self._max_waiting is not None and len(self.running) >= self._max_waiting:
            raise OverloadedError("too many requests wait already", retry_after_s=1.0)
        self.requests.append(request)
        self.running.add(request.request_id)
        self._idle.clear()
        ended = False
        try:
            async with contextlib.aclosing(self._outputs(request)) as outputs:
                async for output in outputs:
                    if request.request_id not in self.running:
                        return
                    ended = output.finish_reason is not None
                    if ended:
                        self._leave(request.request_id)
                    yield output
        finally:
            self._leave(request.request_id)
            if not ended and self._dead_reason is None:
                self.aborted.append(request.request_id)

    async def release_lease(self, nonce: str) -> None:
        """See `EngineClient`."""
        self.released.append(nonce)
        if nonce in self.leases:
            del self._leases[nonce]
            self.lease_ends[LeaseEnd.RELEASED.value] += 1

    async def reset_prefix_cache(self) -> None:
        """See `EngineClient`."""
        self.num_prefix_cache_resets += 1

    async def trace(self, seconds: float) -> list[ProcessTrace]:
        """See `EngineClient`. It has no core, so nothing is recorded."""
        if self._dead_reason is not None:
            raise EngineDeadError(f"the engine has ended: {self._dead_reason}")
        return []

    async def close(self, *, timeout_s: float) -> None:
        """See `EngineClient`."""
        self._closing = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            pass
        self.die("closed")

    def _leave(self, request_id: RequestId) -> None:
        self.running.discard(request_id)
        if not self.running:
            self._idle.set()

    async def _outputs(self, request: GenerateRequest) -> AsyncGenerator[EngineOutput, None]:
        push = self._push_of(request)
        try:
            async with contextlib.aclosing(self._tokens(request, push)) as outputs:
                async for output in outputs:
                    yield output
        finally:
            if push is not None:
                push.end()

    async def _tokens(
        self, request: GenerateRequest, push: FakePush | None
    ) -> AsyncGenerator[EngineOutput, None]:
        sampling = request.sampling
        num_prompt = len(request.prompt_token_ids)
        self._num_prompt += num_prompt
        if (why := self._refusal(request, push)) is not None:
            yield _error(request, ErrorCode.HANDOFF_REFUSED, why)
            return
        handoff, failures = await self._load(request, push)
        is_recompute = request.is_fallback or bool(failures)
        if failures and (push is not None or request.on_load_failure is OnLoadFailure.REPORT):
            self._climb("report")
            code = ErrorCode.KV_TRANSFER_FAILED
            yield _error(request, code, "its KV did not arrive", failures)
            return
        if is_recompute and not self._may_recompute(num_prompt):
            self._climb("shed")
            code = ErrorCode.RECOMPUTE_BUDGET_EXHAUSTED
            yield _error(request, code, "the budget is spent", failures)
            return
        output: list[int] = []
        while True:
            first = not output
            loaded = first and handoff is not None
            await self._pass(0.0 if loaded else self._prefill_s if first else self._step_s)
            if handoff is not None and loaded:
                token_id = handoff.first_token_ids[0]
            else:
                token_id = self._sample(request, output)
            output.append(token_id)
            finish_reason, stop_reason = _finish(request, output)
            granted = None
            if request.remote_decode and finish_reason is None:
                granted = self._lease(request, token_id)
                finish_reason = FinishReason.HANDOFF
                if push is not None and push.is_registered and not push.is_over:
                    push.hand_over(granted)
            self._num_out += 1
            if self._die_after is not None and self._num_out > self._die_after:
                self.die(f"it was to die after {self._die_after} tokens")
                raise EngineDeadError(f"the engine has ended: {self._dead_reason}")
            mode = KVMode.PULL if push is None else KVMode.PUSH
            yield EngineOutput(
                request_id=request.request_id,
                new_token_ids=[token_id],
                logprobs=_logprobs(token_id, sampling.logprobs, self._vocab_size),
                prompt_logprobs=self._prompt_logprobs(request) if first else None,
                finish_reason=finish_reason,
                stop_reason=stop_reason,
                handoff=granted,
                num_cached_tokens=handoff.num_cached_tokens
                if handoff
                else self._num_cached(request),
                stages=self._stages(handoff) if first or finish_reason is not None else None,
                load_failures=failures if first else [],
                kv_mode=mode.value if handoff is not None else "",
            )
            if finish_reason is not None:
                return

    def _push_of(self, request: GenerateRequest) -> FakePush | None:
        """The push that a request is part of; whoever asks first creates it."""
        if request.ticket is None or self._fabric is None:
            return None
        return self._fabric.pushes.setdefault(request.ticket.nonce, FakePush())

    def _refusal(self, request: GenerateRequest, push: FakePush | None) -> str | None:
        """Why a ticket cannot be taken here."""
        ticket = request.ticket
        if ticket is None:
            return None
        mine = ticket.prefill if request.remote_decode else ticket.decode
        if push is None or not self._info.can_push:
            return "this engine takes no tickets"
        if (mine.engine_id, mine.incarnation) != (self._info.engine_id, self._info.incarnation):
            return "the ticket is for another engine, or for another life of this one"
        return None

    def _may_recompute(self, num_tokens: int) -> bool:
        """Take prompt tokens out of the budget; False, and nothing taken, if it has not enough."""
        limit = self._max_recompute_tokens
        if limit is not None and self._num_recomputed + num_tokens > limit:
            return False
        self._climb("recompute")
        self._num_recomputed += num_tokens
        return True

    def _climb(self, rung: str) -> None:
        self._ladder[rung] = self._ladder.get(rung, 0) + 1

    async def _pass(self, seconds: float) -> None:
        """Let time pass, at least one turn of the loop; fail if the engine dies in it."""
        if seconds <= 0:
            await asyncio.sleep(0)
        else:
            try:
                async with asyncio.timeout(seconds):
                    await self._died.wait()
            except TimeoutError:
                pass
        if self._dead_reason is not None:
            raise EngineDeadError(f"the engine has ended: {self._dead_reason}")

    async def _load(
        self, request: GenerateRequest, push: FakePush | None
    ) -> tuple[KVHandoff | None, list[str]]:
        """Take part in a push, or read the lease behind a handoff.

        Returns:
            The handoff whose KV is here, if any, and why there is none though there should be.
        """
        if push is not None and request.remote_decode:
            await self._until(push, lambda: push.is_registered or push.is_over)
            return None, []
        if push is not None:
            push.register()
            await self._until(push, lambda: push.handoff is not None or push.is_over)
        handoff = push.handoff if push is not None else request.handoff
        if handoff is None:
            return None, [] if push is None else self._failed(LoadFailure.WITHDRAWN)
        if self._failing_loads > 0:
            self._failing_loads -= 1
            return None, self._failed(LoadFailure.TIMEOUT)
        mine = self._info
        if (handoff.layout_digest, len(handoff.endpoints)) != (
            mine.layout_digest,
            len(mine.endpoints),
        ):
            return None, self._failed(LoadFailure.INCOMPATIBLE)
        if handoff.prompt_digest != prompt_digest(request.prompt_token_ids, request.cache_salt) or (
            self._fabric is not None and self._fabric.end(handoff.nonce) is None
        ):
            return None, self._failed(LoadFailure.LEASE_LOST)
        self._loads[(KVMode.PULL if push is None else KVMode.PUSH).value] += 1
        self._num_external += handoff.num_tokens
        self._bytes_received += handoff.num_tokens * _BYTES_PER_TOKEN
        return handoff, []

    def _failed(self, failure: LoadFailure) -> list[str]:
        self._load_failures[failure.value] = self._load_failures.get(failure.value, 0) + 1
        return [failure.value]

    async def _until(self, push: FakePush, condition: Callable[[], bool]) -> None:
        """Wait for a change of a push that makes `condition` true; fail if the engine dies."""
        while not condition():
            waits = [asyncio.ensure_future(e.wait()) for e in (push.changed, self._died)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
            if self._dead_reason is not None:
                raise EngineDeadError(f"the engine has ended: {self._dead_reason}")

    def _num_cached(self, request: GenerateRequest) -> int:
        return min(self._num_cached_tokens, len(request.prompt_token_ids) - 1)

    def _lease(self, request: GenerateRequest, token_id: int) -> KVHandoff:
        nonce = request.ticket.nonce if request.ticket is not None else uuid.uuid4().hex
        num_tokens = len(request.prompt_token_ids)
        num_blocks = -(-num_tokens // self._block_size)
        handoff = KVHandoff(
            engine_id=self._info.engine_id,
            incarnation=self._info.incarnation,
            nonce=nonce,
            request_id=request.request_id,
            endpoints=self._info.endpoints,
            block_ids=[BlockId(index) for index in range(num_blocks)],
            num_tokens=num_tokens,
            shape=_shape(self._block_size, len(self._info.endpoints)),
            layout_digest=self._info.layout_digest,
            lease_s=self._lease_s,
            prompt_digest=prompt_digest(request.prompt_token_ids, request.cache_salt),
            first_token_ids=[token_id],
            first_logprobs=_logprobs(token_id, request.sampling.logprobs, self._vocab_size),
            num_cached_tokens=self._num_cached(request),
        )
        self._leases[nonce] = handoff
        self._own_leases.add(nonce)
        return handoff

    def _sample(self, request: GenerateRequest, output: Sequence[int]) -> int:
        sampling = request.sampling
        if (
            self._eos_after == len(output)
            and sampling.eos_token_ids
            and not sampling.ignore_eos
            and len(output) >= sampling.min_tokens
        ):
            return sampling.eos_token_ids[0]
        return self._next_token(request, output)

    def _arithmetic(self, request: GenerateRequest, output: Sequence[int]) -> int:
        """A linear congruence over all tokens so far. O(number of tokens)."""
        state = request.sampling.seed if request.sampling.temperature > 0 else 0
        for token_id in (*request.prompt_token_ids, *output):
            state = (state * _MULTIPLIER + token_id + _INCREMENT) & (2**64 - 1)
        return self._first_token_id + (state >> 33) % (self._vocab_size - self._first_token_id)

    def _prompt_logprobs(self, request: GenerateRequest) -> list[TokenLogprobs | None] | None:
        wanted = request.sampling.prompt_logprobs
        if wanted is None:
            return None
        entries: list[TokenLogprobs | None] = [None]
        for token_id in request.prompt_token_ids[1:]:
            entries.extend(_logprobs(token_id, wanted, self._vocab_size) or [])
        return entries

    def _stages(self, handoff: KVHandoff | None) -> RequestStages:
        if handoff is None:
            return RequestStages(queue_s=0.0, prefill_s=self._prefill_s)
        return RequestStages(
            kv_transfer_s=0.001,
            first_step_s=self._step_s,
            kv_bytes=handoff.num_tokens * _BYTES_PER_TOKEN,
        )


def _error(
    request: GenerateRequest, code: ErrorCode, message: str, failures: Sequence[str] = ()
) -> EngineOutput:
    return EngineOutput(
        request_id=request.request_id,
        finish_reason=FinishReason.ERROR,
        error=message,
        error_code=code.value,
        retry_after_s=1.0,
        load_failures=list(failures),
    )


def _finish(
    request: GenerateRequest, output: Sequence[int]
) -> tuple[FinishReason | None, int | None]:
    sampling = request.sampling
    if len(output) >= sampling.min_tokens:
        if output[-1] in sampling.eos_token_ids and not sampling.ignore_eos:
            return FinishReason.STOP, None
        if output[-1] in sampling.stop_token_ids:
            return FinishReason.STOP, output[-1]
    if len(output) >= sampling.max_tokens:
        return FinishReason.LENGTH, None
    return None, None


def _logprobs(token_id: int, num_top: int | None, vocab_size: int) -> list[TokenLogprobs] | None:
    """Logprobs that depend on the token alone; the token itself is always the likeliest."""
    if num_top is None:
        return None
    logprob = -1.0 - (token_id % 8) / 8
    top = [((token_id + rank) % vocab_size, logprob - rank) for rank in range(num_top)]
    return [TokenLogprobs(token_id, logprob, 1, top)]


def _shape(block_size: int, num_ranks: int) -> KVShape:
    return KVShape(
        num_blocks=_NUM_BLOCKS,
        num_layers=num_ranks,
        num_planes=2,
        num_kv_heads=1,
        head_dim=1,
        dtype_bytes=_BYTES_PER_TOKEN // 2,
        block_size=block_size,
        stages=tuple((rank, rank + 1) for rank in range(num_ranks)),
    )
