"""The answers of Kimi K3: elements within one another, like XML, between tokens of their own.

`<|open|>think<|sep|>...<|close|>think<|sep|><|open|>response<|sep|>...`, and calls with an element
for each argument. In letters the markers are text. Interface and promises are `AnswerMachine`'s.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar

import msgspec

from pdserve.text.answer.following import CallTelling
from pdserve.text.answer.formats import Writing
from pdserve.text.answer.pieces import (
    CallArguments,
    CallBegins,
    CallPiece,
    Content,
    MalformedCallError,
    Piece,
    Reasoning,
    ToolCall,
    ToolUse,
    object_of,
    quoted,
    value_in,
)
from pdserve.text.answer.writing import GrammarWriter, check_tools

if TYPE_CHECKING:
    from collections.abc import Mapping

_OPEN, _CLOSE, _SEP = "<|open|>", "<|close|>", "<|sep|>"
_TAG = re.compile(r"<\|(?:open|close)\|>[^<]*(?=<\|sep\|>)")
_NAME = re.compile(r"\s*(\w+)")
_WRITING = Writing(
    opening=f"{_OPEN}tools{_SEP}",
    begin=f'{_OPEN}call tool="{{name}}" index="{{index}}"{_SEP}',
    parameter=(
        f'{_OPEN}argument key="{{key}}" type="{{type}}"{_SEP}',
        f"{_CLOSE}argument{_SEP}",
    ),
    end=f"{_CLOSE}call{_SEP}",
    closing=f"{_CLOSE}tools{_SEP}",
)
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


class XtmlMachine:
    """See the module.

    Args:
        prompt: What the answer goes on from: it has opened elements.
        vocabulary: Markers by their token ids.
        use: Which tools were offered, and how they may be called; calls of none are left out.
    """

    markers: ClassVar[tuple[str, ...]] = (_OPEN, _CLOSE, _SEP)
    reads_reasoning: ClassVar[bool] = True

    def __init__(self, prompt: str, *, vocabulary: Mapping[int, str], use: ToolUse) -> None:
        self.vocabulary = vocabulary
        self._use = use
        self._elements: list[str] = []
        self._tag: list[str] | None = None
        self._tool = ""
        self._arguments: dict[str, str] = {}
        self._key, self._type = "", ""
        self._text: list[str] = []
        self._is_sound = True
        self._num_calls = 0
        self._telling = CallTelling(is_parallel=True)
        for tag in _TAG.findall(prompt[prompt.rfind(f"{_OPEN}message") :]):
            self._apply(tag)
        self._telling.drop()

    @property
    def open_element(self) -> str:
        """Name of the innermost element that has begun and not ended; empty without one."""
        return self._elements[-1] if self._elements else ""

    @property
    def reads_calls(self) -> bool:
        """Whether calls are looked for."""
        return bool(self._use.tools)

    @property
    def is_reasoning(self) -> bool:
        """Whether the text that comes next is reasoning, as far as is known."""
        return self._elements[-1:] == ["think"]

    @property
    def is_in_call(self) -> bool:
        """Whether a call has begun and not ended."""
        return "call" in self._elements

    @property
    def is_over(self) -> bool:
        """Whether nothing may follow any more."""
        return self._num_calls > 0 and not self._use.is_parallel

    def push(self, text: str, *, is_marker: bool = False) -> list[Piece]:
        """Add text, or a marker's token; return what became certain by it."""
        if is_marker and text in (_OPEN, _CLOSE):
            self._tag = [text]
        elif is_marker and text == _SEP and self._tag is not None:
            tag, self._tag = "".join(self._tag), None
            return self._apply(tag)
        elif self._tag is not None:
            self._tag.append(text)
        elif text:
            return self._pass(text)
        return []

    def finish(self, *, is_cut: bool) -> list[Piece]:
        """End the text: everything that is certain has been given out."""
        self._elements, self._tag = [], None
        return list(self._telling.drop())

    def _pass(self, text: str) -> list[Piece]:
        match self._elements[-1:]:
            case ["think"]:
                return [Reasoning(text)]
            case ["response"]:
                return [Content(text)]
            case ["argument"]:
                self._text.append(text)
                return self._tell(CallArguments(quoted(text)[1:-1])) if self._is_string else []
        return []

    def _tell(self, *pieces: CallPiece) -> list[Piece]:
        """Return what is certain of the call, if it is one that counts."""
        is_told = self._use.tools and self._is_sound and not self.is_over
        return list(self._telling.tell(pieces)) if is_told else []

    @property
    def _is_string(self) -> bool:
        return self._type == "string"

    def _apply(self, tag: str) -> list[Piece]:
        """Do what a tag asks for, without the marker that ends it."""
        is_opening = tag.startswith(_OPEN)
        said = tag.removeprefix(_OPEN if is_opening else _CLOSE)
        named = _NAME.match(said)
        name = named[1] if named is not None else ""
        if is_opening:
            found = _ATTRIBUTE.findall(said)
            return self._open(name, {key: _unescaped(text) for key, text in found})
        if name not in self._elements:
            return []
        while self._elements.pop() != name:
            self._is_sound = False
        return self._close(name)

    def _open(self, name: str, attributes: Mapping[str, str]) -> list[Piece]:
        self._elements.append(name)
        match name:
            case "call":
                dropped = self._telling.drop()
                self._tool, self._arguments = attributes.get("tool", ""), {}
                self._is_sound = bool(self._tool)
                return [*dropped, *self._tell(CallBegins(self._tool))]
            case "argument":
                self._key, self._type = attributes.get("key", ""), attributes.get("type", "")
                self._text = []
                begin = f"{', ' if self._arguments else '{'}{quoted(self._key)}: "
                return self._tell(CallArguments(begin + '"' * self._is_string))
        return []

    def _close(self, name: str) -> list[Piece]:
        match name:
            case "argument":
                text = "".join(self._text)
                piece = '"' if self._is_string else text
                self._arguments[self._key] = quoted(text) if self._is_string else text
                return self._tell(CallArguments(piece))
            case "call":
                return self._end_call()
        return []

    def _end_call(self) -> list[Piece]:
        call = ToolCall(self._tool, object_of(self._arguments))
        if not (self._use.tools and self._is_sound and _is_json(call.arguments)):
            return list(self._telling.drop())
        try:
            left = self._telling.settle([call])
        except MalformedCallError:
            return list(self._telling.drop())
        is_over, self._num_calls = self.is_over, self._num_calls + 1
        return [] if is_over else list(left)


