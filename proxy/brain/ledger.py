"""The work that this proxy has at each engine: prompts not computed yet, and streams. No I/O.

What a leg adds is taken away by the leg's end, whatever that is: a context manager for each.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(slots=True)
class EngineWork:
    """What one engine has to do for this proxy.

    Attributes:
        num_prompts, prompt_tokens: Prompts that are not computed, and what is to be computed of
            them.
        prompt_pairs: Pairs of such a token and one before it.
        num_streams, kv_tokens: Requests that give tokens, and their KV.
    """

    num_prompts: int = 0
    prompt_tokens: int = 0
    prompt_pairs: float = 0.0
    num_streams: int = 0
    kv_tokens: int = 0


class LedgerEntry:
    """One leg's part of an engine's work.

    Attributes:
        streams_before, kv_before: Of the engine, when the leg began.
    """

    def __init__(self, work: EngineWork, kind: str, num_tokens: int, num_cached: int) -> None:
        self._work = work
        self._streams_on = kind == "local"
        self._num_tokens = num_tokens
        self._missing = max(0, num_tokens - num_cached)
        self._pairs = pairs_of(self._missing, num_tokens - self._missing)
        self._is_pending = self._is_streaming = False
        self.streams_before, self.kv_before = work.num_streams, work.kv_tokens
        if kind == "decode":
            self._stream()
        else:
            self._is_pending = True
            work.num_prompts += 1
            work.prompt_tokens += self._missing
            work.prompt_pairs += self._pairs

    def computed(self) -> None:
        """The prompt is computed: the first token is there. Said again, it means nothing."""
        if self._is_pending:
            self._settle()
            if self._streams_on:
                self._stream()

    def end(self) -> None:
        """The leg is over."""
        if self._is_pending:
            self._settle()
        if self._is_streaming:
            self._is_streaming = False
            self._work.num_streams -= 1
            self._work.kv_tokens -= self._num_tokens

    def _settle(self) -> None:
        self._is_pending = False
        self._work.num_prompts -= 1
        self._work.prompt_tokens -= self._missing
        self._work.prompt_pairs -= self._pairs

    def _stream(self) -> None:
        self._is_streaming = True
        self._work.num_streams += 1
        self._work.kv_tokens += self._num_tokens


class WorkLedger:
    """All engines' work, by URL."""

    def __init__(self) -> None:
        self._work: dict[str, EngineWork] = {}

    def of(self, url: str) -> EngineWork:
        """One engine's; it goes on changing."""
        return self._work.setdefault(url, EngineWork())

    @contextmanager
    def hold(self, url: str, kind: str, num_tokens: int, num_cached: int) -> Iterator[LedgerEntry]:
        """Count a leg for as long as the block runs.

        Args:
            kind: prefill, decode or local.
            num_tokens: Of the prompt.
            num_cached: Of those, what the engine has.
        """
        entry = LedgerEntry(self.of(url), kind, num_tokens, num_cached)
        try:
            yield entry
        finally:
            entry.end()


def pairs_of(num_tokens: int, num_before: int) -> float:
    """Pairs of one of the tokens and one that it attends to."""
    return num_tokens * (num_before + num_tokens / 2)
