"""Requests to stop a server: who made them, and how urgent they are.

SIGTERM comes from a system that also tells others that this server stops, which takes a moment;
SIGINT comes from a person who waits, and SIGHUP from a terminal that closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import TYPE_CHECKING

from pdserve.lifeline import heeded_signals

if TYPE_CHECKING:
    from typing import Self


class StopSignals:
    """Counts stop signals while the block runs, and from the first one on; the second insists."""

    def __init__(self) -> None:
        self._heeded = heeded_signals()
        self.first: signal.Signals | None = None
        self.asked = asyncio.Event()
        self.insisted = asyncio.Event()

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for number in self._heeded:
            loop.add_signal_handler(number, self._receive, number)
        return self

    def __exit__(self, *_: object) -> None:
        if self.first is not None:  # one more would raise amid the end of the loop
            return
        loop = asyncio.get_running_loop()
        for number in self._heeded:
            loop.remove_signal_handler(number)

    def delay_s(self, configured_s: float) -> float:
        """How long to keep accepting requests, while their senders learn of the stop elsewhere."""
        return 0.0 if self.first is signal.SIGINT else configured_s

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
