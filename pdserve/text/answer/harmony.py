"""The answers of gpt-oss: messages in channels, each with a header (OpenAI's harmony format).

`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...`: a
message's header says what it is, and a call's header names the function. All markers are tokens;
spelt out in letters they are text. Interface and promises are `AnswerMachine`'s.
"""

from __future__ import annotations

import re
from enum import Enum, auto
from typing import TYPE_CHECKING, ClassVar

from pdserve.text.answer.following import CallTelling, ObjectFollower
from pdserve.text.answer.formats import Writing
from pdserve.text.answer.json_calls import object_text
from pdserve.text.answer.pieces import (
    Content,
    MalformedCallError,
    Piece,
    Reasoning,
    ToolCall,
    ToolUse,
    UnfinishedCallError,
)
from pdserve.text.answer.writing import GrammarWriter, check_tools

if TYPE_CHECKING:
    from collections.abc import Mapping

START, MESSAGE = "<|start|>", "<|message|>"
_ENDS = frozenset({"<|end|>", "<|call|>", "<|return|>"})
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_FUNCTIONS = "functions."
_HEAD = re.compile(r"(?P<name>[^\n]++)\n\s*+(?=\{)")
"""Input for a follower of arguments: the name from the header, on its own line."""
_TURN = START + "assistant"
_NEXT = "<|end|>" + _TURN
_FINAL = "<|channel|>final<|message|>"
_TEXT = "TEXT"
_WRITING = Writing(
    begin="<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
    end="",
    between=None,
)


class _Kind(Enum):
    HEADER = auto()
    REASONING = auto()
    CONTENT = auto()
    CALL = auto()
    BUILT_IN = auto()


