"""An asyncio loop in which waiting takes no time: when nothing is ready, the clock jumps.

Everything runs in one thread and in an order that follows from the program alone, so that a
seed says all there is to know about a run. Knows nothing of engines.
"""

from __future__ import annotations

import asyncio
import selectors
from typing import TYPE_CHECKING, Any, TypeVar

from pdserve.observe.clock import ManualClock

if TYPE_CHECKING:
    from collections.abc import Coroutine

T = TypeVar("T")


class StuckError(Exception):
    """Nothing is ready, and nothing ever will be."""


class _Selector(selectors.SelectSelector):
    """Never waits: the time it was to wait is added to the clock."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise StuckError("every task waits for another one")
        if timeout > 0:
            # A whole nanosecond at least, or the timer that is waited for may never be due.
            self._clock.advance(timeout + 1e-9)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """See the module."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(_Selector(clock))
        self._clock = clock

    def time(self) -> float:
        return self._clock.monotonic_s()


def run(clock: ManualClock, main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end on a loop of its own, in virtual time."""
    loop = VirtualLoop(clock)
    try:
        return loop.run_until_complete(main)
    finally:
        try:
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            if left:
                loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()
