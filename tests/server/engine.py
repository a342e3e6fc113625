"""The engine of server tests: a real core over toy ranks, with troubles on demand."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING

import msgspec

from pdserve.config.schema import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    Role,
    SchedulerConfig,
    TransferConfig,
)
from pdserve.connectors.memory import MemoryConnector
from pdserve.connectors.memory.exchange import Exchange
from pdserve.engine.loading import start_engine
from pdserve.errors import OverloadedError, StartingError
from pdserve.kvcache.manager import SharedPrompt
from pdserve.observe.clock import SystemClock
from pdserve.wire.ids import EngineId, Incarnation
from tests.faulty import FaultKind, FaultyConnector, Plan
from tests.local_engine import LocalEngine, TimedExecutor
from tests.toy_executor import ToyModel, toy_shape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.wire.ids import RequestId
    from pdserve.wire.request import EngineOutput, EngineStats, GenerateRequest
    from pdserve.wire.step import SchedulerOutput
    from tests.toy_request import ToyRequest

    NextToken = Callable[[ToyRequest, Sequence[int]], int]

_TICK_S = 0.02
_STEP_S = 0.0002
"""A step that took no time would be followed by all others before anybody is told of it."""
_lives = itertools.count()


class MemoryNetwork:
    """What engines share that can read one another's KV."""

    def __init__(self) -> None:
        self.exchange = Exchange()


class ScriptedModel(ToyModel):
    """Samples what a test says; None leaves it to the toy."""

    def __init__(
        self, next_token: NextToken | None, eos_after: int | None, *args: int, **named: int
    ) -> None:
        super().__init__(*args, **named)
        self._next_token = next_token
        self._eos_after = eos_after

    def next_token(self, value: int, request: ToyRequest) -> int:
        output = request.output_token_ids
        sampling = request.sampling
        if self._eos_after == len(output) >= sampling.min_tokens and not sampling.ignore_eos:
            return sampling.eos_token_ids[0]
        if self._next_token is not None:
            return self._next_token(request, output)
        return super().next_token(value, request)


