"""Limits how many requests run at once, how many may wait, and for how long.

Knows numbers and time only. First come, first served; O(1) per request.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from pdserve.errors import OverloadedError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

RETRY_AFTER_S = 1.0


class AdmissionQueue:
    """A counter of running requests with a bounded queue in front of it.

    Args:
        max_concurrent: Requests that may run at once.
        queue_size: Requests that may wait for a place.
        queue_timeout_s: How long one may wait.
    """

    def __init__(self, max_concurrent: int, queue_size: int, queue_timeout_s: float) -> None:
        self._max_concurrent = max_concurrent
        self._queue_size = queue_size
        self._queue_timeout_s = queue_timeout_s
        self._num_running = 0
        self._waiters: deque[asyncio.Future[None]] = deque()

    @property
    def num_running(self) -> int:
        """Requests that hold a place."""
        return self._num_running

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiters)

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Hold a place while the block runs.

        Raises:
            OverloadedError: The queue is full, or the wait was too long.
        """
        await self._acquire()
        try:
            yield
        finally:
            self._release()

    def require_room(self) -> None:
        """Check that one more request may run or wait.

        Raises:
            OverloadedError: It would be refused now.
        """
        if self._num_running >= self._max_concurrent and len(self._waiters) >= self._queue_size:
            raise OverloadedError(
                f"{self._num_running} requests run and {len(self._waiters)} wait: try again later",
                retry_after_s=RETRY_AFTER_S,
            )

    async def _acquire(self) -> None:
        if self._num_running < self._max_concurrent:
            self._num_running += 1
            return
        self.require_room()
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout(self._queue_timeout_s):
                await waiter
        except TimeoutError:
            self._give_up(waiter)
            raise OverloadedError(
                f"no place within {self._queue_timeout_s:g} s: try again later",
                retry_after_s=RETRY_AFTER_S,
            ) from None
        except asyncio.CancelledError:
            self._give_up(waiter)
            raise

    def _give_up(self, waiter: asyncio.Future[None]) -> None:
        """Leave the queue; pass on a place that was granted in the same moment."""
        if waiter.done() and not waiter.cancelled():
            self._release()
        elif waiter in self._waiters:
            self._waiters.remove(waiter)

    def _release(self) -> None:
        """Hand the place to the next in line, or give it back."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        self._num_running -= 1
