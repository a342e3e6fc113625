"""Relays the log lines of a supervisor's children, under their names and in its own format."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sys
import time
from typing import Final, NamedTuple

from pdserve.config.log import LogFormat

_TEXT: Final = re.compile(r"\S+Z (DEBUG|INFO|WARNING|ERROR|CRITICAL) (pdserve\.\S+)")
_REQUEST: Final = re.compile(r"req (\S+) (.*)")


class ChildLine(NamedTuple):
    """A line of a child's log.

    Attributes:
        level: As in `logging`; None if the line is not of pdserve's own log.
        logger: Name of the logger; empty for text that is not of pdserve's own log.
        request: Id of the request that the line is about, and its text; both empty if there is
            none.
        record: The line as a JSON object, if it is one.
    """

    text: str
    level: int | None
    logger: str
    request: tuple[str, str]
    record: dict[str, object] | None


def read(text: str) -> ChildLine:
    """Parse a line."""
    record = _object_in(text)
    if record is not None:
        logger = str(record.get("logger"))
        is_ours = logger.startswith("pdserve.")
        level = logging.getLevelNamesMapping().get(str(record.get("level"))) if is_ours else None
        is_request = record.get("event") == "request"
        request = (str(record.get("request")), text) if is_request else ("", "")
        return ChildLine(text, level, logger, request, record)
    match, request_match = _TEXT.match(text), _REQUEST.search(text)
    level = logging.getLevelNamesMapping()[match[1]] if match is not None else None
    request = (request_match[1], request_match[2]) if request_match is not None else ("", "")
    return ChildLine(text, level, match[2] if match is not None else "", request, None)


def show(name: str, line: ChildLine, form: LogFormat, *, width: int) -> None:
    """Write a line to stderr under a child's name.

    It is lost if stderr takes none, as on a full disk: a child whose lines nobody reads would wait
    until somebody does.

    Args:
        width: Width of the widest name, in columns.
    """
    if form is LogFormat.TEXT:
        shown = f"{name.ljust(width)} | {line.text}"
    else:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        record = line.record or {"time": now, "level": "INFO", "event": line.text}
        shown = json.dumps({"process": name, **record})
    with contextlib.suppress(OSError):
        print(shown, file=sys.stderr, flush=True)


def _object_in(text: str) -> dict[str, object] | None:
    if not text.startswith("{"):
        return None
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
