"""An engine client over an engine core in this process and event loop; no ZMQ, no model."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

from pdserve.engine.open_requests import MergedOutputs
from pdserve.errors import EngineDeadError
from pdserve.wire.request import with_siblings
from tests.toy_executor import ToyExecutor

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from pdserve.engine.core import EngineCore
    from pdserve.observe.clock import Clock
    from pdserve.wire.ids import RequestId
    from pdserve.wire.request import EngineInfo, EngineOutput, EngineStats, GenerateRequest, Sibling
    from pdserve.wire.step import ModelRunnerOutput, SchedulerOutput
    from pdserve.wire.trace import ProcessTrace


WIRE_S = 0.0004


class TimedExecutor(ToyExecutor):
    """Runs one step after the other, each for as long as it is said to take.

    Args:
        clock: Says what time it is.
        step_s: Seconds that a step takes.
    """

    def __init__(
        self, *args: Any, clock: Clock, step_s: Callable[[SchedulerOutput], float], **named: Any
    ) -> None:
        super().__init__(*args, **named)
        self._clock = clock
        self._step_s = step_s
        self._due_s: deque[float] = deque()

    @property
    def due_s(self) -> float | None:
        """When the oldest step comes back, by the monotonic clock; None: there is none."""
        return self._due_s[0] if self._due_s else None

    def submit(self, step: SchedulerOutput) -> None:
        start_s = max([self._clock.monotonic_s(), *self._due_s])
        self._due_s.append(start_s + self._step_s(step))
        super().submit(step)

    def poll_result(self) -> ModelRunnerOutput | None:
        if not self._due_s or self._due_s[0] > self._clock.monotonic_s():
            return None
        self._due_s.popleft()
        return super().poll_result()


class LocalEngine:
    """See `EngineClient`. A task turns the core when there is news, or a step is due.

    Args:
        core: Over `executor`, whose connector halves call `woken`.
        clock: Goes as the event loop's time does.
        tick_s: The core is turned this often at least: what moves only when it is asked moves.

    Attributes:
        running: Ids of the requests being answered now.
    """

    _is_waking = False  # a connector may speak before the engine is whole

    def __init__(
        self,
        core: EngineCore,
        info: EngineInfo,
        executor: TimedExecutor,
        clock: Clock,
        *,
        tick_s: float,
    ) -> None:
        self.core = core
        self.scheduler = core.scheduler
        self.executor = executor
        self.info: EngineInfo | None = info
        self.dead_reason: str | None = None
        self.stall_reason: str | None = None
        self.running: dict[RequestId, _Outputs] = {}
        self._clock = clock
        self._tick_s = tick_s
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def wake(self) -> None:
        """There is something to do."""
        self._news.set()

    def woken(self) -> None:
        """Take a connector's word that it has news; a moment passes until they are seen."""
        if not self._is_waking:
            self._is_waking = True
            asyncio.get_running_loop().call_later(WIRE_S, self._wake_late)

    def _wake_late(self) -> None:
        self._is_waking = False
        self.wake()

    @property
    def stats(self) -> EngineStats | None:
        return self.scheduler.stats()

    @property
    def core_stats(self) -> Sequence[EngineStats | None]:
        return [self.stats]

    async def generate(
        self, request: GenerateRequest, siblings: Sequence[Sibling] = ()
    ) -> AsyncGenerator[EngineOutput, None]:
        choices = with_siblings(request, siblings)
        outputs = MergedOutputs([self._generate(choice) for choice in choices])
        try:
            while (output := await outputs.next()) is not None:
                yield output
        finally:
            for unread in await outputs.close():
                if unread.handoff is not None:
                    await self.release_lease(unread.handoff.nonce)

    async def abort(self, request_ids: Sequence[RequestId]) -> None:
        for request_id in request_ids:
            if request_id in self.running:
                self.running.pop(request_id).put(None)

    async def release_lease(self, nonce: str) -> None:
        if self.dead_reason is None:
            self.scheduler.release_lease(nonce)
            self.wake()

    async def keep_leases(self, nonces: Sequence[str]) -> None:
        if self.dead_reason is None:
            self.scheduler.keep_leases(list(nonces))
            self.wake()

    async def hand_over(self, request_ids: Sequence[RequestId]) -> None:
        if self.dead_reason is None:
            self.scheduler.hand_over(request_ids)
            self.wake()

    async def reset_prefix_cache(self) -> None:
        self.scheduler.kv.pool.forget_all()

    async def trace(self, seconds: float) -> list[ProcessTrace]:
        self.admit()
        return []

    async def close(self, *, timeout_s: float) -> None:
        self.die("closed")

    def die(self, reason: str) -> None:
        """End as by SIGKILL, for the first reason given: requests fail, and later ones."""
        if self.dead_reason is not None:
            return
        self.dead_reason = reason
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
        self.core.close(0.0)
        for outputs in self.running.values():
            outputs.put(EngineDeadError(f"the engine has ended: {reason}"))

    # --- what a kind of engine does in its own way

    def admit(self) -> None:
        """Raise what keeps a request from being taken."""
        if self.dead_reason is not None:
            raise EngineDeadError(f"the engine has ended: {self.dead_reason}")

    def add(self, request: GenerateRequest) -> None:
        """Give a request to the core."""
        self.scheduler.add(request)

    def told(self, output: EngineOutput) -> EngineOutput | None:
        """Return an output as it comes to its server; None: it does not come."""
        return output

    def ended(self, error: Exception) -> None:
        """The core has raised."""
        self.die(f"{type(error).__name__}: {error}")

    def left(self, request_id: RequestId) -> None:
        """A request was closed before its end."""

    # --- the core

    async def _generate(self, request: GenerateRequest) -> AsyncGenerator[EngineOutput, None]:
        self.admit()
        outputs = self.running[request.request_id] = _Outputs()
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        self.add(request)
        self.wake()
        has_ended = False
        try:
            while not has_ended:
                output = await outputs.next()
                if output is None:
                    return
                has_ended = output.finish_reason is not None
                if has_ended:
                    self.running.pop(request.request_id, None)
                yield output
        finally:
            self.running.pop(request.request_id, None)
            if not has_ended and self.dead_reason is None:
                self.left(request.request_id)
                self.scheduler.abort([request.request_id])
                self.wake()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self.dead_reason is None:
                self._news.clear()
                self.turn()
                now_s = self._clock.monotonic_s()
                due_s = min(now_s + self._tick_s, self.executor.due_s or now_s + self._tick_s)
                handle = loop.call_at(due_s, self.wake)
                await self._news.wait()
                handle.cancel()
        except Exception as error:
            self.ended(error)

    def turn(self) -> None:
        """All that can be done now."""
        self.core.step(self._publish)

    def _publish(self, outputs: list[EngineOutput]) -> None:
        for each in outputs:
            output = self.told(each)
            if output is not None and output.request_id in self.running:
                self.running[output.request_id].put(output)


class _Outputs:
    """Outputs of one request on their way to its server."""

    def __init__(self) -> None:
        self._ready: deque[EngineOutput | EngineDeadError | None] = deque()
        self._event = asyncio.Event()

    def put(self, output: EngineOutput | EngineDeadError | None) -> None:
        """None: there will be no more of them."""
        self._ready.append(output)
        self._event.set()

    async def next(self) -> EngineOutput | None:
        while not self._ready:
            self._event.clear()
            await self._event.wait()
        output = self._ready.popleft()
        if isinstance(output, EngineDeadError):
            raise output
        return output
