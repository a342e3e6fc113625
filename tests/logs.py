"""Loggers are global: what a test does to them is undone."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from pdserve.observe.log import REQUESTS, STATS

_NAMES = ("pdserve", REQUESTS, STATS, "aiohttp", "aiohttp.server", "asyncio", "py.warnings")


@contextlib.contextmanager
def unchanged_logging() -> Iterator[None]:
    """Whatever the block configures, the loggers are afterwards as they were."""
    loggers = [logging.getLogger(name) for name in _NAMES]
    before = [(each.handlers[:], each.filters[:], each.level, each.propagate) for each in loggers]
    try:
        yield
    finally:
        logging.captureWarnings(capture=False)
        for each, values in zip(loggers, before, strict=True):
            each.handlers[:], each.filters[:], level, each.propagate = values
            each.setLevel(level)
