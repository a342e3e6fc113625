"""`pdserve vllm-flags`: what becomes of each of vLLM's flags, variables and connectors."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby

from pdserve.commands.exit_codes import EXIT_DONE, EXIT_FAILED
from pdserve.config.load import Resolved, Table, build
from pdserve.config.settings import engine_flags
from pdserve.config.vllm import RELEASE
from pdserve.config.vllm.answers import VllmAnswer, VllmFlagsConfig, VllmName, table


def run(settings: Table, resolved: Mapping[str, Resolved]) -> int:
    """Run `pdserve vllm-flags`; the exit code is 1 if no row has the words."""
    config = build("vllm_flags", VllmFlagsConfig, settings, resolved)
    rows = [row for row in table(engine_flags()) if _has(row, config.filters)]
    for line in lines(rows):
        print(line)
    if not rows:
        print(f"vLLM {RELEASE} has no such name", file=sys.stderr)
        return EXIT_FAILED
    return EXIT_DONE


def _has(row: VllmName, words: Iterable[str]) -> bool:
    """Whether a row has all the words; `_` and `-` are the same."""
    text = f"{row.name} {row.answer.value} {row.text}".lower().replace("_", "-")
    return all(word.lower().replace("_", "-") in text for word in words)


def lines(rows: Iterable[VllmName]) -> Iterator[str]:
    """Yield the rows for a terminal, below a heading for each kind."""
    for kind, members in groupby(rows, key=lambda row: row.kind):
        found = list(members)
        yield f"vLLM's {kind.value}:"
        width = min(max(len(row.name) for row in found), _MAX_NAME)
        for row in found:
            yield f"  {row.name:<{width}}  {_said(row)}"


_MAX_NAME = 44


def _said(row: VllmName) -> str:
    match row.answer:
        case VllmAnswer.TRANSLATED:
            return f"-> {row.text}"
        case _:
            return f"{row.answer.value}{': ' if row.text else ''}{row.text}"
