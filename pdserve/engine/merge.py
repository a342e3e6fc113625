"""Several generators of engine outputs as one, in order of arrival."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from pdserve.wire.request import EngineOutput


class MergedOutputs:
    """Hands out what the generators yield.

    One is read directly; several have a task each. `close` must be called; it closes them.

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
        """Close the generators and return what nobody has read."""
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
