"""The work that this proxy has at each engine: prompts not computed yet, and streams. No I/O.

What a leg adds is taken away by the leg's end, whatever that is: a context manager for each.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from pdserve.proxy.brain.work import EngineWork, PromptWork, prompt_work

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class LedgerEntry:
    """One leg's part of an engine's work.

    Attributes:
        before, begun_s: Prompts of the engine when the leg began, and how long it had been at the
            first of them.
        streams_before, kv_before: Of the engine, when the leg began.
        beside: Prompts that it computed while the leg gave tokens, once that is over.
    """

    def __init__(
        self, ledger: WorkLedger, url: str, kind: str, num_tokens: int, num_cached: int
    ) -> None:
        self._ledger = ledger
        self._url = url
        self._work = work = ledger.of(url)
        self._streams_on = kind == "local"
        self._num_tokens = num_tokens
        self._is_pending = self._is_streaming = False
        self._own = prompt_work(num_tokens, num_cached)
        self.before = work.prompts
        self.begun_s = ledger.now_s() - work.since_s if work.num_prompts else 0.0
        self.beside = PromptWork()
        self.streams_before, self.kv_before = work.num_streams, work.kv_tokens
        if kind == "decode":
            self._stream()
        else:
            self._is_pending = True
            if not work.num_prompts:
                work.since_s = ledger.now_s()
            work.num_prompts += 1
            work.prompt_tokens += self._own.tokens
            work.prompt_pairs += self._own.pairs
            ledger.asked = ledger.asked.plus(self._own)

    @property
    def _done(self) -> PromptWork:
        """What its engine has computed so far."""
        return self._ledger.done.get(self._url, PromptWork())

    def computed(self) -> None:
        """The prompt is computed: the first token is there. Said again, it means nothing."""
        if self._is_pending:
            self._settle()
            if self._streams_on:
                self._stream()
            self._ledger.on_change()

    def end(self) -> None:
        """The leg is over."""
        if self._is_pending:
            self._settle()
        if self._is_streaming:
            self._is_streaming = False
            self.beside = self._done.minus(self._done_before)
            self._work.num_streams -= 1
            self._work.kv_tokens -= self._num_tokens
        self._ledger.on_change()

    def _settle(self) -> None:
        self._is_pending = False
        self._work.since_s = self._ledger.now_s()
        self._work.num_prompts -= 1
        self._work.prompt_tokens -= self._own.tokens
        self._work.prompt_pairs -= self._own.pairs
        self._ledger.done[self._url] = self._done.plus(self._own)

    def _stream(self) -> None:
        self._is_streaming = True
        self._done_before = self._done
        self._work.num_streams += 1
        self._work.kv_tokens += self._num_tokens


class WorkLedger:
    """All engines' work, by URL.

    Args:
        now_s: Monotonic time.
        on_change: Called when an engine has less of it.

    Attributes:
        asked: Prompts that engines were sent, of all time.
        done: Those that they have computed, by URL.
    """

    def __init__(
        self, now_s: Callable[[], float], on_change: Callable[[], None] = lambda: None
    ) -> None:
        self.now_s = now_s
        self.on_change = on_change
        self.asked = PromptWork()
        self.done: dict[str, PromptWork] = {}
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
        entry = LedgerEntry(self, url, kind, num_tokens, num_cached)
        try:
            yield entry
        finally:
            entry.end()
