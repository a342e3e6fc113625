"""An event loop whose timers are not rounded to milliseconds.

epoll's timeout is in whole milliseconds, and asyncio rounds up, so every send would be half a
millisecond late on average. `select` accepts microseconds, and can wait for an epoll object.
"""

from __future__ import annotations

import asyncio
import select
import selectors
from typing import Final

_MAX_SELECT_FD: Final = 1023


def new_precise_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop with timers as exact as the kernel's, if the system has epoll."""
    if not hasattr(selectors, "EpollSelector"):
        return asyncio.new_event_loop()
    return asyncio.SelectorEventLoop(_PreciseSelector())


class _PreciseSelector(selectors.EpollSelector):
    """Waits with `select` for the epoll object, then polls it without waiting."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout > 0 and self.fileno() <= _MAX_SELECT_FD:
            select.select([self.fileno()], [], [], timeout)
            timeout = 0
        return super().select(timeout)
