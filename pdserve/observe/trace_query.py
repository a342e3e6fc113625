"""Query and answer of `/debug/trace`, the same at engines' servers and proxies."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING

import msgspec

from pdserve.errors import BadRequestError
from pdserve.observe.chrome_trace import ChromeTrace
from pdserve.observe.trace import HORIZON_S, whole

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.observe.trace import Dump
    from pdserve.wire.trace import Collection, ProcessTrace

DEFAULT_SECONDS = 10.0


class TraceQuery(msgspec.Struct, frozen=True):
    """The last `seconds`, as a `Collection` in JSON or as a trace that viewers read."""

    seconds: float
    is_chrome: bool

    def encode(self, collection: Collection) -> bytes:
        """The answer: a collection at once, a trace in some seconds for each 100,000 events."""
        if self.is_chrome:
            return b"".join(ChromeTrace(collection).pieces())
        return msgspec.json.encode(collection)


def trace_query(query: Mapping[str, str]) -> TraceQuery:
    """Read `?seconds=N&format=json|chrome`; both may be left out.

    Raises:
        BadRequestError: One of them is not that.
    """
    given = query.get("seconds", f"{DEFAULT_SECONDS:g}")
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= HORIZON_S:
        raise BadRequestError(
            f"seconds is {given!r}: it must be above 0 and at most {HORIZON_S:g}, the time for "
            "which events are kept",
            param="seconds",
        )
    form = query.get("format", "json")
    if form not in ("json", "chrome"):
        raise BadRequestError(f"format is {form!r}: use json or chrome", param="format")
    return TraceQuery(seconds, form == "chrome")


async def gathered(dump: Dump) -> ProcessTrace:
    """Return this process's own dump; streams go on between two of its pieces."""
    pieces = []
    for piece in dump.pieces:
        pieces.append(piece)
        await asyncio.sleep(0)
    return whole(dump.process, pieces)
