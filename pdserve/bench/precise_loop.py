"""An event loop whose timers are not rounded to milliseconds.

epoll's timeout is whole milliseconds, and asyncio rounds up: half a millisecond late on average,
which would be the client's doing in every send. `select` takes microseconds, and an epoll
object can be selected on.
"""

from __future__ import annotations

import asyncio
import select
import selectors
from typing import Final

_MAX_SELECT_FD: Final = 1023


def new_precise_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop with timers as exact as the kernel's, where the system has epoll."""
    if not hasattr(selectors, "EpollSelector"):
        return asyncio.new_event_loop()
    return asyncio.SelectorEventLoop(_PreciseSelector())


class _PreciseSelector(selectors.EpollSelector):
    """Waits in `select` on the epoll object, then asks it without waiting."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout > 0 and self.fileno() <= _MAX_SELECT_FD:
            select.select([self.fileno()], [], [], timeout)
            timeout = 0
        return super().select(timeout)
