"""How tests end an HTTP server so that nothing of it is left in their event loop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiohttp import web

_TURNS = 3
"""Of the event loop, from a connection that is accepted to one that the server knows."""


async def cleaned_up(runner: web.AppRunner) -> None:
    """Listen no more, then close all connections: also one that came in the last moment."""
    for site in list(runner.sites):
        await site.stop()
    for _ in range(_TURNS):
        await asyncio.sleep(0)
    await runner.cleanup()
