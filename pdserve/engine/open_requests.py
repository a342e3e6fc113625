"""Requests that an engine core was sent and that have not ended, as their server knows them.

What the core says of each goes to whoever reads it, and a queue that is full refuses more. Knows
no sockets and no processes.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from pdserve.errors import EngineDeadError, InternalError, OverloadedError
from pdserve.wire.request import EngineOutput

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdserve.config.schema import SchedulerConfig
    from pdserve.wire.ids import RequestId


class Answers:
    """The outputs of a request and its siblings.

    Attributes:
        open_ids: Those that have not ended.
    """

    def __init__(self, request_ids: Iterable[RequestId]) -> None:
        self.open_ids = set(request_ids)
        self._queue: asyncio.Queue[EngineOutput | RequestId | EngineDeadError] = asyncio.Queue()

    def put(self, item: EngineOutput | RequestId | EngineDeadError) -> None:
        """Add an output, the id of a request that was aborted, or the engine's end."""
        self._queue.put_nowait(item)

    async def next(self) -> EngineOutput | None:
        """Wait for the next output; None when all have ended.

        Raises:
            EngineDeadError: The engine ended before they did.
        """
        while self.open_ids:
            match await self._queue.get():
                case EngineDeadError() as error:
                    self.open_ids.clear()
                    raise error
                case EngineOutput() as output:
                    return output
                case request_id:
                    self.open_ids.discard(request_id)
        return None


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

    def add(self, request_ids: Iterable[RequestId], num_tokens: int) -> Answers:
        """Open requests that have a prompt of `num_tokens` tokens in common.

        Raises:
            InternalError: One of these ids is open already.
        """
        answers = Answers(request_ids)
        for request_id in answers.open_ids:
            if request_id in self._answers:
                raise InternalError(f"request {request_id} is running already")
        self._answers.update(dict.fromkeys(answers.open_ids, answers))
        self._num_tokens_waiting.update(dict.fromkeys(answers.open_ids, num_tokens))
        return answers

    def refuse_if_full(self, num_tokens: int, *, max_running: int, num_waiting: int) -> None:
        """Refuse a request that would make the queue too long. An empty one takes any.

        Args:
            num_tokens: Prompt tokens, of all its choices.
            max_running: Requests that the core runs at a time.
            num_waiting: Requests that waited there a step ago.

        Raises:
            OverloadedError: Too many requests, or too many prompt tokens, wait.
        """
        # Snapshots are a step old: what was sent since then is known here alone.
        num_waiting = max(len(self._answers) - max_running, num_waiting)
        if num_waiting >= self._max_waiting:
            raise OverloadedError(
                f"{num_waiting} requests wait already (at most {self._max_waiting})",
                retry_after_s=1.0,
            )
        num_tokens_waiting = sum(self._num_tokens_waiting.values())
        if num_tokens_waiting and num_tokens_waiting + num_tokens > self._max_waiting_tokens:
            raise OverloadedError(
                f"{num_tokens_waiting} prompt tokens wait already, and this request has "
                f"{num_tokens} (over all choices; at most {self._max_waiting_tokens} may wait)",
                retry_after_s=1.0,
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
        answers = self._answers.pop(request_id, None)
        self._num_tokens_waiting.pop(request_id, None)
        if answers is not None:
            answers.open_ids.discard(request_id)

    def abort(self, request_ids: Iterable[RequestId]) -> list[RequestId]:
        """Close requests and wake their readers; return those that were open."""
        known = [request_id for request_id in request_ids if request_id in self._answers]
        for request_id in known:
            answers = self._answers.pop(request_id)
            self._num_tokens_waiting.pop(request_id, None)
            answers.put(request_id)
        return known

    def fail(self, reason: str) -> None:
        """Tell every reader that the engine has ended."""
        for answers in self._answers.values():
            answers.put(EngineDeadError(reason))
