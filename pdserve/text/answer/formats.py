"""The definition of a format in which models write reasoning and tool calls."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pdserve.text.answer.following import NewFollower
    from pdserve.text.answer.pieces import Piece, ToolCall, Tools


class AnswerReader(Protocol):
    """Takes one answer apart, as it arrives. See `machine`."""

    @property
    def vocabulary(self) -> Mapping[int, str]:
        """Markers that are tokens of their own, by their ids."""
        ...

    @property
    def reads_reasoning(self) -> bool:
        """Whether reasoning is looked for."""
        ...

    @property
    def reads_calls(self) -> bool:
        """Whether calls are looked for."""
        ...

    @property
    def is_reasoning(self) -> bool:
        """Whether the text that comes next is reasoning, as far as is known."""
        ...

    @property
    def is_in_call(self) -> bool:
        """Whether a call has begun and not ended."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether nothing may follow any more."""
        ...

    def push(self, text: str, *, is_marker: bool = False) -> list[Piece]:
        """Add text, or the text of a marker's token; return what became certain by it."""
        ...

    def finish(self, *, is_cut: bool) -> list[Piece]:
        """End the text, which the token limit may have cut off; return what was held back."""
        ...


class ParseCalls(Protocol):
    """Reads what stands between an opening and a closing marker."""

    def __call__(self, opening: str, body: str, tools: Tools, *, is_last: bool) -> list[ToolCall]:
        """Return the calls in `body`.

        Args:
            opening: The marker that opened them; empty where the format needs none.
            body: The text behind it, as far as the closing marker.
            tools: Those that were offered.
            is_last: Nothing follows: small omissions at the end are forgiven.

        Raises:
            UnfinishedCallError: The closing marker was a part of a value.
            MalformedCallError: They are none.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing:
    """How calls are written: texts in which `{name}` and `{key}` stand for a tool and a parameter.

    Attributes:
        opening, closing: Around all calls.
        begin, end: Around the arguments of one.
        between: Between two calls; None where there is never more than one.
        parameter: Around each value; None where arguments are one JSON object. `{is_string}` is
            true or false, and `{type}` the value's JSON type.
        excluded: What a text between parameters' tags may not have: it would end it.
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
        """What begins calls, and nothing else, as far as the tool's name."""
        return (self.opening + self.begin).partition("{name}")[0]

    def after(self, beginning: str) -> Writing:
        """Return what is left to write behind the beginning of the trigger."""
        rest = len(beginning) - len(self.opening)
        if rest < 0:
            return replace(self, opening=self.opening[len(beginning) :])
        return replace(self, opening="", begin=self.begin[rest:], between=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """One way of writing tool calls.

    Attributes:
        openings: Markers that begin a call.
        closings: Markers that end one. An opening may be among them: it also begins the next.
        parse: Reads what stands between.
        follow: Reads the same while it is written.
        sections: Markers around all calls of an answer; text between the calls is noise.
        fragments: Special tokens that markers are made of, and whose text is therefore needed.
        may_begin: Whether an answer that begins like this, without an opening, may be a call;
            None where every call has one.
        ends_reasoning: An opening also ends the reasoning.
        writing: How calls are forced; None where that is done in plain JSON.
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
        """Whether something but the next call ends a call."""
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
        label: What stands behind the opening, and is no reasoning.
    """

    pairs: tuple[tuple[str, str], ...]
    label: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        """All of them."""
        return tuple(marker for pair in self.pairs for marker in pair)

    def is_closed_after(self, prompt: str) -> bool:
        """Whether `prompt` has ended the reasoning: there is none in the answer."""
        end = prompt.rstrip()
        return any(end.endswith(closing) for _, closing in self.pairs)

    def is_open_after(self, prompt: str) -> bool:
        """Whether an answer to `prompt` begins inside of the reasoning."""
        end = prompt.rstrip()
        return any(end.endswith(opening + self.label) for opening, _ in self.pairs)


def first_of(text: str, markers: Sequence[str], start: int = 0) -> tuple[int, str] | None:
    """Return where the first of some markers stands, and which: the longest at its place."""
    found = [
        (at, -len(marker), marker) for marker in markers if (at := text.find(marker, start)) >= 0
    ]
    if not found:
        return None
    at, _, marker = min(found)
    return at, marker
