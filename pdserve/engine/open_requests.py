"""The unfinished requests of an engine core, as its server tracks them.

Each request's outputs, and the pieces of a trace, go to their reader; outputs that wait for a
reader who is behind become one; and a full queue refuses more requests. Knows no sockets and no
processes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import TYPE_CHECKING, Final

from msgspec import structs

from pdserve.errors import EngineDeadError, InternalError, OverloadedError
from pdserve.observe.trace import whole
from pdserve.wire.request import EngineOutput

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Collection, Iterable, Sequence

    from pdserve.config.schema import SchedulerConfig
    from pdserve.wire.core_messages import TracePiece
    from pdserve.wire.ids import RequestId
    from pdserve.wire.trace import ProcessTrace


_READ_ALONE: Final = 8
"""Unread outputs of a request and its siblings up to which each stays one of its own."""


class Answers:
    """The outputs of a request and its siblings.

    An output that is read costs the server an event, however many tokens it has. If a server is
    behind its core by more than `_READ_ALONE`, what follows is joined, so that it catches up.

    Attributes:
        num_open: Requests that have not ended.
    """

    def __init__(self, num_open: int) -> None:
        self.num_open = num_open
        self._unread: deque[EngineOutput | EngineDeadError | None] = deque()
        self._come = asyncio.Event()

    def put(self, item: EngineOutput | EngineDeadError | None) -> None:
        """Add an output, the engine's end, or None for an aborted request."""
        if len(self._unread) > _READ_ALONE and (joined := _joined(self._unread[-1], item)):
            self._unread[-1] = joined
        else:
            self._unread.append(item)
            self._come.set()

    async def next(self) -> EngineOutput | None:
        """Wait for the next output; None when all have ended.

        Raises:
            EngineDeadError: The engine ended before they did.
        """
        while self.num_open:
            while not self._unread:
                self._come.clear()
                await self._come.wait()
            match self._unread.popleft():
                case EngineDeadError() as error:
                    self.num_open = 0
                    raise error
                case EngineOutput() as output:
                    return output
                case None:
                    self.num_open -= 1
        return None


def _joined(first: object, second: object) -> EngineOutput | None:
    """Return two outputs of a request as one; None unless they tell of tokens alone."""
    if not isinstance(first, EngineOutput) or not isinstance(second, EngineOutput):
        return None
    if first.request_id != second.request_id:
        return None
    if not _has_only_tokens(first) or not _has_only_tokens(second):
        return None
    logprobs = None
    if first.logprobs is not None and second.logprobs is not None:
        logprobs = first.logprobs + second.logprobs
    ids = first.new_token_ids + second.new_token_ids
    return structs.replace(second, new_token_ids=ids, logprobs=logprobs)


def _has_only_tokens(output: EngineOutput) -> bool:
    """Whether it is neither a request's first output nor its last one."""
    return (
        bool(output.new_token_ids)
        and output.finish_reason is None
        and output.stages is None
        and output.prompt_logprobs is None
        and output.pooled is None
    )


