"""Reads one streamed answer of OpenAI's API: which events carry tokens, and when they arrived.

An event carries a token if it has text, token ids, reasoning or a tool call, or if it has no text
and no other purpose (half a character is held back, or a token has no text). An event with only the
role, or only the finish reason, carries none - unless one token is missing from the server's own
count: then the end was a token (end of text). Knows no connection.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from pdserve.bench.sse import EventParser
from pdserve.wire.seal import UNREADABLE

_MAX_ERROR_CHARS: Final = 300


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None

    @property
    def text(self) -> str:
        return (self.reasoning_content or self.reasoning or "") + (self.content or "")


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None
    object: str | None = None
    message: str | None = None


_decode: Final = msgspec.json.Decoder(_Event).decode


class Answer:
    """One answer while it arrives.

    Attributes:
        chunk_s, chunk_tokens: When each chunk with tokens arrived, and its number of tokens by the
            server's count, else 1.
        text: All generated text.
        token_ids: Its token ids, if the server reports them.
        finish_reason: As the server reported it.
        usage: Tokens of prompt and output by the server's count, if reported.
        num_cached_tokens: Cached tokens of the prompt, likewise.
        error: The error that the server reported, or the fault in its answer.
        is_done: Whether `[DONE]` has arrived.
    """

    def __init__(self) -> None:
        self.chunk_s: list[float] = []
        self.chunk_tokens: list[int] = []
        self.token_ids: list[int] = []
        self.finish_reason = ""
        self.usage: tuple[int, int] | None = None
        self.num_cached_tokens: int | None = None
        self.error = ""
        self.is_done = False
        self._parser = EventParser()
        self._texts: list[str] = []
        self._bare_end_s: float | None = None
        self._num_counted = 0

    @property
    def text(self) -> str:
        """All that was generated."""
        return "".join(self._texts)

    def feed(self, data: bytes, at_s: float) -> None:
        """Read bytes of the body that arrived by `at_s`."""
        for event in self._parser.feed(data):
            if event == b"[DONE]":
                self.is_done = True
            elif not self.error:
                self._take(event, at_s)

    def finish(self) -> None:
        """End the answer; `error` then names anything that is missing."""
        if not self.error and not self.is_done and not self.finish_reason:
            self.error = "the answer broke off: neither a finish reason nor [DONE] came"
        if self._bare_end_s is not None and not self.error:
            total = self.usage[1] if self.usage is not None else None
            is_token = not self.chunk_s if total is None else sum(self.chunk_tokens) < total
            if is_token:
                self.chunk_s.append(self._bare_end_s)
                self.chunk_tokens.append(1)
        if not self.error and not self.chunk_s:
            self.error = "the answer has no token"

    def _take(self, data: bytes, at_s: float) -> None:
        try:
            event = _decode(data)
        except UNREADABLE as error:
            text = data[:80].decode(errors="replace")
            self.error = f"an event is not as OpenAI's API has it ({error}): {text}"
            return
        if event.error is not None or event.object == "error":
            self.error = _shown(event.error) or event.message or "an error event"
            return
        if event.usage is not None:
            self.usage = (event.usage.prompt_tokens, event.usage.completion_tokens)
            if event.usage.prompt_tokens_details is not None:
                self.num_cached_tokens = event.usage.prompt_tokens_details.cached_tokens
        if not event.choices:
            return
        choice = event.choices[0]
        delta = choice.delta
        text = (delta.text if delta is not None else choice.text) or ""
        if text:
            self._texts.append(text)
        if choice.finish_reason:
            self.finish_reason = choice.finish_reason
        brings = bool(text or choice.token_ids or (delta is not None and delta.tool_calls))
        if not brings:
            if choice.finish_reason:
                self._bare_end_s = at_s
                return
            if delta is not None and delta.role is not None:
                return
        number = 1
        if choice.token_ids:
            self.token_ids += choice.token_ids
            number = len(choice.token_ids)
        elif event.usage is not None:  # it counts as it goes, or tells the sum at the end
            number = max(1, event.usage.completion_tokens - self._num_counted)
        self._num_counted += number
        self.chunk_s.append(at_s)
        self.chunk_tokens.append(number)


def error_of(status: int, body: bytes) -> str:
    """Return the message in the body of an answer whose status is not 200."""
    try:
        content = msgspec.json.decode(body)
    except UNREADABLE:
        content = body.decode(errors="replace")
    if isinstance(content, dict):
        content = _shown(content.get("error")) or content.get("message") or content
    return f"HTTP {status}: {content}"[:_MAX_ERROR_CHARS].rstrip(": ")


def _shown(error: object) -> str:
    """The message of an error object."""
    if isinstance(error, dict):
        return str(error.get("message") or error)[:_MAX_ERROR_CHARS]
    return "" if error is None else str(error)[:_MAX_ERROR_CHARS]
