"""Logs a summary at an interval while there is work."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from pdserve.observe.log import STATS, LogEvent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_log = logging.getLogger(STATS)

INTERVAL_S: Final = 10.0


async def log_stats(
    read: Callable[[], Mapping[str, object] | None], *, interval_s: float = INTERVAL_S
) -> None:
    """Log what `read` returns at each interval, for ever; nothing where it returns None."""
    if not _log.isEnabledFor(logging.INFO):
        return
    read()  # from now on
    while True:
        await asyncio.sleep(interval_s)
        if (fields := read()) is not None:
            _log.info(LogEvent("stats", fields))


def share(part: float, whole: float) -> float | None:
    """Return `part / whole` to three digits; None if there is no whole."""
    return round(part / whole, 3) if whole else None
