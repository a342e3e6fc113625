"""Tells calls of custom tools as texts, around whatever reads the model's format.

As of other calls, the end comes with the call's: the last character of a text is held back, so no
client has the whole text of a call that was cut off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.dialects.tool_inputs import InputReader
from pdserve.text.answer.pieces import CallArguments, CallBegins, CallEnds

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from pdserve.text.answer.formats import AnswerReader
    from pdserve.text.answer.pieces import Piece


class InputTelling:
    """See the module; an `AnswerReader`.

    Args:
        reader: Reads the model's format.
        names: Names of the custom tools.
    """

    def __init__(self, reader: AnswerReader, names: Collection[str]) -> None:
        self._reader = reader
        self._names = names
        self._input: InputReader | None = None
        self._held = ""

    @property
    def vocabulary(self) -> Mapping[int, str]:
        """See `AnswerReader`."""
        return self._reader.vocabulary

    @property
    def reads_reasoning(self) -> bool:
        """See `AnswerReader`."""
        return self._reader.reads_reasoning

    @property
    def reads_calls(self) -> bool:
        """See `AnswerReader`."""
        return self._reader.reads_calls

    @property
    def is_reasoning(self) -> bool:
        """See `AnswerReader`."""
        return self._reader.is_reasoning

    @property
    def is_in_call(self) -> bool:
        """See `AnswerReader`."""
        return self._reader.is_in_call

    @property
    def is_over(self) -> bool:
        """See `AnswerReader`."""
        return self._reader.is_over

    def push(self, text: str, *, is_marker: bool = False) -> list[Piece]:
        """See `AnswerReader`."""
        return self._told(self._reader.push(text, is_marker=is_marker))

    def finish(self, *, is_cut: bool) -> list[Piece]:
        """See `AnswerReader`."""
        return self._told(self._reader.finish(is_cut=is_cut))

    def _told(self, pieces: Iterable[Piece]) -> list[Piece]:
        told: list[Piece] = []
        for piece in pieces:
            match piece:
                case CallBegins(name, call_id):
                    told += self._rest()
                    self._input = InputReader() if name in self._names else None
                    told.append(CallBegins(name, call_id, is_input=self._input is not None))
                case CallArguments(text) if self._input is not None:
                    text = self._held + self._input.push(text)
                    text, self._held = text[:-1], text[-1:]
                    if text:
                        told.append(CallArguments(text))
                case CallEnds(num_lost):
                    told += self._rest(is_lost=num_lost > 0)
                    self._input = None
                    told.append(piece)
                case _:
                    told.append(piece)
        return told

    def _rest(self, *, is_lost: bool = False) -> list[Piece]:
        held, self._held = self._held, ""
        return [CallArguments(held)] if held and not is_lost else []
