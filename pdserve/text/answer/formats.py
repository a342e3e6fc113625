"""The definition of a format in which models write reasoning and tool calls."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pdserve.text.answer.following import NewFollower
    from pdserve.text.answer.pieces import Piece, ToolCall, Tools


class AnswerReader(Protocol):
    """Splits one answer as it arrives. See `machine`."""

    @property
    def vocabulary(self) -> Mapping[int, str]:
        """Markers that are single tokens, by their ids."""
        ...

    @property
    def reads_reasoning(self) -> bool:
        """Whether it looks for reasoning."""
        ...

    @property
    def reads_calls(self) -> bool:
        """Whether it looks for calls."""
        ...

    @property
    def is_reasoning(self) -> bool:
        """Whether the next text is reasoning, as far as is known."""
        ...

    @property
    def is_in_call(self) -> bool:
        """Whether a call has begun but not ended."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether nothing more may follow."""
        ...

    def push(self, text: str, *, is_marker: bool = False) -> list[Piece]:
        """Add text, or the text of a marker's token; return what became certain by it."""
        ...

    def finish(self, *, is_cut: bool) -> list[Piece]:
        """End the text, which the token limit may have cut off; return what was held back."""
        ...


class ParseCalls(Protocol):
    """Reads the text between an opening and a closing marker."""

    def __call__(self, opening: str, body: str, tools: Tools, *, is_last: bool) -> list[ToolCall]:
        """Return the calls in `body`.

        Args:
            opening: The marker that opened them; empty if the format needs none.
            body: The text after it, up to the closing marker.
            tools: The offered tools.
            is_last: Whether nothing follows, so that small omissions at the end are forgiven.

        Raises:
            UnfinishedCallError: The closing marker was part of a value.
            MalformedCallError: They are not calls.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing:
    """How calls are written: texts in which `{name}` and `{key}` stand for a tool and a parameter.

    Attributes:
        opening, closing: Texts around all calls.
        begin, end: Texts around the arguments of one call.
        between: Text between two calls; None if there is never more than one.
        parameter: Texts around each value; None if the arguments are one JSON object. `{is_string}`
            is true or false, and `{type}` the value's JSON type.
        excluded: Texts that must not occur between parameters' tags, because they would end the
            value.
    """

    begin: str
    end: str
    opening: str = ""
    closing: str = ""
    between: str | None = ""
    parameter: tuple[str, str] | None = None
    excluded: tuple[str, ...] = ()

    @property
    def trigger(self) -> str:
        """Text that only calls begin with, up to the tool's name."""
        return (self.opening + self.begin).partition("{name}")[0]

    def after(self, beginning: str) -> Writing:
        """Return what follows the part of the trigger that is already written."""
        rest = len(beginning) - len(self.opening)
        if rest < 0:
            return replace(self, opening=self.opening[len(beginning) :])
        return replace(self, opening="", begin=self.begin[rest:], between=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """One way of writing tool calls.

    Attributes:
        openings: Markers that begin a call.
        closings: Markers that end one. An opening among them also begins the next call.
        parse: Reads the text between them.
        follow: Reads the same while it is written.
        sections: Markers around all calls of an answer; text between the calls is ignored.
        fragments: Special tokens that are parts of markers, whose text is therefore needed.
        may_begin: Whether an answer that begins like this, without an opening, may be a call; None
            if every call has an opening.
        ends_reasoning: Whether an opening also ends the reasoning.
        writing: How to force calls; None forces them in plain JSON.
    """

    openings: tuple[str, ...]
    closings: tuple[str, ...]
    parse: ParseCalls
    follow: NewFollower
    sections: tuple[tuple[str, str], ...] = ()
    fragments: tuple[str, ...] = ()
    may_begin: Callable[[str], bool] | None = None
    ends_reasoning: bool = False
    writing: Writing | None = None

    @property
    def has_closings(self) -> bool:
        """Whether calls end with something other than the next call."""
        return not set(self.closings) <= set(self.openings)

    @property
    def markers(self) -> tuple[str, ...]:
        """All of them."""
        return (
            *self.openings,
            *self.closings,
            *(marker for pair in self.sections for marker in pair),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """One way of marking reasoning.

    Attributes:
        pairs: Opening and closing markers.
        label: Text after the opening that is not reasoning.
    """

    pairs: tuple[tuple[str, str], ...]
    label: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        """All of them."""
        return tuple(marker for pair in self.pairs for marker in pair)

    def is_closed_after(self, prompt: str) -> bool:
        """Whether `prompt` has ended the reasoning, so that the answer has none."""
        end = prompt.rstrip()
        return any(end.endswith(closing) for _, closing in self.pairs)

    def is_open_after(self, prompt: str) -> bool:
        """Whether an answer to `prompt` begins inside the reasoning."""
        end = prompt.rstrip()
        return any(end.endswith(opening + self.label) for opening, _ in self.pairs)


def first_of(text: str, markers: Sequence[str], start: int = 0) -> tuple[int, str] | None:
    """Return the place of the first of some markers, and the longest marker there."""
    found = [
        (at, -len(marker), marker) for marker in markers if (at := text.find(marker, start)) >= 0
    ]
    if not found:
        return None
    at, _, marker = min(found)
    return at, marker
