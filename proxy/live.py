"""The requests that run now, and whether more are taken. Knows their stories only."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from pdserve.proxy.story import Story


class Live:
    """All that run in one proxy.

    Attributes:
        is_closed: Set on shutdown: what runs goes on, nothing more is taken.
        is_idle: Set while nothing runs.
    """

    def __init__(self) -> None:
        self._stories: dict[int, Story] = {}
        self.is_closed = False
        self.is_idle = asyncio.Event()
        self.is_idle.set()

    @property
    def stories(self) -> Collection[Story]:
        """Those that run, the one that came first before the others; a view, never a copy."""
        return self._stories.values()

    @contextmanager
    def hold(self, story: Story) -> Iterator[None]:
        """Count a request among those that run for as long as the block does."""
        self._stories[id(story)] = story
        self.is_idle.clear()
        try:
            yield
        finally:
            del self._stories[id(story)]
            if not self._stories:
                self.is_idle.set()
