"""The parts of an answer, JSON in a call's arguments, and how a text can fail to be a call."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

    Tools = Mapping[str, Mapping[str, Any]]
    """The JSON Schema of each offered tool's parameters, by the tool's name."""


value_in = msgspec.json.Decoder(float_hook=float).decode
"""Decode a JSON text; a number that no float can hold is infinite, and not an error."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Which tools an answer may call, and how.

    Attributes:
        is_forced: Whether it must call one; otherwise it may also be only text.
        is_parallel: Whether it may have several calls; otherwise the first one ends it.
        loose: Tools whose arguments need not follow their schemas, if the format has a choice.
        inputs: Grammars in Lark of the only argument of tools, by their names.
        told: Tools whose calls are told as the text that they take.
    """

    tools: Tools
    is_forced: bool = False
    is_parallel: bool = True
    loose: frozenset[str] = frozenset()
    inputs: Mapping[str, str] = field(default_factory=dict)
    told: frozenset[str] = frozenset()


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
    """A tool call begins. Its arguments come next, and then maybe another call of its list.

    Attributes:
        call_id: The model's own name for the call, where its format has one.
        is_input: Whether a text comes in place of arguments.
    """

    name: str
    call_id: str | None = None
    is_input: bool = False


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A part of the arguments of the call that began last.

    Together the parts are the text of a JSON object, which is complete when the call is, or when
    the next one of its list begins.
    """

    text: str


@dataclass(frozen=True, slots=True)
class CallEnds:
    """The end of the calls that were begun.

    Attributes:
        num_lost: How many of them, the last ones, are no calls: they were cut off, or were not
            calls after all.
    """

    num_lost: int = 0


CallPiece = CallBegins | CallArguments | CallEnds
Piece = Content | Reasoning | CallPiece


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete tool call.

    Attributes:
        arguments: The text of a JSON object.
        call_id: The model's own name for the call, where its format has one.
    """

    name: str
    arguments: str
    call_id: str | None = None


def quoted(text: str) -> str:
    """Return a text as a JSON string."""
    return msgspec.json.encode(text).decode()


def object_of(members: Mapping[str, str]) -> str:
    """Return the text of a JSON object with these JSON texts by name."""
    return "{" + ", ".join(f"{quoted(name)}: {text}" for name, text in members.items()) + "}"


class UnfinishedCallError(ValueError):
    """Apparently the end of a call, but inside one of its values."""


class MalformedCallError(ValueError):
    """The text is not a call, whatever follows."""
