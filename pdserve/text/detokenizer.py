"""Turns token ids into text, one at a time, as they arrive.

Text is given out as soon as no later token can change it. What all pushes and the flush
return, joined, is exactly what the tokens add to `Tokenizer.decode` of the prompt before them: a
stream and a whole answer can never differ. Does not know stop strings or requests.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.text.tokenizer import Tokenizer


class Detokenizer(Protocol):
    """One text under construction."""

    def push(self, token_id: int) -> str:
        """Add a token; return the text that is now certain. O(1) amortised."""
        ...

    def flush(self) -> str:
        """End the text; return what was held back."""
        ...


def make_detokenizer(
    tokenizer: Tokenizer, *, skip_special_tokens: bool, prompt: Sequence[int] = ()
) -> Detokenizer:
    """Return the detokenizer for this vocabulary's spelling, for the text after `prompt`."""
    if tokenizer.is_byte_level:
        return ByteLevelDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    return WindowDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens, prompt=prompt)


class ByteLevelDetokenizer:
    """For vocabularies whose tokens are byte strings (GPT-2, Llama 3, Qwen, DeepSeek).

    Decoding is concatenation of bytes and one UTF-8 decoding with replacement, so an
    incremental UTF-8 decoder gives the same text; it holds back at most three bytes.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """See `Detokenizer`."""
        if token_id in self._skipped:
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """See `Detokenizer`."""
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """For every other vocabulary: decodes tokens with the ones before them as context.

    A token's text may depend on whether it is first (its leading space is dropped), so tokens are
    decoded after the last ones that had text, and that text is cut off; the first ones are decoded
    after the last token of the prompt that is neither skipped nor a byte. Byte tokens (`<0xE4>`)
    are held back until their run ends, because the decoder replaces a whole run by U+FFFD if any
    of it is not UTF-8.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool, prompt: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        with_text = (token_id for token_id in reversed(prompt) if not self._has_no_text(token_id))
        last = next((one for one in with_text if not tokenizer.is_byte_token(one)), None)
        self._context: list[int] = [] if last is None else [last]
        self._context_text = self._decode(self._context)
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        """See `Detokenizer`."""
        if self._has_no_text(token_id):
            return ""
        self._held.append(token_id)
        return "" if self._tokenizer.is_byte_token(token_id) else self.flush()

    def flush(self) -> str:
        """See `Detokenizer`."""
        if not self._held:
            return ""
        text = self._decode(self._context + self._held)[len(self._context_text) :]
        if text:
            self._context, self._held = self._held, []
            self._context_text = self._decode(self._context)
        elif self._context:
            self._held = []
        # Otherwise nothing had text yet: these tokens still decide what "first" means.
        return text

    def _has_no_text(self, token_id: int) -> bool:
        return token_id in self._skipped or self._tokenizer.token(token_id) is None

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)
