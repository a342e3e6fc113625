"""Answers as clients put them together from what they are told of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.text.answer.pieces import CallArguments, CallBegins, CallEnds, ToolCall
from pdserve.text.output import TextDelta

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.text.answer.pieces import Piece


@dataclass(slots=True)
class ToldCall:
    """A call that was begun.

    Attributes:
        parts: Of its arguments, as they came.
        is_whole: It is a call; None until it ends.
    """

    begins: CallBegins
    parts: list[str]
    is_whole: bool | None = None

    @property
    def call(self) -> ToolCall:
        """The call, as a whole answer has it."""
        return ToolCall(self.begins.name, "".join(self.parts), self.begins.call_id)


def told_calls(pieces: Sequence[Piece]) -> list[ToldCall]:
    """Return the calls that were begun, each of which is complete when the next one begins."""
    calls: list[ToldCall] = []
    for piece in pieces:
        is_open = bool(calls) and calls[-1].is_whole is None
        match piece:
            case CallBegins():
                assert not is_open or is_json("".join(calls[-1].parts))
                calls.append(ToldCall(piece, []))
            case CallArguments(text):
                assert is_open
                assert text
                calls[-1].parts.append(text)
            case CallEnds(num_lost):
                assert is_open
                assert is_json("".join(calls[-1].parts)) is (num_lost == 0)
                for index, call in enumerate(calls):
                    if call.is_whole is None:
                        call.is_whole = index < len(calls) - num_lost
            case _:
                assert not is_open
    return calls


def whole_calls(pieces: Sequence[Piece]) -> list[ToolCall]:
    """Return the calls of a whole answer."""
    return [told.call for told in told_calls(pieces) if told.is_whole]


def in_one(delta: TextDelta) -> TextDelta:
    """Return what some tokens added, without the order of its parts."""
    parts = [delta, *delta.rest]
    return TextDelta(
        text="".join(part.text for part in parts),
        offsets=[offset for part in parts for offset in part.offsets],
        finish_reason=delta.finish_reason,
        stop_reason=delta.stop_reason,
        reasoning="".join(part.reasoning for part in parts),
        calls=[call for part in parts for call in part.calls],
    )


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
