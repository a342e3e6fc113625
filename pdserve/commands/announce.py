"""What a command says when it starts: its settings, once, and how to call further ones."""

from __future__ import annotations

import enum
import shlex
import shutil
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pdserve
from pdserve.config.load import Resolved, Source

_WIDTH: Final = 100
_SECRET: Final = ("secret", "api-key", "operator-key")


def title(command: str) -> str:
    """Return a command's name and version."""
    return f"pdserve {command} {pdserve.__version__}"


def program() -> str:
    """Return how to call pdserve, for commands that are shown to be copied.

    A virtual environment need not be active for its `pdserve` to run, as in `make up`.
    """
    called = Path(sys.argv[0])
    if called.name == "__main__.py":
        return f"{shlex.quote(sys.executable)} -m pdserve"
    found = shutil.which("pdserve")
    if found is not None and Path(found).resolve() == called.resolve():
        return "pdserve"
    return shlex.quote(str(called))


def settings_text(command: str, resolved: Mapping[str, Resolved]) -> str:
    """Return a command's settings: those somebody gave, then the defaults but the empty ones."""
    defaults = " ".join(
        f"{flag}={_shown(flag, item.value)}"
        for flag, item in resolved.items()
        if item.source is Source.DEFAULT and item.value not in ("", ())
    )
    lines = textwrap.wrap(
        f"defaults: {defaults}",
        width=_WIDTH,
        initial_indent="  ",
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join([title(command), *given_lines(resolved), *lines])


def given_lines(resolved: Mapping[str, Resolved]) -> list[str]:
    """Return one line for each setting that somebody gave, with the source."""
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
