"""Splits one answer's text, as it arrives, into content, reasoning and tool calls.

A pure state machine. Its output does not depend on how the text is cut into pieces: two machines
that read the same tokens give the same output. A call is given out while it is written, except for
the end of its arguments, which comes when the call is complete. A call that the token limit cut off
does not count, because a client would run something that the model never asked for.

Markers that are tokens of the vocabulary are recognized only by their ids, so their spelling in a
text is text; other markers are found in the text. Does not know tokens' bytes, stops or HTTP.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING

from pdserve.text.answer.following import CallTelling
from pdserve.text.answer.formats import first_of
from pdserve.text.answer.open_call import OpenCall
from pdserve.text.answer.pieces import (
    Content,
    MalformedCallError,
    Piece,
    Reasoning,
    UnfinishedCallError,
)
from pdserve.text.stops import overlap

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.text.answer.formats import CallFormat, ReasoningFormat
    from pdserve.text.answer.pieces import CallPiece, ToolCall, ToolUse

_MAX_BEGINNING_CHARS = 128
"""After this many characters it is clear whether a text without an opening marker may be a call."""


class _State(Enum):
    REASONING = auto()
    CONTENT = auto()
    SECTION = auto()
    CALL = auto()


class _Flow:
    """Text of one kind. Holds back white space that may be at its end.

    Attributes:
        has_text: Whether some of it was given out.
        drops_leading: Whether to drop white space at its beginning.
        label: Text to drop if it begins with it.
    """

    def __init__(self, *, drops_leading: bool) -> None:
        self.has_text = False
        self.drops_leading = drops_leading
        self.label = ""
        self._held = ""

    def add(self, text: str) -> str:
        """Add text; return what is certainly not at the end."""
        text = self._held + text
        if not self.has_text and self.drops_leading:
            text = text.lstrip()
            if self.label and self.label.startswith(text):
                self._held = text
                return ""
            text = text.removeprefix(self.label).lstrip() if self.label else text
        kept = text.rstrip()
        self._held = text[len(kept) :]
        if kept:
            self.has_text, self.label = True, ""
        return kept

    def end(self) -> str:
        """Return the held text."""
        held, self._held = self._held, ""
        return "" if self.label and not self.has_text else held


class AnswerMachine:
    """See the module.

    Args:
        calls: How the model writes calls; None does not look for any.
        reasoning: How it marks reasoning; None does not look for any.
        use: Which tools were offered, and how they may be called.
        vocabulary: Markers that are single tokens, by their ids.
        in_reasoning: Whether the prompt has opened the reasoning.
    """

    def __init__(
        self,
        *,
        calls: CallFormat | None,
        reasoning: ReasoningFormat | None,
        use: ToolUse,
        vocabulary: Mapping[int, str],
        in_reasoning: bool,
    ) -> None:
        self.vocabulary = vocabulary
        self._calls = calls
        self._reasoning = reasoning
        self._use = use
        self._tokens = frozenset(vocabulary.values())
        self._state = _State.REASONING if in_reasoning else _State.CONTENT
        self._thought = _Flow(drops_leading=True)
        self._content = _Flow(drops_leading=in_reasoning)
        self._section_end = ""
        self._noise = ""
        self._held = ""
        self._may_begin = calls is not None and calls.may_begin is not None
        self._call: OpenCall | None = None
        self._telling = CallTelling(is_parallel=use.is_parallel)
        self._watches: dict[object, tuple[tuple[str, ...], tuple[str, ...]]] = {}
        self._pieces: list[Piece] = []

    @property
    def reads_calls(self) -> bool:
        """Whether calls are looked for."""
        return bool(self._use.tools)

    @property
    def is_reasoning(self) -> bool:
        """Whether the next text is reasoning, as far as is known."""
        return self._state is _State.REASONING

    @property
    def reads_reasoning(self) -> bool:
        """Whether reasoning is looked for."""
        return self._reasoning is not None

    @property
    def is_over(self) -> bool:
        """Whether nothing more may follow."""
        return self._telling.has_calls and not self._use.is_parallel

    @property
    def is_in_call(self) -> bool:
        """Whether a call has begun but not ended."""
        return self._state is _State.CALL

    def push(self, text: str, *, is_marker: bool = False) -> list[Piece]:
        """Add text; return what became certain by it.

        Args:
            is_marker: Whether the text is that of a token in `vocabulary`.
        """
        if is_marker and text in self._watched()[0]:
            self._meet(text)
        elif text:
            self._read(text)
        return self._taken()

    def finish(self, *, is_cut: bool) -> list[Piece]:
        """End the text; return what was held back.

        Args:
            is_cut: Whether the model had not ended it; then an incomplete call is dropped.
        """
        match self._state:
            case _State.CALL:
                assert self._call is not None
                self._finish_call(self._call, is_cut=is_cut)
            case _State.SECTION if not is_cut:
                self._leave_section()
            case _:
                self._pass(self._held)
        self._say(Reasoning, self._thought.end())
        if not self._telling.has_calls:
            self._say(Content, self._content.end())
        return self._taken()

    def _taken(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def _watched(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The markers that are valid now, and those of them that are found in the text."""
        may_think = not self._content.has_text and not self._telling.has_calls
        key = self._state, may_think, self._section_end
        known = self._watches.get(key)
        if known is None:
            markers = tuple(self._markers(may_think=may_think))
            written = tuple(marker for marker in markers if marker not in self._tokens)
            known = self._watches[key] = markers, written
        return known

    def _markers(self, *, may_think: bool) -> list[str]:
        calls, reasoning = self._calls, self._reasoning
        found: list[str] = []
        match self._state:
            case _State.REASONING:
                if reasoning is not None:
                    found += [closing for _, closing in reasoning.pairs]
                if calls is not None and calls.ends_reasoning:
                    found += calls.openings
            case _State.CONTENT:
                if calls is not None:
                    found += [*calls.openings, *dict(calls.sections)]
                if reasoning is not None and may_think:
                    found += reasoning.markers
            case _State.SECTION if calls is not None:
                found += [*calls.openings, self._section_end]
            case _State.CALL if calls is not None:
                found += calls.closings
        return found

    def _read(self, text: str) -> None:
        """Read text, and the text after each marker in it."""
        while text:
            if self._call is not None:
                text = self._read_call(self._call, text)
                continue
            text = self._held + text
            self._held = ""
            if self._may_begin and self._state is _State.CONTENT:
                if not text.strip():
                    self._held = text
                    return
                self._may_begin = self._may_still_be_call(text)
                if self._may_begin:
                    self._open("")
                    continue
            _, written = self._watched()
            found = first_of(text, written) if written else None
            if found is None:
                keep = overlap(text, written)
                self._pass(text[: len(text) - keep])
                self._held = text[len(text) - keep :]
                return
            at, marker = found
            self._pass(text[:at])
            text = text[at + len(marker) :]
            if marker in self._watched()[0]:  # what stood before it may have changed that
                self._meet(marker)
            else:
                self._pass(marker)

    def _pass(self, text: str) -> None:
        """Read text that is not a marker."""
        match self._state:
            case _State.REASONING:
                self._say(Reasoning, self._thought.add(text))
            case _State.SECTION:
                self._noise += text
            case _:
                self._say(Content, self._content.add(text))

    def _say(self, kind: type[Content | Reasoning], text: str) -> None:
        if text:
            self._pieces.append(kind(text))

    def _meet(self, marker: str) -> None:
        """Handle a watched marker."""
        if self._call is not None:
            body = self._call.text
            self._tell(self._call.follow(len(body)))
            if not self._close(self._call, body, marker):
                self._call.take(marker)
            return
        self._pass(self._held)
        self._held = ""
        self._may_begin = False
        calls, reasoning = self._calls, self._reasoning
        sections = dict(calls.sections) if calls is not None else {}
        if calls is not None and marker in calls.openings:
            if self.is_reasoning:
                self._thought.end()
                self._content.drops_leading = True
            self._open(marker)
        elif marker in sections:
            self._state, self._section_end = _State.SECTION, sections[marker]
        elif self._state is _State.SECTION:
            self._leave_section()
        elif reasoning is not None and not self.is_reasoning and marker in dict(reasoning.pairs):
            self._state = _State.REASONING
            self._thought.label = reasoning.label
        else:  # the end of the reasoning, which some models write twice, or behind a prompt's
            self._state = _State.CONTENT
            self._thought.end()
            self._content.drops_leading = True
            self._may_begin = calls is not None and calls.may_begin is not None

    def _leave_section(self) -> None:
        """Continue after a section; if it had no call, show its text."""
        self._state, self._section_end = _State.CONTENT, ""
        noise, self._noise, self._held = self._noise + self._held, "", ""
        if not self._telling.has_calls and noise.strip():
            self._pass(noise)

    def _open(self, marker: str) -> None:
        assert self._calls is not None
        self._state = _State.CALL
        self._call = OpenCall(self._calls, marker, self._use.tools)

    def _read_call(self, call: OpenCall, text: str) -> str:
        """Read text of an open call; return the text after its end."""
        _, written = self._watched()
        call.add(text, written)
        if not call.opening and call.num_parts <= _MAX_BEGINNING_CHARS:
            body = call.text
            if not self._may_still_be_call(body):
                self._end_call()
                self._may_begin = False
                return body
        while (found := call.next_closing(written)) is not None:
            at, marker = found
            self._tell(call.follow(at))
            body = call.text
            if self._close(call, body[:at], marker):
                return body[at + len(marker) :]
        self._tell(call.follow(call.num_certain(written)))
        return ""

    def _tell(self, pieces: Sequence[CallPiece]) -> None:
        """Give out what more text makes certain of the call."""
        self._pieces += self._telling.tell(pieces)

    def _may_still_be_call(self, text: str) -> bool:
        """Whether text without an opening may be a call."""
        assert self._calls is not None
        assert self._calls.may_begin is not None
        return self._calls.may_begin(text.lstrip()[:_MAX_BEGINNING_CHARS])

    def _close(self, call: OpenCall, body: str, marker: str) -> bool:
        """End a call at a closing marker; return whether it was the end."""
        assert self._calls is not None
        try:
            self._give(self._calls.parse(call.opening, body, self._use.tools, is_last=False))
        except UnfinishedCallError:
            return False
        except MalformedCallError:
            ends_only = marker not in self._calls.openings
            self._end_call()
            self._give_up(call.opening + body + (marker if ends_only else ""))
        else:
            self._end_call()
        if marker in self._calls.openings:
            self._open(marker)
        return True

    def _finish_call(self, call: OpenCall, *, is_cut: bool) -> None:
        """End a call at the end of the text."""
        assert self._calls is not None
        body = text = call.text
        is_closed = False
        for closing in self._calls.closings:
            if body.rstrip().endswith(closing):
                body, is_closed = body.rstrip().removesuffix(closing), True
        self._tell(call.follow(len(body)))
        try:
            if is_cut and self._calls.has_closings:
                raise UnfinishedCallError
            self._give(self._calls.parse(call.opening, body, self._use.tools, is_last=is_closed))
        except (UnfinishedCallError, MalformedCallError):
            self._section_end = ""
            self._end_call()
            is_call = bool(call.opening) or self._use.is_forced or self._telling.has_begun
            self._give_up("" if is_cut and is_call else call.opening + text)

    def _end_call(self) -> None:
        self._state = _State.SECTION if self._section_end else _State.CONTENT
        self._call = None

    def _give(self, calls: list[ToolCall]) -> None:
        """Give out the rest of the calls.

        Raises:
            MalformedCallError: They do not match what was given out.
        """
        self._pieces += self._telling.settle(calls)

    def _give_up(self, text: str) -> None:
        """Show text that is not a call after all, behind the calls of its list that count."""
        self._pieces += self._telling.drop()
        self._pass(text)
