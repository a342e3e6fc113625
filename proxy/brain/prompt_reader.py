"""Turns a request's body into grain names: tokenizes it once, long ones in a thread.

A prompt that cannot be tokenized here (no tokenizer, tools, several prompts ...) is named by the
bytes it comes in. Equal beginnings still have equal names, but no engine's events contain them.
"""

from __future__ import annotations

import asyncio
import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from pdserve.errors import PdserveError
from pdserve.http.protocol import ChatRequest
from pdserve.proxy.brain.prompt import BYTES_PER_TOKEN, RoutePrompt
from pdserve.text.chat import ChatTemplate
from pdserve.text.tokenizer import Tokenizer, read_template
from pdserve.wire.ids import GRAIN_TOKENS, grain_hashes
from pdserve.wire.seal import UNREADABLE

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.config.http import ProxyConfig
    from pdserve.proxy.bodies import ClientBody

T = TypeVar("T")

_GRAIN_BYTES: Final = GRAIN_TOKENS * BYTES_PER_TOKEN
_MAX_CHARS_PER_TOKEN: Final = 32
"""As at the engines: what has more for each token of the context is no prompt that fits."""
_MAX_TOKENIZED_BYTES: Final = 4 << 20
_LONG_BYTES: Final = 1 << 12
"""Of a body that is read in a thread; a shorter one takes as long as the way there and back."""
_MAX_WAITING: Final = 64
_PATIENCE_S: Final = 0.1
"""An engine had better begin than wait longer for the best one."""
_OF_TEXT: Final = "prompt add_special_tokens cache_salt"
_OF_CHAT: Final = (
    "messages tools tool_choice documents reasoning_effort chat_template_kwargs "
    "add_generation_prompt continue_final_message add_special_tokens cache_salt"
)
"""Fields that a prompt depends on."""
_UNRENDERED: Final = ("functions", "chat_template", "truncate_prompt_tokens")
"""Fields that would change it, and are not looked at here."""


class _UnreadError(Exception):
    """A prompt cannot be tokenized here, for one of the reasons in `UNREAD`."""


class _TextFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a completion's body on which its prompt depends."""

    prompt: str | list[int]
    add_special_tokens: bool | None = None
    cache_salt: str | None = None