class OpenRequests:
    """All open requests of one core; `len` counts them."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._max_waiting = config.max_waiting
        self._max_waiting_tokens = config.max_waiting_tokens
        self._answers: dict[RequestId, Answers] = {}
        self._num_tokens_waiting: dict[RequestId, int] = {}

    def __len__(self) -> int:
        return len(self._answers)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._answers

    def add(self, request_ids: Collection[RequestId], num_tokens: int) -> Answers:
        """Open requests that share a prompt of `num_tokens` tokens.

        Raises:
            InternalError: One of these ids is open already.
        """
        for request_id in request_ids:
            if request_id in self._answers:
                raise InternalError(f"request {request_id} is running already")
        answers = Answers(len(request_ids))
        self._answers.update(dict.fromkeys(request_ids, answers))
        self._num_tokens_waiting.update(dict.fromkeys(request_ids, num_tokens))
        return answers

    def refuse_if_full(self, num_tokens: int, *, max_running: int, num_waiting: int) -> None:
        """Refuse a request that would make the queue too long. An empty queue takes any.

        Args:
            num_tokens: Prompt tokens of all its choices together.
            max_running: Maximum requests that the core runs at a time.
            num_waiting: Requests that waited there a step ago.

        Raises:
            OverloadedError: Too many requests, or too many prompt tokens, wait.
        """
        # Snapshots are a step old: only this class knows the requests sent since then.
        num_waiting = max(len(self._answers) - max_running, num_waiting)
        if num_waiting >= self._max_waiting:
            raise OverloadedError(
                f"too many requests are waiting ({num_waiting}, at most {self._max_waiting}): "
                "try again later"
            )
        num_tokens_waiting = sum(self._num_tokens_waiting.values())
        if num_tokens_waiting and num_tokens_waiting + num_tokens > self._max_waiting_tokens:
            raise OverloadedError(
                f"too many prompt tokens are waiting ({num_tokens_waiting}, and this request adds "
                f"{num_tokens} over all its choices; at most {self._max_waiting_tokens}): try "
                "again later"
            )

    def deliver(self, output: EngineOutput) -> bool:
        """Pass an output on to its reader; False if there is none."""
        answers = self._answers.get(output.request_id)
        if output.new_token_ids:
            self._num_tokens_waiting.pop(output.request_id, None)
        if answers is not None:
            answers.put(output)
        return answers is not None

    def end(self, request_id: RequestId) -> None:
        """Close a request whose last output was read."""
        answers = self._close(request_id)
        if answers is not None:
            answers.num_open -= 1

    def abort(self, request_ids: Iterable[RequestId]) -> list[RequestId]:
        """Close requests and wake their readers; return those that were open."""
        known = [request_id for request_id in request_ids if request_id in self._answers]
        for request_id in known:
            answers = self._close(request_id)
            if answers is not None:
                answers.put(None)
        return known

    def close(self, request_ids: Iterable[RequestId], answers: Answers) -> list[RequestId]:
        """Close the requests that are still open after their reader has left; return them."""
        left = [each for each in request_ids if self._answers.get(each) is answers]
        for request_id in left:
            self._close(request_id)
        return left

    def _close(self, request_id: RequestId) -> Answers | None:
        self._num_tokens_waiting.pop(request_id, None)
        return self._answers.pop(request_id, None)

    def fail(self, reason: str) -> None:
        """Tell every reader that the engine has ended."""
        for answers in self._answers.values():
            answers.put(EngineDeadError(reason))


class TraceDump:
    """A dump of a core's trace on its way here.

    Args:
        trace: Future that is set when the last piece has come.
    """

    def __init__(self, trace: asyncio.Future[ProcessTrace]) -> None:
        self.trace = trace
        self._pieces: list[bytes] = []

    def take(self, piece: TracePiece) -> None:
        """Take one more piece."""
        if piece.events:
            self._pieces.append(piece.events)
        if piece.process is not None and not self.trace.done():
            self.trace.set_result(whole(piece.process, self._pieces))

    def fail(self, reason: str) -> None:
        """Fail the dump: there will be no more pieces."""
        if not self.trace.done():
            self.trace.set_exception(EngineDeadError(reason))


class MergedOutputs:
    """Merges the outputs of several generators, in order of arrival.

    A single one is read directly; several have a task each. `close` must be called; it closes them.

    Args:
        sources: At least one.
    """

    def __init__(self, sources: Sequence[AsyncGenerator[EngineOutput, None]]) -> None:
        self._queue: asyncio.Queue[EngineOutput | Exception | None] = asyncio.Queue()
        self._single = sources[0] if len(sources) == 1 else None
        self._tasks: list[asyncio.Task[None]] = []
        if self._single is None:
            for source in sources:
                task = asyncio.create_task(self._pump(source))
                task.add_done_callback(self._note_end)
                self._tasks.append(task)
        self._num_open = len(self._tasks)

    async def next(self) -> EngineOutput | None:
        """Return the next output; None when all generators have ended.

        Raises:
            PdserveError: One of them failed.
        """
        if self._single is not None:
            return await anext(self._single, None)
        while self._num_open:
            item = await self._queue.get()
            if isinstance(item, Exception):
                raise item
            if item is not None:
                return item
            self._num_open -= 1
        return None

    async def close(self) -> list[EngineOutput]:
        """Close the generators and return the unread outputs."""
        if self._single is not None:
            await self._single.aclose()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        unread = []
        while not self._queue.empty():
            item = self._queue.get_nowait()
            if item is not None and not isinstance(item, Exception):
                unread.append(item)
        return unread

    async def _pump(self, source: AsyncGenerator[EngineOutput, None]) -> None:
        async with contextlib.aclosing(source) as outputs:
            async for output in outputs:
                self._queue.put_nowait(output)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            error = task.exception()
            self._queue.put_nowait(error if isinstance(error, Exception) else None)
