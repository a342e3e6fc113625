"""Reads Grafana's JSON: panels, their expressions, and the variables in these."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

NO_DATA = {"row", "text", "dashlist", "news"}
"""Types of panels that ask for nothing."""
_LABEL_VALUES = re.compile(r"label_values\((?:(?P<series>.+),\s*)?(?P<label>\w+)\)\s*$", re.DOTALL)
_VARIABLE = re.compile(r"\$\{(\w+)(?::\w+)?\}|\[\[(\w+)\]\]|\$(\w+)")


@dataclass(frozen=True)
class Panel:
    """One panel.

    Attributes:
        expressions: PromQL with the board's variables in it, and the legend of each.
        at: x, y, width and height in Grafana's grid of 24 columns.
    """

    title: str
    kind: str
    unit: str
    expressions: list[tuple[str, str]]
    at: tuple[int, int, int, int]


@dataclass(frozen=True)
class Board:
    """A board."""

    title: str
    panels: list[Panel]
    variables: list[dict[str, Any]]

    @property
    def names_jobs(self) -> bool:
        """Whether it selects jobs by their names, as ours does; vLLM's take whoever answers."""
        return any('job="' in each for panel in self.panels for each, _ in panel.expressions)


def read(path: Path) -> Board:
    """Read a board, as exported or as an API's answer."""
    found = json.loads(path.read_text())
    found = found.get("dashboard", found)
    return Board(
        title=found.get("title", path.stem),
        panels=[_panel(each) for each in _flat(found["panels"]) if each["type"] not in NO_DATA],
        variables=found.get("templating", {}).get("list", []),
    )


def _flat(panels: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for panel in panels:
        yield panel
        yield from _flat(panel.get("panels", []))  # of a row that is folded


def _panel(found: dict[str, Any]) -> Panel:
    at = found.get("gridPos", {})
    return Panel(
        title=found.get("title", ""),
        kind=found["type"],
        unit=found.get("fieldConfig", {}).get("defaults", {}).get("unit", ""),
        expressions=[
            (target["expr"], target.get("legendFormat", ""))
            for target in found.get("targets", [])
            if target.get("expr") and not target.get("hide")
        ],
        at=(at.get("x", 0), at.get("y", 0), at.get("w", 12), at.get("h", 8)),
    )


def values_of(
    board: Board, label_values: Callable[[str, str], list[str]], *, seconds: float
) -> dict[str, str]:
    """Return what each variable stands for, as Grafana would choose it at first.

    Args:
        label_values: Returns the values of a label among the series of a selector (may be empty).
        seconds: The time that is looked at.
    """
    values = {
        "__rate_interval": "10s",
        "__interval": "4s",
        "__range": f"{round(seconds)}s",
        "__range_s": str(round(seconds)),
    }
    for variable in board.variables:
        kind, name = variable["type"], variable["name"]
        if kind == "query" and variable["query"]:
            values[name] = _queried(variable, values, label_values)
        elif kind in ("custom", "interval", "constant", "textbox"):
            current = variable.get("current", {}).get("value") or variable.get("query", "")
            first = current[0] if isinstance(current, list) else re.split("[,\n]", current)[0]
            first = first.partition(" : ")[0].strip()  # of "value : what is shown for it"
            values[name] = ".*" if first == "$__all" else first
    return values


def _queried(
    variable: Mapping[str, Any],
    values: Mapping[str, str],
    label_values: Callable[[str, str], list[str]],
) -> str:
    query = variable["query"]
    text = query["query"] if isinstance(query, dict) else query
    match = _LABEL_VALUES.match(text)
    assert match, f"{variable['name']}: {text} is not understood"
    found = label_values(filled(match["series"] or "", values), match["label"])
    assert found, f"{variable['name']}: {text} finds nothing"
    if variable.get("includeAll"):
        return variable.get("allValue") or "(" + "|".join(map(re.escape, found)) + ")"
    return found[0]


def filled(expression: str, values: Mapping[str, str]) -> str:
    """Put values in the place of variables; one that is unknown stays."""

    def value(match: re.Match[str]) -> str:
        name = next(filter(None, match.groups()))
        return values.get(name, match.group())

    return _VARIABLE.sub(value, expression)
