"""Requests to stop a server: who made them, and how urgent they are.

SIGTERM comes from a system that also tells others that this server stops, which takes a moment;
SIGINT comes from a person who waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Self


class StopSignals:
    """Counts SIGINT and SIGTERM while the block runs; the second one insists."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self.asked = asyncio.Event()
        self.insisted = asyncio.Event()

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._receive, number)
        return self

    def __exit__(self, *_: object) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    def delay_s(self, configured_s: float) -> float:
        """How long to keep accepting requests, while their senders learn of the stop elsewhere."""
        return configured_s if self.first is signal.SIGTERM else 0.0

    def _receive(self, number: signal.Signals) -> None:
        if self.first is None:
            self.first = number
            self.asked.set()
        else:
            self.insisted.set()


async def wait_for(event: asyncio.Event, seconds: float) -> None:
    """Wait for `event` for at most `seconds`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
