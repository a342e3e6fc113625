"""Reads one streamed answer of OpenAI's API: which events carry tokens, and when they arrived.

An event brings a token if it has text, token ids, reasoning or a tool call; or no text but no
other reason to be there either (half a character is held back, a token without text). An event
that only names the role, or only says how the answer ended, brings none - unless the server's
own count says that one token is still missing: then the end was a token (end of text). Knows no
connection.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from pdserve.bench.sse import EventParser

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
    """One answer while it comes.

    Attributes:
        chunk_s, chunk_tokens: When each chunk with tokens had come, and how many it had as far
            as the server says, else 1.
        text: All that was generated.
        token_ids: Likewise, if the server tells them.
        finish_reason: As the server says.
        usage: Tokens of prompt and output by the server's count, if it tells.
        num_cached_tokens: Those of the prompt that a cache had, likewise.
        error: What the server says went wrong, or what is wrong with its answer.
        is_done: `[DONE]` has come.
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

    @property
    def text(self) -> str:
        """All that was generated."""
        return "".join(self._texts)

    def feed(self, data: bytes, at_s: float) -> None:
        """Take bytes of the body that had come at `at_s`."""
        for event in self._parser.feed(data):
            if event == b"[DONE]":
                self.is_done = True
            elif not self.error:
                self._take(event, at_s)

    def finish(self) -> None:
        """The answer has ended; `error` says what it lacks, if it does."""
        if not self.error and not self.is_done and not self.finish_reason:
            self.error = "the answer broke off: neither a finish reason nor [DONE] came"
        if self._bare_end_s is not None and not self.error:
            told = self.usage[1] if self.usage is not None else None
            is_token = not self.chunk_s if told is None else sum(self.chunk_tokens) < told
            if is_token:
                self.chunk_s.append(self._bare_end_s)
                self.chunk_tokens.append(1)
        if not self.error and not self.chunk_s:
            self.error = "the answer has no token"

    def _take(self, data: bytes, at_s: float) -> None:
        try:
            event = _decode(data)
        except msgspec.DecodeError as error:
            text = data[:80].decode(errors="replace")
            self.error = f"an event is not as OpenAI's API has it ({error}): {text}"
            return
        if event.error is not None or event.object == "error":
            self.error = _shown(event.error) or event.message or "an error event"
            return
        before = self.usage
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
        elif self.usage is not None and self.usage is not before:  # it counts as it goes
            number = max(1, self.usage[1] - (before[1] if before is not None else 0))
        self.chunk_s.append(at_s)
        self.chunk_tokens.append(number)


def error_of(status: int, body: bytes) -> str:
    """Return what the body of an answer with another status than 200 says."""
    try:
        content = msgspec.json.decode(body)
    except msgspec.DecodeError:
        content = body.decode(errors="replace")
    if isinstance(content, dict):
        content = _shown(content.get("error")) or content.get("message") or content
    return f"HTTP {status}: {content}"[:_MAX_ERROR_CHARS].rstrip(": ")


def _shown(error: object) -> str:
    """The message of an error object."""
    if isinstance(error, dict):
        return str(error.get("message") or error)[:_MAX_ERROR_CHARS]
    return "" if error is None else str(error)[:_MAX_ERROR_CHARS]
