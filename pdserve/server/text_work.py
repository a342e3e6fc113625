"""Work on long texts: how long they may be, and the threads that it is done in.

Short texts are done at once, on the event loop. Long ones have a few threads of their own and a
queue with an end, so that whoever sends many of them is refused and not waited for, and nothing
else that needs a thread stands behind them. Knows neither requests nor tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import msgspec

from pdserve.errors import BadRequestError, ContextLengthError, OverloadedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pdserve.text.tokenizer import Tokenizer

T = TypeVar("T")

LONG_TEXT_CHARS = 1 << 14
"""What takes some milliseconds and belongs into a thread."""
MAX_SHORT_TEXTS = 64
"""Of more texts than that the number counts, not only what is in them."""
MAX_CHARS_PER_TOKEN = 32
"""A text with more characters than that for each token of the context is no prompt that fits:
prose has 3 to 5, and what little has more has runs of spaces."""
MIN_PROMPT_CHARS = 1 << 16
MIN_MESSAGES = 1 << 10
"""Bounds for models of short contexts."""
_BYTES_PER_CHAR = 6
"""JSON writes a character as `\\uXXXX` at worst."""
_RETRY_AFTER_S = 1.0


class TextWork:
    """Threads for one kind of work, and who waits for them. One event loop.

    Args:
        what: What the work is called where it is refused.
        max_jobs: Running and waiting ones; further ones are refused.
    """

    def __init__(self, what: str, *, num_threads: int, max_jobs: int) -> None:
        self._what = what
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix=what)
        self._max_jobs = max_jobs
        self.num_jobs = 0

    async def run(self, function: Callable[[], T], num_chars: int, num_texts: int = 1) -> T:
        """Return what `function` returns; if it has much to do, it does it in a thread.

        A job that was begun goes on when its caller is cancelled, and counts until it ends.

        Raises:
            OverloadedError: Too many others wait.
        """
        if num_chars < LONG_TEXT_CHARS and num_texts <= MAX_SHORT_TEXTS:
            return function()
        if self.num_jobs >= self._max_jobs:
            raise OverloadedError(
                f"{self.num_jobs} requests for {self._what} of long texts run or wait already",
                retry_after_s=_RETRY_AFTER_S,
            )
        self.num_jobs += 1
        loop = asyncio.get_running_loop()

        def leave(_: Future[T]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody counts any more
                loop.call_soon_threadsafe(self._leave)

        job = self._executor.submit(function)
        job.add_done_callback(leave)
        return await asyncio.wrap_future(job)

    def _leave(self) -> None:
        self.num_jobs -= 1

    def close(self) -> None:
        """Let go of what waits; what runs ends by itself."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def refuse_long_prompt(text: str, widest: int | None, max_model_len: int, *, field: str) -> None:
    """Refuse a text that can be no prompt, before it is tokenized, which may take minutes.

    Args:
        widest: Characters of a token at most; None if that is not known, or the prompt is cut.

    Raises:
        ContextLengthError: It is longer than any that has room.
    """
    if widest is not None and len(text) > widest * max_model_len:
        num_tokens = -(-len(text) // widest)
        raise ContextLengthError(
            f"This model's maximum context length is {max_model_len} tokens, but the "
            f"request has {num_tokens} tokens of prompt or more; shorten the prompt.",
            param=field,
        )
    max_chars = max(MIN_PROMPT_CHARS, MAX_CHARS_PER_TOKEN * max_model_len)
    if len(text) > max_chars:
        raise ContextLengthError(
            f"This model's maximum context length is {max_model_len} tokens, and {field} has "
            f"{len(text)} characters: at most {max_chars} are tokenized; shorten the prompt.",
            param=field,
        )


def refuse_large_chat(
    fields: Mapping[str, Sequence[object] | Mapping[str, object] | None],
    num_bytes: int,
    max_model_len: int,
) -> None:
    """Refuse a chat that can be no prompt, before it is rendered.

    Args:
        fields: What a template sees of the body, by its names there, with `messages` among them.
        num_bytes: The size of the body, which may have other fields that are large.

    Raises:
        BadRequestError: The messages are too many, or a field is too large.
    """
    num_messages = len(fields["messages"] or ())
    refuse_more("messages", num_messages, max(MIN_MESSAGES, max_model_len), "messages")
    max_chars = max(MIN_PROMPT_CHARS, MAX_CHARS_PER_TOKEN * max_model_len)
    if num_bytes <= _BYTES_PER_CHAR * max_chars:
        return
    for field, value in fields.items():
        try:
            size = len(msgspec.json.encode(value))
        except RecursionError as error:
            raise BadRequestError(f"{field} is nested too deeply", param=field) from error
        refuse_more(field, size, _BYTES_PER_CHAR * max_chars, "bytes of JSON")


def refuse_more(field: str, size: int, maximum: int, what: str) -> None:
    """Refuse what is larger than it may be.

    Raises:
        BadRequestError: It is.
    """
    if size > maximum:
        raise BadRequestError(
            f"{field} has {size} {what}: at most {maximum} are taken; send less, or in pieces",
            param=field,
        )


async def encode(
    work: TextWork, tokenizer: Tokenizer, texts: Sequence[str], *, add_special_tokens: bool
) -> list[list[int]]:
    """Tokenize without holding up the event loop.

    Raises:
        OverloadedError: See `TextWork`.
    """

    def encode_all() -> list[list[int]]:
        return [tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]

    return await work.run(encode_all, sum(map(len, texts)), len(texts))
