"""Translates answers: chat completions in, another protocol's events or object out.

A chat's choice consists of parts: reasoning, text, function calls. This module finds them one after
the other; a dialect defines how each begins, grows and ends.
"""

from __future__ import annotations

import abc
import enum
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from pdserve.errors import BadRequestError, UpstreamError
from pdserve.wire.hop import PARTS
from pdserve.wire.seal import UNREADABLE

if TYPE_CHECKING:
    from collections.abc import Iterator

_BOUNDARY = re.compile(rb"\r?\n\r?\n")
_PREFIX = b"data:"
_DONE = b"[DONE]"
_SPARE_DEPTH = 32
"""Levels by which an answer may be nested deeper than what it repeats of the request."""


class PartKind(enum.Enum):
    """What a part of an answer is."""

    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


@dataclass(slots=True)
class AnswerPart:
    """One part.

    Attributes:
        position: Its index among the answer's parts.
        call: Index of the function call, if it is one.
        pieces: Pieces of its text; for a call, of its arguments, which are JSON.
        call_id, name: Id and function name of a call.
        logprobs: Rows of a chat completion's `logprobs.content`.
        is_cut: Whether the answer ended within this part. A call that was cut is none.
    """

    kind: PartKind
    position: int
    call: int = 0
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    is_cut: bool = False

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self.pieces)


class DialectEvent(msgspec.Struct, frozen=True):
    """A server-sent event; its data also has its type."""

    type: str
    data: dict[str, Any]


class _Function(msgspec.Struct, frozen=True):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct, frozen=True):
    index: int = 0
    id: str | None = None
    function: _Function | None = None


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None


class _Logprobs(msgspec.Struct, frozen=True):
    content: list[dict[str, Any]] | None = None


class _Choice(msgspec.Struct, frozen=True):
    delta: _Delta | None = None
    message: _Delta | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: _Logprobs | None = None


class _PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class _OutputDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int | None = None


class ChatUsage(msgspec.Struct, frozen=True):
    """Tokens, as a chat completion counts them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens_details: _OutputDetails | None = None

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that a prefix cache had."""
        return (self.prompt_tokens_details and self.prompt_tokens_details.cached_tokens) or 0

    @property
    def reasoning_tokens(self) -> int:
        """Output tokens that were reasoning."""
        details = self.completion_tokens_details
        return (details and details.reasoning_tokens) or 0


class ChatError(msgspec.Struct, frozen=True):
    """An error of a chat completion."""

    message: str = ""
    type: str | None = None
    param: str | None = None
    code: str | int | None = None


class ChatChunk(msgspec.Struct, frozen=True):
    """An event of a chat's stream, or its whole answer.

    Attributes:
        parts: The same choice as a stream has it, where the order of a whole answer is another.
    """

    model: str = ""
    created: int = 0
    choices: list[_Choice] = []
    usage: ChatUsage | None = None
    error: ChatError | None = None
    parts: list[_Choice] | None = msgspec.field(default=None, name=PARTS)