class ServedEngine(LocalEngine):
    """See `LocalEngine`.

    Args:
        network: Shared with its peers.
        die_after: It ends when it has given out so many tokens, over all requests.
        max_waiting: Further requests than this at once are refused; None refuses none.
        ready: Whether it is ready from the start; else `become_ready` makes it so.
        can_push: Whether it says that it takes tickets.
        num_broken: So many copies arrive with wrong bytes; a pull is tried twice, and so is a push.
        num_cached_tokens: What it says that its prefix cache has of every prompt.
        next_token, eos_after: Script its model: what follows an output, and that the token at this
            position (from 0) is the end of sequence.
        vocab_size, first_token_id: See `ToyModel`.
        max_num_seqs: Requests of a step.
        lease_s: How long the KV of what it hands over is kept without a word.
        prefill_s, step_s: Seconds of a step that computes prompts, and of others.

    Attributes:
        requests: Everything submitted, in order.
        aborted: Ids of the requests that were closed before their end.
        released: Nonces given up by `release_lease`, known or not.
        num_prefix_cache_resets: Calls of `reset_prefix_cache`.
    """

    def __init__(
        self,
        *,
        network: MemoryNetwork | None = None,
        role: str = "both",
        engine_id: str = "toy",
        max_model_len: int = 2048,
        num_ranks: int = 1,
        recompute_tokens_per_s: int = 8192,
        die_after: int | None = None,
        max_waiting: int | None = None,
        ready: bool = True,
        can_push: bool = False,
        num_broken: int = 0,
        num_cached_tokens: int = 0,
        next_token: NextToken | None = None,
        eos_after: int | None = None,
        vocab_size: int = 256,
        first_token_id: int = 0,
        max_num_seqs: int = 128,
        lease_s: float = 30.0,
        prefill_s: float = _STEP_S,
        step_s: float = _STEP_S,
    ) -> None:
        config = EngineConfig(
            model=ModelConfig(model="toy"),
            role=Role(role),
            engine_id=engine_id,
            cache=CacheConfig(block_size=16),
            scheduler=SchedulerConfig(
                max_num_seqs=max_num_seqs, recompute_tokens_per_s=recompute_tokens_per_s
            ),
            transfer=TransferConfig(kv_connector="memory", lease_s=lease_s),
        )
        network = network or MemoryNetwork()
        connector = FaultyConnector.around(
            MemoryConnector(exchange=network.exchange),
            Plan(script={FaultKind.CORRUPT: range(num_broken)}),
        )
        identity = EngineId(engine_id), Incarnation(f"life-{next(_lives)}")

        def seconds(step: SchedulerOutput) -> float:
            is_prefill = any(
                new.num_computed_tokens < len(new.prompt_token_ids) for new in step.new_requests
            )
            return prefill_s if is_prefill else step_s

        clock = SystemClock()
        executor = TimedExecutor(
            config,
            connector,
            shape=toy_shape(1024, 16, tp=num_ranks),
            engine_id=identity[0],
            incarnation=identity[1],
            max_model_len=max_model_len,
            wake=self.woken,
            clock=clock,
            step_s=seconds,
        )
        executor.max_in_flight = 1
        executor.model = ScriptedModel(next_token, eos_after, vocab_size, first_token_id)
        core, info = start_engine(
            executor,
            connector,
            clock,
            config=config,
            engine_id=identity[0],
            incarnation=identity[1],
        )
        info = msgspec.structs.replace(info, can_push=can_push)
        super().__init__(core, info, executor, clock, tick_s=_TICK_S)
        self._whole_info = info
        self._is_ready = ready
        if not ready:
            self.info = None
        self._is_closing = False
        self._die_after = die_after
        self._max_waiting = max_waiting
        self._num_cached_tokens = num_cached_tokens
        self._num_out = 0
        self._granted: dict[str, RequestId] = {}
        self.requests: list[GenerateRequest] = []
        self.aborted: list[RequestId] = []
        self.released: list[str] = []
        self.num_prefix_cache_resets = 0

    def become_ready(self) -> None:
        """The weights are loaded now."""
        self._is_ready = True
        self.info = self._whole_info

    @property
    def leases(self) -> set[str]:
        """Nonces of the leases this engine has granted and that have not ended."""
        held = self.scheduler.state.requests
        return {nonce for nonce, request_id in self._granted.items() if request_id in held}

    @property
    def stats(self) -> EngineStats | None:
        return super().stats if self._is_ready else None

    async def release_lease(self, nonce: str) -> None:
        self.released.append(nonce)
        await super().release_lease(nonce)

    async def reset_prefix_cache(self) -> None:
        self.num_prefix_cache_resets += 1
        await super().reset_prefix_cache()

    async def close(self, *, timeout_s: float) -> None:
        self._is_closing = True
        end_s = self._clock.monotonic_s() + timeout_s
        while self.running and self._clock.monotonic_s() < end_s:
            await asyncio.sleep(0.005)
        self.die("closed")

    def admit(self) -> None:
        super().admit()
        if not self._is_ready or self._is_closing:
            raise StartingError
        if self._max_waiting is not None and len(self.running) >= self._max_waiting:
            raise OverloadedError("too many requests wait already", retry_after_s=1.0)

    def add(self, request: GenerateRequest) -> None:
        self.requests.append(request)
        is_received = request.handoff is not None or (
            request.ticket is not None and not request.remote_decode
        )
        num_cached = min(self._num_cached_tokens, len(request.prompt_token_ids) - 1)
        self.scheduler.add(request, SharedPrompt(None if is_received else num_cached))

    def left(self, request_id: RequestId) -> None:
        self.aborted.append(request_id)

    def turn(self) -> None:
        super().turn()
        if self._die_after is not None and self._num_out > self._die_after:
            self.die(f"it was to die after {self._die_after} tokens")

    def told(self, output: EngineOutput) -> EngineOutput | None:
        if output.new_token_ids:
            self._num_out += len(output.new_token_ids)
        if self._die_after is not None and self._num_out > self._die_after:
            return None
        handoff = output.handoff
        if handoff is not None:
            self._granted[handoff.nonce] = output.request_id
        return output
