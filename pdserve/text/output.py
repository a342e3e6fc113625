"""Turns one choice's tokens into what a client sees: text, tool calls, reasoning.

A pure state machine: two processors that read the same tokens give out the same text, so one engine
can send the first token and another one the rest. Does not know HTTP, engines or time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from pdserve.text.answer.pieces import (
    CallArguments,
    CallBegins,
    CallEnds,
    Content,
    Piece,
    Reasoning,
)
from pdserve.text.detokenizer import make_detokenizer
from pdserve.text.stops import StopMatcher
from pdserve.wire.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.text.answer.formats import AnswerReader
    from pdserve.text.tokenizer import Tokenizer


class CallDelta(msgspec.Struct):
    """What was added to one tool call.

    Attributes:
        index: Its index among the calls begun in its choice.
        begins: Its name, in its first delta.
        arguments: A part of the text of a JSON object, or of a custom tool's text.
        is_input: Which of them.
        is_whole: Whether it ends here and is a call. A call that is never whole does not count.
    """

    index: int
    begins: CallBegins | None = None
    arguments: str = ""
    is_input: bool = False
    is_whole: bool = False


class TextDelta(msgspec.Struct):
    """What some tokens added to the answer: text, reasoning or calls, and the rest behind it.

    Attributes:
        text: Content that can be shown now; later tokens cannot change it.
        offsets: For each token that ends in this part and counts (those after a stop string do
            not), the number of characters decoded before it.
        finish_reason: STOP when a stop string ended the text; else the engine's own.
        stop_reason: The stop string that ended it, if one did.
        reasoning: The same as `text`, for the reasoning.
        calls: What was added to tool calls, in order.
        rest: What the same tokens added behind all that, of another kind each.
        kind: The piece of which kind this is or, if empty, what is before; None if nothing is.
        num_thought: How many of the tokens in `offsets` come up to the last one of the reasoning or
            its markers.
    """

    text: str = ""
    offsets: list[int] = []
    finish_reason: FinishReason | None = None
    stop_reason: str | None = None
    reasoning: str = ""
    calls: list[CallDelta] = []
    rest: list[TextDelta] = []
    kind: type[Piece] | None = None
    num_thought: int = 0

    @property
    def last(self) -> TextDelta:
        """The last part."""
        return self.rest[-1] if self.rest else self

    def add_reasoning(self, text: str) -> None:
        """Add reasoning behind everything else."""
        self._part(Reasoning).reasoning += text

    def add_text(self, text: str) -> None:
        """Add text behind everything else."""
        if text:
            self._part(Content).text += text

    def call(self, index: int) -> CallDelta:
        """Return what is added to a call behind everything else, which the caller may extend."""
        calls = self._part(CallBegins).calls
        found = next((call for call in calls if call.index == index), None)
        if found is None:
            found = CallDelta(index)
            calls.append(found)
        return found

    def _part(self, kind: type[Piece]) -> TextDelta:
        """Return the part that more of a kind is added to."""
        last = self.last
        is_empty = not (last.text or last.offsets or last.reasoning or last.calls)
        if last.kind not in (kind, None) and not is_empty:
            last = TextDelta()
            self.rest.append(last)
        last.kind = kind
        return last


class OutputProcessor:
    """Detokenizes one choice and ends it at its stop strings.

    Args:
        tokenizer: The model's tokenizer.
        prompt: The tokens before: a word that follows them keeps its leading space.
        stop: Stop strings; none may be empty.
        include_stop_str_in_output: Whether to show the stop string or stop token that ended it.
        skip_special_tokens: Whether special tokens have no text.
        min_tokens: Minimum number of tokens before the end of a stop string.
        machine: Splits the text; without one all of it is content. Stop strings are searched only
            in content.

    Attributes:
        num_tokens: Tokens so far that count.
        num_reasoning_tokens: Those of them inside the reasoning.
        reads_reasoning, reads_calls: Whether it looks for reasoning and calls.
        num_calls: Complete tool calls so far.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt: Sequence[int] = (),
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        machine: AnswerReader | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._machine = machine
        self._detokenizer = make_detokenizer(
            tokenizer, skip_special_tokens=skip_special_tokens, prompt=prompt
        )
        self._stops = StopMatcher(stop, include_stop=include_stop_str_in_output)
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._num_chars = 0
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.reads_reasoning = machine is not None and machine.reads_reasoning
        self.reads_calls = machine is not None and machine.reads_calls
        self.num_calls = 0
        self._num_begun = self._num_ended = 0
        self._is_input = False
        self._kind: type[Piece] | None = None
        self._is_thought = False

    def push(self, token_ids: Sequence[int], finish_reason: FinishReason | None) -> TextDelta:
        """Add tokens, the last ones if `finish_reason` says so.

        A token at which the engine stopped (EOS, a stop id) has no text unless stops are
        included. A handoff ends the tokens here but not the text.
        """
        delta = TextDelta(finish_reason=finish_reason, kind=self._kind)
        num_shown = len(token_ids)
        if finish_reason is FinishReason.STOP and not self._include_stop:
            num_shown -= 1
        for position, token_id in enumerate(token_ids):
            offset = self._num_chars
            self.num_tokens += 1
            is_over = position < num_shown and self._read(token_id, delta)
            last = delta.last
            last.offsets.append(offset)
            if self._is_thought:
                last.num_thought = len(last.offsets)
            self._kind = last.kind
            if is_over:
                return delta
        if finish_reason in (None, FinishReason.HANDOFF):
            return delta
        if not self._read_rest(delta, is_cut=finish_reason is not FinishReason.STOP):
            delta.add_text(self._stops.flush())
        return delta

    def _read(self, token_id: int, delta: TextDelta) -> bool:
        """Give out what a token makes certain; return whether it ends the answer."""
        machine = self._machine
        if machine is None:
            return self._show(self._detokenizer.push(token_id), delta)
        was_reasoning = machine.is_reasoning
        marker = machine.vocabulary.get(token_id)
        if marker is None and machine.is_in_call and token_id in self._tokenizer.special_ids:
            marker = self._tokenizer.token_text(token_id)  # a value may quote any token
        if marker is None:
            pieces = machine.push(self._detokenizer.push(token_id))
        else:
            pieces = machine.push(self._detokenizer.flush())
            pieces += machine.push(marker, is_marker=True)
        self.num_reasoning_tokens += was_reasoning and machine.is_reasoning
        self._is_thought = was_reasoning or machine.is_reasoning
        return self._release(pieces, delta)

    def _read_rest(self, delta: TextDelta, *, is_cut: bool) -> bool:
        """Give out the held text; return whether the answer ends before its end."""
        text = self._detokenizer.flush()
        if self._machine is None:
            return self._show(text, delta)
        pieces = self._machine.push(text) + self._machine.finish(is_cut=is_cut)
        return self._release(pieces, delta)

    def _release(self, pieces: Sequence[Piece], delta: TextDelta) -> bool:
        """Give out pieces; return whether one ends the answer, whatever the engine says."""
        for piece in pieces:
            match piece:
                case Reasoning(text):
                    delta.add_reasoning(text)
                case CallBegins():
                    delta.add_text(self._stops.flush())  # no stop string reaches into a call
                    call = delta.call(self._num_begun)
                    call.begins, call.is_input = piece, piece.is_input
                    self._is_input = piece.is_input
                    self._num_begun += 1
                case CallArguments(text):
                    call = delta.call(self._num_begun - 1)
                    call.arguments, call.is_input = call.arguments + text, self._is_input
                case CallEnds(num_lost):
                    for index in range(self._num_ended, self._num_begun):
                        is_whole = index < self._num_begun - num_lost
                        delta.call(index).is_whole = is_whole
                        self.num_calls += is_whole
                    self._num_ended = self._num_begun
                    if not num_lost and self._machine is not None and self._machine.is_over:
                        delta.finish_reason = FinishReason.STOP
                        return True
                case Content(text):
                    if self._show(text, delta):
                        return True
        return False

    def _show(self, text: str, delta: TextDelta) -> bool:
        """Give out content; return whether a stop string in it ends the answer."""
        if not text:
            return False
        self._num_chars += len(text)
        released = self._stops.push(text, may_stop=self.num_tokens > self._min_tokens)
        delta.add_text(released.text)
        if released.stop is None:
            return False
        delta.finish_reason, delta.stop_reason = FinishReason.STOP, released.stop
        return True