_decode_chunk = msgspec.json.Decoder(ChatChunk).decode
_decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class Dialect(abc.ABC):
    """One request in another protocol. It has one choice.

    Args:
        chat: The body of the chat completion that answers it.

    Attributes:
        ignored: Names of the fields of its body that have no effect here.
        parts: Parts of the answer so far; the last one may still grow.
        usage: As last reported.
        finish_reason: The chat's finish reason; None until there is one.
        stop_reason: The stop string or token that ended it, if one did.
    """

    def __init__(self, chat: dict[str, Any], ignored: tuple[str, ...] = ()) -> None:
        self.chat = chat
        self.ignored = ignored
        self.parts: list[AnswerPart] = []
        self.usage = ChatUsage()
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.model = ""
        self.created = 0
        self._has_begun = self._has_ended = self._is_growing = False
        self._early_rows: list[dict[str, Any]] = []

    def chat_body(self) -> bytes:
        """Return the body of the chat completion.

        Raises:
            BadRequestError: It is nested too deeply, or what the answer repeats of it is.
        """
        repeated: object = self.answer()
        for _ in range(_SPARE_DEPTH):
            repeated = [repeated]
        try:
            msgspec.json.encode(repeated)
            return msgspec.json.encode(self.chat)
        except RecursionError:
            raise BadRequestError("the body is nested too deeply", code="invalid_json") from None

    def events(self, data: bytes) -> bytes:
        """Translate whole events of the chat's stream.

        Raises:
            UpstreamError: They are not events of a chat completion.
        """
        sent = []
        for block in _BOUNDARY.split(data):
            if block.startswith(_PREFIX):
                sent += [_framed(event) for event in self._read(block[len(_PREFIX) :].strip())]
        return b"".join(sent)

    def whole(self, body: bytes) -> bytes:
        """Translate a whole answer.

        Raises:
            UpstreamError: It is not a chat completion.
        """
        for _ in self._read(body):
            pass  # their content is in the parts
        for _ in self._read(_DONE):
            pass
        return msgspec.json.encode(self.answer())

    def _read(self, payload: bytes) -> Iterator[DialectEvent]:
        if self._has_ended:
            return
        if payload == _DONE:
            self._has_ended = True
            is_cut = self.finish_reason == "length"
            yield from self._end_part(is_cut=is_cut)
            self.parts = [part for part in self.parts if not _is_lost(part)]
            if is_cut and self.parts and self.parts[-1].kind is not PartKind.CALL:
                self.parts[-1].is_cut = True
            yield from self.ended()
            return
        try:
            chunk = _decode_chunk(payload)
        except UNREADABLE as error:
            raise UpstreamError(f"an engine's answer is not a chat completion: {error}") from error
        if chunk.error is not None:
            self._has_ended = True
            if self._is_growing:
                self.parts[-1].is_cut = True
            yield from self.failed(chunk.error)
            return
        self.usage = chunk.usage or self.usage
        for choice in chunk.parts or chunk.choices[:1]:
            yield from self._take(chunk, choice)

    def _take(self, chunk: ChatChunk, choice: _Choice) -> Iterator[DialectEvent]:
        if not self._has_begun:
            self._has_begun = True
            self.model, self.created = chunk.model, chunk.created
            yield from self.begun()
        delta = choice.delta or choice.message or _Delta()
        calls = [(call.index, call) for call in delta.tool_calls or ()]
        if choice.delta is None:  # in whole answers they have no index
            calls = [(index, call) for index, (_, call) in enumerate(calls)]
        if calls and self._is_growing and self._is_of_call(calls[0][0]):
            yield from self._add_call(*calls.pop(0))  # other parts follow it
        rows, self._early_rows = self._early_rows, []
        if choice.logprobs is not None and not delta.tool_calls:  # else they are the call's
            rows += choice.logprobs.content or ()
        if reasoning := delta.reasoning or delta.reasoning_content:
            yield from self._add(PartKind.REASONING, reasoning)
        # A token within a character, or one that ends the answer, has a row but no text.
        is_text_open = self._is_growing and self.parts[-1].kind is PartKind.TEXT
        if delta.content or (rows and is_text_open):
            yield from self._add(PartKind.TEXT, delta.content or "", logprobs=rows)
        elif not (self.parts or calls):
            self._early_rows = rows
        for index, call in calls:
            yield from self._add_call(index, call)
        self.finish_reason = choice.finish_reason or self.finish_reason
        self.stop_reason = self.stop_reason if choice.stop_reason is None else choice.stop_reason

    def _is_of_call(self, index: int) -> bool:
        """Whether the last part is the call with this index."""
        return (self.parts[-1].kind, self.parts[-1].call) == (PartKind.CALL, index)

    def _add_call(self, index: int, call: _Call) -> Iterator[DialectEvent]:
        function = call.function or _Function()
        yield from self._add(
            PartKind.CALL,
            function.arguments or "",
            call=index,
            call_id=call.id or "",
            name=function.name or "",
        )

    def _add(
        self,
        kind: PartKind,
        text: str,
        *,
        call: int = 0,
        call_id: str = "",
        name: str = "",
        logprobs: list[dict[str, Any]] | None = None,
    ) -> Iterator[DialectEvent]:
        """Extend the last part, or end it and begin another one."""
        part = self.parts[-1] if self._is_growing else None
        if part is None or (part.kind, part.call) != (kind, call):
            yield from self._end_part(is_cut=False)
            part = AnswerPart(kind, len(self.parts), call, call_id, name)
            self.parts.append(part)
            self._is_growing = True
            yield from self.part_begun(part)
        part.logprobs += logprobs or ()
        if text:
            part.pieces.append(text)
            yield from self.part_grown(part, text, logprobs or [])

    def _end_part(self, *, is_cut: bool) -> Iterator[DialectEvent]:
        if self._is_growing:
            self._is_growing, part = False, self.parts[-1]
            part.is_cut = is_cut if part.kind is not PartKind.CALL else not _is_object(part.text)
            yield from self.part_ended(part)

    # --- what a dialect defines: events for each stage of an answer

    @abc.abstractmethod
    def begun(self) -> Iterator[DialectEvent]:
        """Yield the events that begin an answer."""

    @abc.abstractmethod
    def part_begun(self, part: AnswerPart) -> Iterator[DialectEvent]:
        """Yield the events that begin a part, which is still empty."""

    @abc.abstractmethod
    def part_grown(
        self, part: AnswerPart, text: str, logprobs: list[dict[str, Any]]
    ) -> Iterator[DialectEvent]:
        """Yield the events for further text of a part."""

    @abc.abstractmethod
    def part_ended(self, part: AnswerPart) -> Iterator[DialectEvent]:
        """Yield the events that complete a part."""

    @abc.abstractmethod
    def ended(self) -> Iterator[DialectEvent]:
        """Yield the events that complete the answer."""

    @abc.abstractmethod
    def failed(self, error: ChatError) -> Iterator[DialectEvent]:
        """Yield the events of an answer that ends with an error."""

    @abc.abstractmethod
    def answer(self) -> dict[str, Any]:
        """Return the whole answer."""


def _is_lost(part: AnswerPart) -> bool:
    return part.kind is PartKind.CALL and part.is_cut


def _is_object(text: str) -> bool:
    """Whether the arguments of a call are whole: those of one that is none never are."""
    try:
        _decode_object(text)
    except UNREADABLE:
        return False
    return True


def _framed(event: DialectEvent) -> bytes:
    data = msgspec.json.encode({"type": event.type, **event.data})
    return b"event: " + event.type.encode() + b"\ndata: " + data + b"\n\n"
