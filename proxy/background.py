"""Work of the proxy that outlives the request that started it: releases, abandoned legs, drains."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from pdserve.observe.log import log_event

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any, TypeVar

    T = TypeVar("T")

log = logging.getLogger(__name__)


class BackgroundTasks:
    """Tasks that outlive the request that started them; awaited when the proxy ends."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run `work`; an exception it ends with is logged."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log_event(log, "background task failed", level=logging.ERROR, exc_info=error)

    async def join(self, timeout_s: float) -> None:
        """Wait for all tasks; cancel those that are still running then."""
        while self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=timeout_s)
            for task in late:
                task.cancel()
