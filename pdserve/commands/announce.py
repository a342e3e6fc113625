"""Messages that a command prints when it starts and when it fails, and commands to try next."""

from __future__ import annotations

import enum
import logging
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pdserve
from pdserve.config.load import Resolved, Source
from pdserve.errors import PdserveError
from pdserve.observe.log import LogEvent

START: Final = "pdserve.start"
"""Name of the logger for the start of a command and the reason of its end."""
_log = logging.getLogger(START)

_SECRET: Final = ("secret", "api-key", "operator-key")


def title(command: str) -> str:
    """Return a command's name and version."""
    return f"pdserve {command} {pdserve.__version__}"


def program() -> str:
    """Return how to call pdserve, for commands that users may copy.

    A virtual environment need not be active for its `pdserve` to run, as in `make up`.
    """
    called = Path(sys.argv[0])
    if called.name == "__main__.py":
        return f"{shlex.quote(sys.executable)} -m pdserve"
    found = shutil.which("pdserve")
    if found is not None and Path(found).resolve() == called.resolve():
        return "pdserve"
    return shlex.quote(str(called))


def log_start(command: str, resolved: Mapping[str, Resolved]) -> None:
    """Log the start of a command, with each given setting and its source."""
    given = {
        flag: {"value": _shown(flag, item.value), "from": _origin(item)}
        for flag, item in resolved.items()
        if item.source is not Source.DEFAULT
    }
    words = [f"{flag} = {each['value']} ({each['from']})" for flag, each in given.items()]
    rest = "all else at its default" if given else "all at its default"
    fields = {"command": command, "version": pdserve.__version__, "settings": given}
    text = f"{title(command)}: {', '.join([*words, rest])}"
    _log.info(LogEvent("start", fields, text))


def say(text: str, end: str = "\n") -> None:
    """Write to the person who runs the command."""
    print(text, end=end, flush=True)


def tell_note(text: str) -> None:
    """Report a setting without effect: in the command's log or, without one, on stderr."""
    if logging.getLogger("pdserve").handlers:
        _log.warning("%s", text)
    else:
        print(f"pdserve: {text}", file=sys.stderr)


def tell_failure(command: str, error: PdserveError) -> None:
    """Report once why a command ends: in its log if it has one, else on stderr."""
    if not logging.getLogger("pdserve").handlers:
        print(f"pdserve {command}: {error.message}", file=sys.stderr)
        return
    is_long = error.detail != error.message
    fields = {
        "command": command,
        "reason": error.message,
        "exception": error.detail if is_long else None,
    }
    _log.error(LogEvent("failed", fields, f"pdserve {command}: {error.detail}"))


def given_lines(resolved: Mapping[str, Resolved]) -> list[str]:
    """Return one line for each given setting, with its source."""
    return [
        f"  {flag} = {_shown(flag, item.value)}  ({_origin(item)})"
        for flag, item in resolved.items()
        if item.source is not Source.DEFAULT
    ]


def _origin(item: Resolved) -> str:
    return "command line" if item.source is Source.COMMAND_LINE else item.origin


def _shown(flag: str, value: object) -> str:
    if flag.rpartition(".")[2] in _SECRET and value:
        return "***"
    match value:
        case None:
            return "auto"
        case bool():
            return "on" if value else "off"
        case enum.Enum():
            return str(value.value)
        case tuple():
            return ",".join(map(str, value))
        case _:
            return str(value)
