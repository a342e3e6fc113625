"""What has happened in a deployment since this proxy began, as sentences.

A second's sight of the deployment is compared with the one before: engines that came, left, died or
began another life, breakers that opened and closed, requests that failed or took a rung of the
ladder. Pure: it asks nobody, and reads no clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MAX_EVENTS: Final = 100

GOOD, WARN, BAD, PLAIN = "good", "warn", "bad", ""
"""Tones: whether an event is one to be glad of, to look at, to act on, or to know of."""

RUNGS: Final[Mapping[str, str]] = {
    "retry_decode": "asked the same decode engine again",
    "other_decode": "took another decode engine",
    "other_prefill": "prefilled again",
    "local": "one engine did everything",
    "shed": "sent the client away",
}
"""What is said of each rung of the ladder."""

FAILED: Final[Mapping[str, str]] = {"error": "failed", "shed": "sent away (429 or 503)"}
"""What is said of requests that ended so."""

OF_ENGINES: Final[Mapping[str, str]] = {
    "pdserve_kv_lease_expired_total": "leases that nobody read in time",
    "pdserve_kv_transfer_failures_total": "KV loads that failed",
    "pdserve_kv_tier_digest_mismatches_total": "chunks from the store that were not what was saved",
    "pdserve_kv_tier_dropped_saves_total": "chunks that the store did not keep",
}
"""Counters of engines whose growth is an event."""

STORE_UP: Final = "pdserve_kv_tier_server_up"
"""An engine's gauge: whether it reaches its store. Absent where it has none."""

_BREAKER_TONES: Final = {"open": BAD, "closed": GOOD, "half_open": WARN}


class JournalEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Something that has happened.

    Attributes:
        seq: From 1 on, without gaps.
        wall_s: Unix time at which it was seen.
        tone: One of the module's tones.
    """

    seq: int
    wall_s: float
    tone: str
    text: str


@dataclass(frozen=True, slots=True)
class EngineSight:
    """One engine as it is seen at a moment.

    Attributes:
        health, reason: As of the last check.
        incarnation: Of its life; empty if it does not say.
        breaker: Its state.
        figures: Of `OF_ENGINES` and `STORE_UP`, summed over labels; what it did not say is absent.
    """

    role: str
    health: str
    reason: str = ""
    incarnation: str = ""
    breaker: str = "closed"
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_dead(self) -> bool:
        """Whether nobody answers there."""
        return self.health == "unreachable"


@dataclass(frozen=True, slots=True)
class Sight:
    """A deployment as it is seen at a moment.

    Attributes:
        engines: By URL.
        pairs: State of the breaker of (prefill URL, decode URL, mode).
        rungs: Requests so far that took a rung for a reason, by (rung, reason).
        outcomes: Requests so far, by how they ended.
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
        """Newest first."""
        return list(reversed(self._events))

    def see(self, sight: Sight, wall_s: float) -> None:
        """Note what has changed since the last sight."""
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
            yield BAD, f"{_name(url, engine)} is gone: it left, or its lease ran out"
    for pair, state in now.pairs.items():
        if state != before.pairs.get(pair, "closed"):
            prefill, decode, mode = pair
            where = f"{mode} from {_bare(prefill)} to {_bare(decode)}"
            yield _BREAKER_TONES[state], f"{where}: breaker {_spoken(state)}"
    for key, number in now.rungs.items():
        rung, reason = key
        if more := number - before.rungs.get(key, 0):
            requests = f", {more} requests" if more > 1 else ""
            tone = BAD if rung == "shed" else WARN
            yield tone, f"ladder: {RUNGS[rung]} ({_spoken(reason)}){requests}"
    for outcome, text in FAILED.items():
        if more := now.outcomes.get(outcome, 0) - before.outcomes.get(outcome, 0):
            yield BAD, f"{more} request{'s' if more > 1 else ''} {text}"


def _of_engine(url: str, was: EngineSight | None, engine: EngineSight) -> Iterator[tuple[str, str]]:
    name = _name(url, engine)
    if was is None:
        state = "" if engine.health == "ready" else f": {_spoken(engine.health)}"
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
        yield tone, f"{name} is {_spoken(engine.health)}{why}"
    if engine.breaker != was.breaker:
        yield _BREAKER_TONES[engine.breaker], f"breaker of {name}: {_spoken(engine.breaker)}"
    if not is_other_life and was.figures and engine.figures:
        yield from _of_figures(name, was.figures, engine.figures)


def _of_figures(
    name: str, was: Mapping[str, float], figures: Mapping[str, float]
) -> Iterator[tuple[str, str]]:
    for series, text in OF_ENGINES.items():
        more = figures.get(series, 0.0) - was.get(series, 0.0)
        if more > 0:
            yield WARN, f"{text} at {name}: {more:.0f}"
    up, was_up = figures.get(STORE_UP), was.get(STORE_UP)
    if up is not None and was_up is not None and up != was_up:
        tone, what = (GOOD, "reaches") if up > was_up else (BAD, "has lost")
        yield tone, f"{name} {what} its store of KV"


def _name(url: str, engine: EngineSight) -> str:
    return f"{engine.role} engine {_bare(url)}"


def _bare(url: str) -> str:
    return url.partition("://")[2] or url


def _spoken(word: str) -> str:
    return word.replace("_", " ")
