"""The parts of an answer, and how a text can fail to be a tool call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    Tools = Mapping[str, Mapping[str, Any]]
    """The JSON Schema of each offered tool's parameters, by the tool's name."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Which tools an answer may call, and how.

    Attributes:
        is_forced: It has to call one; else it may also have text, or nothing else.
        is_parallel: It may have several calls; else the first one ends it.
        loose: Tools whose arguments are not held against their schemas, where the format has a
            choice.
    """

    tools: Tools
    is_forced: bool = False
    is_parallel: bool = True
    loose: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text in which the model thinks."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """A call of a tool begins: its arguments come next, or behind them another call of its list.

    Attributes:
        call_id: The model's own name for the call, where its format has one.
    """

    name: str
    call_id: str | None = None


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A part of the arguments of the call that was begun last.

    Together the parts are the text of a JSON object, which is complete when the call is, or when
    the next one of its list begins.
    """

    text: str


@dataclass(frozen=True, slots=True)
class CallEnds:
    """The calls that were begun end.

    Attributes:
        is_whole: They are calls. If not, they were cut off, or were none after all.
    """

    is_whole: bool = True


CallPiece = CallBegins | CallArguments | CallEnds
Piece = Content | Reasoning | CallPiece


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A whole call of a tool.

    Attributes:
        arguments: The text of a JSON object.
        call_id: The model's own name for the call, where its format has one.
    """

    name: str
    arguments: str
    call_id: str | None = None


class UnfinishedCallError(ValueError):
    """What looked like the end of a call stands inside one of its values."""


class MalformedCallError(ValueError):
    """The text is no call, whatever follows."""
