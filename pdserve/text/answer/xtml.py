"""The answers of Kimi K3: elements within one another, like XML, between tokens of their own.

`<|open|>think<|sep|>...<|close|>think<|sep|><|open|>response<|sep|>...`, and calls with an element
for each argument. In letters the markers are text. Interface and promises are `AnswerMachine`'s.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar

import msgspec

from pdserve.text.answer.pieces import Content, Piece, Reasoning, ToolCall

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.text.answer.pieces import ToolUse

_OPEN, _CLOSE, _SEP = "<|open|>", "<|close|>", "<|sep|>"
_TAG = re.compile(r"<\|(?:open|close)\|>[^<]*(?=<\|sep\|>)")
_NAME = re.compile(r"\s*(\w+)")
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')

_value_in = msgspec.json.Decoder().decode


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
        for tag in _TAG.findall(prompt[prompt.rfind(f"{_OPEN}message") :]):
            self._apply(tag)

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
        return []

    def _pass(self, text: str) -> list[Piece]:
        match self._elements[-1:]:
            case ["think"]:
                return [Reasoning(text)]
            case ["response"]:
                return [Content(text)]
            case ["argument"]:
                self._text.append(text)
        return []

    def _apply(self, tag: str) -> list[Piece]:
        """Do what a tag asks for, without the marker that ends it."""
        is_opening = tag.startswith(_OPEN)
        said = tag.removeprefix(_OPEN if is_opening else _CLOSE)
        named = _NAME.match(said)
        name = named[1] if named is not None else ""
        if is_opening:
            self._open(name, {key: _unescaped(text) for key, text in _ATTRIBUTE.findall(said)})
            return []
        if name not in self._elements:
            return []
        while self._elements.pop() != name:
            self._is_sound = False
        return self._close(name)

    def _open(self, name: str, attributes: Mapping[str, str]) -> None:
        self._elements.append(name)
        match name:
            case "call":
                self._tool, self._arguments = attributes.get("tool", ""), {}
                self._is_sound = bool(self._tool)
            case "argument":
                self._key, self._type = attributes.get("key", ""), attributes.get("type", "")
                self._text = []

    def _close(self, name: str) -> list[Piece]:
        match name:
            case "argument":
                text = "".join(self._text)
                if self._type == "string":
                    text = msgspec.json.encode(text).decode()
                self._arguments[msgspec.json.encode(self._key).decode()] = text
            case "call":
                members = ", ".join(f"{key}: {text}" for key, text in self._arguments.items())
                call = ToolCall(self._tool, f"{{{members}}}")
                if self._use.tools and self._is_sound and _is_json(call.arguments):
                    self._num_calls += 1
                    return [call] if self._num_calls == 1 or self._use.is_parallel else []
        return []


def _unescaped(text: str) -> str:
    return text.replace("&quot;", '"').replace("&lt;", "<").replace("&amp;", "&")


def _is_json(text: str) -> bool:
    try:
        _value_in(text)
    except (msgspec.MsgspecError, RecursionError):
        return False
    return True