def xtml_grammar(prompt: str, tokens: Mapping[str, int], use: ToolUse) -> str:
    """Return the grammar of an answer to `prompt` that calls tools as their schemas say.

    Args:
        tokens: Ids of tokens that no text is cut within, by their texts.

    Raises:
        ValueError: A tool cannot stand in it.
    """
    check_tools(use.tools, with_keys=True)
    writer = GrammarWriter(tokens)
    before = _before_response(writer, prompt)
    said = "" if use.is_forced else writer.free("SAID", ()) + " "
    said += writer.literal(f"{_CLOSE}response{_SEP}")
    calls = writer.calls(_WRITING, use) + ("" if use.is_forced else "?")
    end = f"({writer.literal(f'{_CLOSE}message{_SEP}')})?"
    return f"start: {before} {said} {calls} {end}\n{writer.text()}"


def xtml_before(prompt: str, tokens: Mapping[str, int]) -> str:
    """Return the grammar of `@answer` as the response of an answer to `prompt`."""
    writer = GrammarWriter(tokens)
    return f"start: {_before_response(writer, prompt)} @answer\n{writer.text()}"


def _before_response(writer: GrammarWriter, prompt: str) -> str:
    """What comes before the response's text: a thought, where the prompt does not rule it out."""
    match _opened_by(prompt):
        case "response":
            return ""
        case "think":
            begin, end = "", ""
        case _:
            begin, end = f"({writer.literal(f'{_OPEN}think{_SEP}')} ", ")?"
    thought = f"{writer.free('THOUGHT', ())} {writer.literal(f'{_CLOSE}think{_SEP}')}"
    return f"{begin}{thought}{end} {writer.literal(f'{_OPEN}response{_SEP}')}"


def _opened_by(prompt: str) -> str:
    """The innermost element that a prompt leaves open; empty without one."""
    return XtmlMachine(prompt, vocabulary={}, use=ToolUse({})).open_element


def _unescaped(text: str) -> str:
    return text.replace("&quot;", '"').replace("&lt;", "<").replace("&amp;", "&")


def _is_json(text: str) -> bool:
    try:
        value_in(text)
    except (msgspec.MsgspecError, RecursionError):
        return False
    return True
