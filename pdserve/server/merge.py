"""Several engine requests' outputs as one sequence, in order of arrival."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from pdserve.engine.client import EngineClient
    from pdserve.wire.request import EngineOutput, GenerateRequest


class MergedOutputs:
    """Submits requests and hands out what comes back.

    One request is read directly; several have a task each. `close` must be called; it
    aborts what still runs.

    Args:
        requests: By a key that comes back with each output. At least one.
    """

    def __init__(self, client: EngineClient, requests: Mapping[int, GenerateRequest]) -> None:
        self._queue: asyncio.Queue[tuple[int, EngineOutput] | Exception] = asyncio.Queue()
        self._single: AsyncGenerator[EngineOutput, None] | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._key = next(iter(requests))
        if len(requests) == 1:
            self._single = client.generate(requests[self._key])
        else:
            for key, request in requests.items():
                task = asyncio.create_task(self._pump(key, client, request))
                task.add_done_callback(self._pass_on_failure)
                self._tasks[key] = task

    async def next(self) -> tuple[int, EngineOutput]:
        """Return the next output.

        Raises:
            PdserveError: One of the requests failed.
        """
        if self._single is not None:
            return self._key, await anext(self._single)
        item = await self._queue.get()
        if isinstance(item, Exception):
            raise item
        return item

    async def drop(self, key: int) -> None:
        """Abort one request; the others go on."""
        if self._single is not None:
            await self._single.aclose()
        elif key in self._tasks:
            await _cancel([self._tasks.pop(key)])

    async def close(self) -> list[EngineOutput]:
        """Abort what still runs and return what nobody has read."""
        if self._single is not None:
            await self._single.aclose()
        await _cancel(list(self._tasks.values()))
        unread = []
        while not self._queue.empty():
            item = self._queue.get_nowait()
            if not isinstance(item, Exception):
                unread.append(item[1])
        return unread

    async def _pump(self, key: int, client: EngineClient, request: GenerateRequest) -> None:
        async with contextlib.aclosing(client.generate(request)) as outputs:
            async for output in outputs:
                self._queue.put_nowait((key, output))

    def _pass_on_failure(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self._queue.put_nowait(error)


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