class PromptReader:
    """Reads prompts; has a thread of its own.

    Args:
        max_model_len: Returns the engines' longest context; 0 if not known yet.
    """

    def __init__(self, config: ProxyConfig, max_model_len: Callable[[], int]) -> None:
        self._config = config
        self._max_model_len = max_model_len
        self._tokenizer: Tokenizer | None = None
        self._template: ChatTemplate | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prompts")
        self._num_waiting = 0

    def load(self) -> None:
        """Read the tokenizer and the chat template, if there are any. Blocks.

        Raises:
            ConfigError: They cannot be used.
        """
        if not self._config.tokenizer:
            return
        tokenizer = Tokenizer.from_directory(Path(self._config.tokenizer))
        source = tokenizer.chat_template
        if self._config.chat_template:
            source = read_template(Path(self._config.chat_template))
        if source:
            self._template = ChatTemplate(source, tokenizer.special_tokens)
        self._tokenizer = tokenizer

    async def read(self, body: ClientBody) -> RoutePrompt:
        """Return a request's prompt; never raises for what is in it."""
        messages, text = body.fields.get("messages"), body.fields.get("prompt")
        num_bytes = len(messages or b"") + len(text or b"")
        if num_bytes < GRAIN_TOKENS:  # each token has at least one byte
            return RoutePrompt(body.num_bytes, num_tokens=max(1, num_bytes // BYTES_PER_TOKEN))
        try:
            if (messages is None) is (text is None) or any(_asks(body, n) for n in _UNRENDERED):
                raise _UnreadError("fields")
            if body.num_bytes > _MAX_TOKENIZED_BYTES:
                raise _UnreadError("long")
            asked: _TextFields | ChatRequest = (
                _part(body, _OF_TEXT, _TextFields)
                if messages is None
                else _part(body, _OF_CHAT, ChatRequest)
            )
            token_ids = await self._tokens(asked, body.num_bytes, body.created)
        except _UnreadError as reason:
            return _by_bytes(body, str(reason))
        grains = tuple(grain_hashes(token_ids, asked.cache_salt or ""))
        return RoutePrompt(body.num_bytes, len(token_ids), grains)

    def close(self) -> None:
        """End the thread, once it has nothing to do."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _tokens(
        self, asked: _TextFields | ChatRequest, num_bytes: int, now_s: int
    ) -> list[int]:
        if isinstance(asked, _TextFields) and isinstance(asked.prompt, list):
            if not all(0 <= each < 1 << 32 for each in asked.prompt):
                raise _UnreadError("refused")
            return asked.prompt
        if self._tokenizer is None:
            raise _UnreadError("no tokenizer")
        if num_bytes < _LONG_BYTES:
            return self._tokenize(asked, now_s)
        if self._num_waiting >= _MAX_WAITING:
            raise _UnreadError("busy")
        self._num_waiting += 1
        work = asyncio.get_running_loop().run_in_executor(
            self._thread, self._tokenize, asked, now_s
        )
        work.add_done_callback(self._left)
        done, _ = await asyncio.wait((work,), timeout=_PATIENCE_S)
        if not done:
            raise _UnreadError("slow")
        return work.result()

    def _left(self, work: asyncio.Future[list[int]]) -> None:
        self._num_waiting -= 1
        if not work.cancelled():
            work.exception()  # seen, if nothing waits for it any more

    def _tokenize(self, asked: _TextFields | ChatRequest, now_s: int) -> list[int]:
        """Render and tokenize."""
        assert self._tokenizer is not None
        try:
            if isinstance(asked, _TextFields):
                assert isinstance(asked.prompt, str)
                text, adds = asked.prompt, asked.add_special_tokens is not False
            elif self._template is None:
                raise _UnreadError("no chat template")
            else:
                text, adds = self._rendered(asked, now_s), bool(asked.add_special_tokens)
            longest = self._max_model_len()
            if longest and len(text) > _MAX_CHARS_PER_TOKEN * longest:
                raise _UnreadError("long")
            return self._tokenizer.encode(text, add_special_tokens=adds)
        except PdserveError as error:  # the engine reports it to the client
            raise _UnreadError("refused") from error

    def _rendered(self, asked: ChatRequest, now_s: int) -> str:
        assert self._template is not None
        return self._template.render(
            asked.messages,
            now_s=now_s,
            tools=asked.offered_tools,
            add_generation_prompt=asked.add_generation_prompt is not False,
            continue_final_message=bool(asked.continue_final_message),
            variables=asked.template_variables,
        )


def _asks(body: ClientBody, name: str) -> bool:
    """Return whether a field is present and asks for something."""
    raw = body.fields.get(name)
    return raw is not None and bytes(raw).strip() not in (b"null", b"[]", b"false")


def _part(body: ClientBody, names: str, kind: type[T]) -> T:
    """Decode some fields of a body."""
    fields = {name: raw for name in names.split() if (raw := body.fields.get(name)) is not None}
    try:
        return msgspec.json.decode(msgspec.json.encode(fields), type=kind)
    except UNREADABLE as error:
        raise _UnreadError("fields") from error


def _by_bytes(body: ClientBody, why: str) -> RoutePrompt:
    """Name a prompt by its bytes; those of fields before it that templates write first."""
    data = b"".join(bytes(body.fields.get(name) or b"") for name in ("tools", "messages", "prompt"))
    name = b"pdserve-bytes\0" + bytes(body.fields.get("cache_salt") or b"")
    grains = []
    for start in range(0, len(data) - _GRAIN_BYTES + 1, _GRAIN_BYTES):
        name = hashlib.blake2b(name + data[start : start + _GRAIN_BYTES], digest_size=8).digest()
        grains.append(int.from_bytes(name))
    return RoutePrompt(body.num_bytes, len(data) // BYTES_PER_TOKEN, tuple(grains), why)