class HarmonyMachine:
    """See the module.

    Args:
        prompt: The text that the answer continues; it may end inside a header or a message.
        vocabulary: Markers by their token ids.
        use: Which tools were offered, and how they may be called; without any, messages to
            functions are content.
    """

    markers: ClassVar[tuple[str, ...]] = (
        *(START, MESSAGE, *sorted(_ENDS), "<|channel|>", "<|constrain|>"),
    )
    reads_reasoning: ClassVar[bool] = True

    def __init__(
        self,
        prompt: str,
        *,
        vocabulary: Mapping[int, str],
        use: ToolUse,
    ) -> None:
        self.vocabulary = vocabulary
        self._use = use
        self._kind = _Kind.HEADER
        self._text: list[str] = []
        self._name = ""
        self._num_calls = 0
        self._telling = CallTelling(is_parallel=True)
        self._follower = ObjectFollower([_HEAD])
        _, turn, header = prompt.rpartition(_TURN)
        if turn and MESSAGE in header:
            self._begin(header.partition(MESSAGE)[0])
        elif turn:
            self._text.append(header)

    @property
    def reads_calls(self) -> bool:
        """Whether calls are looked for."""
        return bool(self._use.tools)

    @property
    def is_reasoning(self) -> bool:
        """Whether the next text is reasoning, as far as is known."""
        return self._kind is _Kind.REASONING

    @property
    def is_content(self) -> bool:
        """Whether the next text is content."""
        return self._kind is _Kind.CONTENT

    @property
    def is_in_call(self) -> bool:
        """Whether a call has begun but not ended."""
        return self._kind is _Kind.CALL

    @property
    def is_over(self) -> bool:
        """Whether nothing more may follow."""
        return self._num_calls > 0 and not self._use.is_parallel

    def push(self, text: str, *, is_marker: bool = False) -> list[Piece]:
        """Add text, or a marker's token; return what became certain by it."""
        if not is_marker:
            return self._pass(text)
        if self._kind is _Kind.HEADER:
            if text == MESSAGE:
                self._begin("".join(self._text))
            elif text == START or text in _ENDS:
                self._text = []
            else:
                self._text.append(text)
            return []
        if text == START or text in _ENDS:
            return self._end(text)
        return self._pass(text)

    def finish(self, *, is_cut: bool) -> list[Piece]:
        """End the text; an incomplete call is dropped if the token limit cut it off."""
        if self._kind is _Kind.CALL:
            return list(self._telling.drop()) if is_cut else self._end("")
        header, self._text = "".join(self._text), []
        return [Content(header)] if header.strip() and not is_cut else []

    def _pass(self, text: str) -> list[Piece]:
        match self._kind:
            case _Kind.REASONING:
                return [Reasoning(text)] if text else []
            case _Kind.CONTENT:
                return [Content(text)] if text else []
            case _Kind.HEADER:
                self._text.append(text)
            case _Kind.CALL:
                self._text.append(text)
                return self._follow(text)
        return []

    def _follow(self, text: str) -> list[Piece]:
        """Return what more text makes certain of the call, if the call counts."""
        return list(self._telling.tell(self._follower.push(text))) if not self.is_over else []

    def _begin(self, header: str) -> None:
        """Begin the message that a header announces."""
        self._text = []
        recipient, channels = _RECIPIENT.search(header), _CHANNEL.findall(header)
        name = recipient[1] if recipient is not None else ""
        if name.startswith(_FUNCTIONS) and self._use.tools:
            self._kind, self._name = _Kind.CALL, name.removeprefix(_FUNCTIONS)
            self._follower = ObjectFollower([_HEAD])
            self._follow(f"{self._name}\n")
        elif name and name != "assistant" and not name.startswith(_FUNCTIONS):
            self._kind = _Kind.BUILT_IN
        else:
            is_reasoning = channels[-1:] == ["analysis"]
            self._kind = _Kind.REASONING if is_reasoning else _Kind.CONTENT

    def _end(self, marker: str) -> list[Piece]:
        """End a message at a marker, or at the end of the text; a call's strings may quote one."""
        pieces: list[Piece] = []
        if self._kind is _Kind.CALL:
            text = "".join(self._text)
            try:
                left = self._telling.settle([ToolCall(self._name, object_text(text))])
                pieces += [] if self.is_over else left
                self._num_calls += 1
            except UnfinishedCallError:
                if marker:
                    self._text.append(marker)
                    return self._follow(marker)
                pieces += [*self._telling.drop(), Content(text)]
            except MalformedCallError:
                pieces += [*self._telling.drop(), Content(text)]
        self._kind, self._text = _Kind.HEADER, []
        return pieces


def harmony_grammar(tokens: Mapping[str, int], use: ToolUse) -> str:
    """Return the grammar of an answer that calls a tool as its schema says, at most one.

    Args:
        tokens: Ids of tokens that are never split, by their texts.

    Raises:
        ValueError: A tool cannot be expressed in it.
    """
    check_tools(use.tools, with_keys=False)
    writer = GrammarWriter(tokens)
    notes = _notes(writer)
    call = writer.calls(_WRITING, use)
    final = f"{writer.literal(_FINAL)} {_TEXT}"
    return f"start: {notes} ({call if use.is_forced else f'{call} | {final}'})\n{writer.text()}"


def harmony_before(prompt: str, tokens: Mapping[str, int]) -> str:
    """Return the grammar of `@answer` as the final message of an answer to `prompt`."""
    machine, writer = HarmonyMachine(prompt, vocabulary={}, use=ToolUse({})), GrammarWriter(tokens)
    before = ""
    if not machine.is_content:
        before = f"{_notes(writer)} {writer.literal(_FINAL)}"
    if machine.is_reasoning:
        before = f"{_TEXT} {writer.literal(_NEXT)} {before}"
    return f"start: {before} @answer\n{writer.text()}"


def _notes(writer: GrammarWriter) -> str:
    """Add rules for messages that are not the last; return a reference to them."""
    text = writer.free(_TEXT, ())
    channels = ' ("analysis" | "commentary") '
    note = f"{writer.literal('<|channel|>')}{channels}{writer.literal(MESSAGE)} {text}"
    return writer.rule("note", f"{note} {writer.literal(_NEXT)}") + "*"
