"""The work that this proxy has at each engine: prompts not computed yet, and streams. No I/O.

What a leg adds is taken away by the leg's end, whatever that is: a context manager for each.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from pdserve.proxy.brain.work import EngineWork, pairs_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class LedgerEntry:
    """One leg's part of an engine's work.

    Attributes:
        streams_before, kv_before: Of the engine, when the leg began.
    """

    def __init__(
        self,
        work: EngineWork,
        kind: str,
        num_tokens: int,
        num_cached: int,
        on_change: Callable[[], None],
    ) -> None:
        self._work = work
        self._on_change = on_change
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
            self._on_change()

    def end(self) -> None:
        """The leg is over."""
        if self._is_pending:
            self._settle()
        if self._is_streaming:
            self._is_streaming = False
            self._work.num_streams -= 1
            self._work.kv_tokens -= self._num_tokens
        self._on_change()

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
    """All engines' work, by URL.

    Args:
        on_change: Called when an engine has less of it.
    """

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        self._on_change = on_change
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
        entry = LedgerEntry(self.of(url), kind, num_tokens, num_cached, self._on_change)
        try:
            yield entry
        finally:
            entry.end()
