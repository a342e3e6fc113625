"""The outstanding work of each engine: prompts not yet computed, and streams. No I/O.

The work a leg adds is removed when the leg ends, however it ends: each has a context manager. The
work of other senders is what the engine recently reported beyond that.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from pdserve.proxy.brain.work import EngineWork, PromptWork, prompt_work
from pdserve.proxy.policies.choosing import STALE_AFTER_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_NUM_TYPICAL: Final = 50
_MAX_REPORT_DELAY_S: Final = 0.25
RECENT_S: Final = 2.0
"""What an engine was busy with counts less and less, in so long a third."""
_NOTHING: Final = EngineWork()


class LedgerEntry:
    """One leg's part of an engine's work.

    Attributes:
        before, begun_s: The engine's prompts when the leg began, others' included, and how long
            it had been computing the first of them.
        streams_before, kv_before: The engine's streams and KV then, others' included; for a leg
            whose prompt another engine computes, when that is done.
        beside: Prompts that it computed while the leg gave tokens, set once that is over.
    """

    def __init__(
        self, ledger: WorkLedger, engine: _Engine, kind: str, num_tokens: int, num_cached: int
    ) -> None:
        self._ledger = ledger
        self._engine = engine
        work = engine.work
        self._streams_on = kind == "local"
        self._num_tokens = num_tokens
        self._is_pending = self._is_streaming = self._is_coming = False
        self._own = prompt_work(num_tokens, num_cached)
        there = work.plus(ledger.others_of(engine))
        self.before = there.prompts
        self.begun_s = ledger.now_s() - work.since_s if work.num_prompts else 0.0
        self.beside = PromptWork()
        self.streams_before, self.kv_before = there.num_streams, there.kv_tokens
        if kind == "decode":
            self._stream()
        elif kind == "receive":
            self._is_coming = True
            work.num_coming += 1
            work.coming_tokens += num_tokens
        else:
            self._is_pending = True
            if not work.num_prompts:
                work.since_s, work.begun_tokens = ledger.now_s(), self._own.tokens
            work.num_prompts += 1
            work.prompt_tokens += self._own.tokens
            work.prompt_pairs += self._own.pairs
            ledger.note(self._own)

    def computed(self) -> None:
        """Note that the prompt is computed, as the first token is there; may be repeated."""
        if self._is_coming:
            self._come()
            there = self._engine.work.plus(self._ledger.others_of(self._engine))
            self.streams_before, self.kv_before = there.num_streams, there.kv_tokens
            self._stream()
        if self._is_pending:
            self._settle()
            if self._streams_on:
                self._stream()
            self._ledger.on_change()

    def end(self) -> None:
        """Note that the leg is over."""
        if self._is_coming:
            self._come()
        if self._is_pending:
            self._settle()
        if self._is_streaming:
            self._is_streaming = False
            self.beside = self._engine.done.minus(self._done_before)
            self._engine.work.num_streams -= 1
            self._engine.work.kv_tokens -= self._num_tokens
        self._ledger.on_change()

    def _come(self) -> None:
        self._is_coming = False
        self._engine.work.num_coming -= 1
        self._engine.work.coming_tokens -= self._num_tokens

    def _settle(self) -> None:
        self._is_pending = False
        work = self._engine.work
        work.since_s = self._ledger.now_s()
        work.num_prompts -= 1
        work.prompt_tokens -= self._own.tokens
        work.prompt_pairs -= self._own.pairs
        work.begun_tokens = work.prompt_tokens
        self._engine.done = self._engine.done.plus(self._own)
        self._ledger.was_busy(self._engine, self._own)

    def _stream(self) -> None:
        self._is_streaming = True
        self._done_before = self._engine.done
        self._engine.work.num_streams += 1
        self._engine.work.kv_tokens += self._num_tokens
        self._ledger.kv_of_stream.add(self._num_tokens)


class WorkLedger:
    """All engines' work, by URL.

    Args:
        now_s: Monotonic time.
        on_change: Called when an engine's work has shrunk.
        seconds_of: Returns the time an engine takes for some prompts; others' count that long.

    Attributes:
        asked: All prompts ever sent to engines.
        kv_of_stream: Tokens of a stream's KV, as it begins.
    """

    def __init__(
        self,
        now_s: Callable[[], float],
        on_change: Callable[[], None] = lambda: None,
        seconds_of: Callable[[PromptWork], float] = lambda prompts: STALE_AFTER_S * prompts.num,
    ) -> None:
        self.now_s = now_s
        self._seconds_of = seconds_of
        self.on_change = on_change
        self.asked = PromptWork()
        self.kv_of_stream = _Typical()
        self._tokens_of_prompt, self._pairs_of_prompt = _Typical(), _Typical()
        self._engines: dict[str, _Engine] = {}

    def _of(self, url: str) -> _Engine:
        return self._engines.setdefault(url, _Engine())

    def forget(self, url: str) -> None:
        """Forget an engine that has gone; legs running there end on their own."""
        self._engines.pop(url, None)

    def of(self, url: str) -> EngineWork:
        """Return one engine's work from this proxy; a live object."""
        return self._of(url).work

    def of_others(self, url: str) -> EngineWork:
        """Return its estimated work from others, less prompts computed since its report."""
        return self.others_of(self._of(url))

    def others_of(self, engine: _Engine) -> EngineWork:
        """Return the same for a given engine record."""
        others = engine.others
        if others is None or self.now_s() - others.at_s > STALE_AFTER_S:
            return _NOTHING
        work = others.work
        if not work.num_prompts:
            return work
        ago_s = self.now_s() - others.at_s
        left = max(0.0, 1 - ago_s / max(1e-9, self._seconds_of(work.prompts)))
        return EngineWork(
            num_prompts=math.ceil(left * work.num_prompts),
            prompt_tokens=round(left * work.prompt_tokens),
            prompt_pairs=left * work.prompt_pairs,
            num_streams=work.num_streams,
            kv_tokens=work.kv_tokens,
        )

    def at(self, url: str) -> EngineWork:
        """Return all of an engine's current work."""
        return self.of(url).plus(self.of_others(url))

    def begun_s(self, url: str) -> float:
        """Return the time spent so far on its current prompt, if that is this proxy's."""
        work = self.of(url)
        return self.now_s() - work.since_s if work.num_prompts else 0.0

    def report_delay_s(self, url: str) -> float:
        """Return how late it may report others' prompts as computed; 0: it has none."""
        others = self._of(url).others
        return others.every_s if others is not None and self.of_others(url).num_prompts else 0.0

    def busy_s(self, url: str) -> float:
        """Return the seconds it has spent on prompts, as weighted by `RECENT_S`."""
        return self._busy_s(self._of(url))

    def _busy_s(self, engine: _Engine) -> float:
        seconds, at_s = engine.busy
        return seconds * math.exp((at_s - self.now_s()) / RECENT_S) if seconds else 0.0

    def was_busy(self, engine: _Engine, prompts: PromptWork) -> None:
        """Note prompts that it has computed."""
        engine.busy = self._busy_s(engine) + self._seconds_of(prompts), self.now_s()

    def note(self, prompt: PromptWork) -> None:
        """Count a prompt sent to an engine."""
        self.asked = self.asked.plus(prompt)
        self._tokens_of_prompt.add(prompt.tokens)
        self._pairs_of_prompt.add(prompt.pairs)

    def heard(self, url: str, *, num_prompts: int, num_streams: int) -> None:
        """Record the number of requests that an engine reports.

        Those beyond this proxy's are others'. Their length is unknown and taken to be as its own.
        """
        engine = self._of(url)
        num_prompts = max(0, num_prompts - engine.work.num_prompts)
        num_streams = max(0, num_streams - engine.work.num_streams - engine.work.num_coming)
        work = EngineWork(
            num_prompts=num_prompts,
            prompt_tokens=round(num_prompts * self._tokens_of_prompt.mean),
            prompt_pairs=num_prompts * self._pairs_of_prompt.mean,
            num_streams=num_streams,
            kv_tokens=round(num_streams * self.kv_of_stream.mean),
        )
        now_s, before = self.now_s(), engine.others
        if before is not None and before.work.num_prompts:
            self.was_busy(engine, before.work.prompts.minus(self.others_of(engine).prompts))
        every_s = 0.0 if before is None else min(_MAX_REPORT_DELAY_S, now_s - before.at_s)
        engine.others = _Others(work, now_s, every_s)
        self.on_change()

    @contextmanager
    def hold(
        self, url: str | None, kind: str, num_tokens: int, num_cached: int
    ) -> Iterator[LedgerEntry]:
        """Count a leg for as long as the block runs.

        Args:
            url: None for an engine that has gone: nothing is kept for it.
            kind: prefill, decode, local, or receive: a decode whose prompt is still to be computed
                elsewhere.
            num_tokens: Length of the prompt.
            num_cached: Tokens of it that the engine has.
        """
        engine = _Engine() if url is None else self._of(url)
        entry = LedgerEntry(self, engine, kind, num_tokens, num_cached)
        try:
            yield entry
        finally:
            entry.end()


@dataclass(frozen=True, slots=True)
class _Others:
    """The work of other senders at an engine.

    Attributes:
        at_s, every_s: Time of its report, and time since the previous one.
    """

    work: EngineWork
    at_s: float
    every_s: float


@dataclass(slots=True)
class _Engine:
    """The known work of one engine.

    Attributes:
        work: This proxy's work there.
        done: Prompts of this proxy that it has computed.
        busy: Decayed seconds spent on prompts at a point in time, and that time.
    """

    work: EngineWork = field(default_factory=EngineWork)
    done: PromptWork = field(default_factory=PromptWork)
    others: _Others | None = None
    busy: tuple[float, float] = (0.0, 0.0)


class _Typical:
    """The mean of recent values."""

    def __init__(self) -> None:
        self.mean = 0.0
        self._num = 0

    def add(self, value: float) -> None:
        self._num = min(self._num + 1, _NUM_TYPICAL)
        self.mean += (value - self.mean) / self._num
