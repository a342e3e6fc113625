"""The events of a deployment since this proxy started, as sentences.

Each second's view of the deployment is compared with the one before: engines that came, left, died
or restarted, breakers that opened and closed, requests that failed or took a rung of the ladder.
Pure: it does no I/O and reads no clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from pdserve.wire.request import KVStoreStats
from pdserve.wire.transfer import LeaseEnd

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pdserve.wire.request import EngineStats

MAX_EVENTS: Final = 100

GOOD, WARN, BAD, PLAIN = "good", "warn", "bad", ""
"""Tones of events: good news, worth a look, needs action, or for information only."""

RUNGS: Final[Mapping[str, str]] = {
    "retry_decode": "asked the same decode engine again",
    "other_decode": "took another decode engine",
    "other_prefill": "prefilled again",
    "local": "one engine did everything",
    "shed": "sent the client away",
}
"""Description of each rung of the ladder."""

FAILED: Final[Mapping[str, str]] = {"error": "failed", "shed": "sent away (429 or 503)"}
"""Description of each failed outcome of a request."""

_BREAKER_TONES: Final = {"open": BAD, "closed": GOOD, "half_open": WARN}


class JournalEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One event.

    Attributes:
        seq: Number of the event, from 1, without gaps.
        wall_s: Unix time at which the event was seen.
        tone: One of the module's tones.
    """

    seq: int
    wall_s: float
    tone: str
    text: str


@dataclass(frozen=True, slots=True)
class EngineSight:
    """The state of one engine at one moment.

    Attributes:
        health, reason: Result of the last health check.
        incarnation: Id of the engine's current life; empty if unknown.
        breaker: State of the engine's breaker.
        stats: The last stats reported in this life; None before the first.
    """

    role: str
    health: str
    reason: str = ""
    incarnation: str = ""
    breaker: str = "closed"
    stats: EngineStats | None = None

    @property
    def is_dead(self) -> bool:
        """Whether the engine does not answer."""
        return self.health == "unreachable"


@dataclass(frozen=True, slots=True)
class Sight:
    """The state of a deployment at one moment.

    Attributes:
        engines: Engines by URL.
        pairs: States of breakers that are not closed, by (prefill URL, decode URL, mode).
        rungs: Number of requests so far that took a rung, by (rung, reason).
        outcomes: Number of requests so far, by outcome.
    """

    engines: Mapping[str, EngineSight]
    pairs: Mapping[tuple[str, str, str], str]
    rungs: Mapping[tuple[str, str], int]
    outcomes: Mapping[str, int]


class Journal:
    """Remembers the last `MAX_EVENTS` events.

    Attributes:
        since_s: Unix time of the first sight; None before it.
    """

    def __init__(self) -> None:
        self._events: deque[JournalEntry] = deque(maxlen=MAX_EVENTS)
        self._seq = 0
        self._last: Sight | None = None
        self.since_s: float | None = None

    @property
    def events(self) -> list[JournalEntry]:
        """The events, newest first."""
        return list(reversed(self._events))

    def see(self, sight: Sight, wall_s: float) -> None:
        """Record the changes since the last sight."""
        if self._last is None:
            self.since_s = wall_s
        else:
            for tone, text in changes(self._last, sight):
                self._seq += 1
                self._events.append(
                    JournalEntry(seq=self._seq, wall_s=wall_s, tone=tone, text=text)
                )
        self._last = sight


def changes(before: Sight, now: Sight) -> Iterator[tuple[str, str]]:
    """Yield (tone, sentence) of each change."""
    for url, engine in now.engines.items():
        yield from _of_engine(url, before.engines.get(url), engine)
    for url, engine in before.engines.items():
        if url not in now.engines:
            yield BAD, f"{engine_name(engine.role, url)} is gone: it left, or its lease ran out"
    for pair in {**before.pairs, **now.pairs}:
        state, (prefill, decode, mode) = now.pairs.get(pair, "closed"), pair
        is_there = prefill in now.engines and decode in now.engines
        if is_there and state != before.pairs.get(pair, "closed"):
            where = f"{mode} from {_bare(prefill)} to {_bare(decode)}"
            yield _BREAKER_TONES[state], f"{where}: breaker {spoken(state)}"
    for key, number in now.rungs.items():
        rung, reason = key
        if more := number - before.rungs.get(key, 0):
            requests = f", {more} requests" if more > 1 else ""
            tone = BAD if rung == "shed" else WARN
            yield tone, f"ladder: {RUNGS[rung]} ({spoken(reason)}){requests}"
    for outcome, text in FAILED.items():
        if more := now.outcomes.get(outcome, 0) - before.outcomes.get(outcome, 0):
            yield BAD, f"{more} request{'s' if more > 1 else ''} {text}"


def _of_engine(url: str, was: EngineSight | None, engine: EngineSight) -> Iterator[tuple[str, str]]:
    name = engine_name(engine.role, url)
    if was is None:
        state = "" if engine.health == "ready" else f": {spoken(engine.health)}"
        yield GOOD, f"{name} joined{state}"
        return
    is_other_life = bool(was.incarnation and engine.incarnation) and (
        was.incarnation != engine.incarnation
    )
    if is_other_life:
        yield WARN, f"{name} was started again"
    if engine.is_dead and not was.is_dead:
        yield BAD, f"{name} died: {engine.reason}"
    elif not engine.is_dead and engine.health != was.health:
        why = f": {engine.reason}" if engine.reason else ""
        tone = GOOD if engine.health == "ready" else WARN
        yield tone, f"{name} is {spoken(engine.health)}{why}"
    if engine.breaker != was.breaker:
        yield _BREAKER_TONES[engine.breaker], f"breaker of {name}: {spoken(engine.breaker)}"
    if not is_other_life and was.stats is not None and engine.stats is not None:
        yield from _of_stats(name, was.stats, engine.stats)


def _of_stats(name: str, was: EngineStats, stats: EngineStats) -> Iterator[tuple[str, str]]:
    before = _setbacks_of(was)
    for text, number in _setbacks_of(stats).items():
        if (more := number - before[text]) > 0:
            yield WARN, f"{text} at {name}: {more}"
    if was.kv_store is None or stats.kv_store is None:
        return
    if was.kv_store.is_up != stats.kv_store.is_up:
        tone, what = (GOOD, "reaches") if stats.kv_store.is_up else (BAD, "has lost")
        yield tone, f"{name} {what} its store of KV"


def _setbacks_of(stats: EngineStats) -> Mapping[str, int]:
    """Return the counts whose growth is an event, by the text that describes them."""
    store = stats.kv_store or KVStoreStats()
    return {
        "leases that nobody read in time": stats.lease_ends.get(LeaseEnd.EXPIRED.value, 0),
        "KV loads that failed": sum(stats.kv_load_failures.values()),
        "chunks from the store that were not what was saved": store.num_wrong_chunks,
        "chunks that the store did not keep": store.num_dropped_chunks,
    }


def engine_name(role: str, url: str) -> str:
    """Return an engine's name in sentences."""
    return f"{role} engine {_bare(url)}"


def _bare(url: str) -> str:
    return url.partition("://")[2] or url


def spoken(word: str) -> str:
    """Return a label as it stands in a sentence."""
    return word.replace("_", " ")
