"""What users of a deployment feel now, in one sentence, and why.

Not how the page is, nor how each engine is: whether requests are answered, and how fast.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec

from pdserve.proxy.dashboard.journal import BAD, FAILED, GOOD, PLAIN, WARN
from pdserve.proxy.dashboard.minute import Tally, Waits

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MANY_FAILED: Final = 0.05
"""Share of the requests of a minute above which it is no mishap."""
_SERVED: Final = ("ok", "disconnected")
_SPLIT: Final = ("prefill", "decode")


class Banner(msgspec.Struct, frozen=True, kw_only=True):
    """What stands above everything else.

    Attributes:
        tone: One of the journal's.
        headline: What users feel.
        details: Why, and how fast; may be empty.
    """

    tone: str
    headline: str
    details: list[str] = []


@dataclass(frozen=True, slots=True)
class Felt:
    """What it is judged by.

    Attributes:
        unserved: Why nobody can be served now; None if somebody can.
        ready, known: Engines by role.
        unwell: Of each engine that is not ready: which it is, and why.
        num_waiting: Requests that wait for a place at the proxy.
        minute: What came in the last `span_s`.
    """

    unserved: str | None
    ready: Mapping[str, int]
    known: Mapping[str, int]
    minute: Tally
    span_s: float
    unwell: Sequence[str] = field(default=())
    num_waiting: int = 0


def banner(felt: Felt) -> Banner:
    """Return what to say; the gravest comes first."""
    if felt.unserved is not None:
        return _said(BAD, "Nobody is served", felt.unserved, *felt.unwell)
    details = [*_failures(felt), *_queue(felt), *felt.unwell, *_waits(felt)]
    num_failed, num_ended = felt.minute.ended(FAILED), felt.minute.ended((*_SERVED, *FAILED))
    if num_failed >= MANY_FAILED * num_ended and num_failed:
        return _said(BAD, f"{num_failed:,} of {num_ended:,} requests failed", *details)
    if (alone := _alone(felt)) is not None:
        return _said(WARN, alone, "Long prompts hold up other people's tokens", *details)
    if num_failed:
        return _said(WARN, f"{num_failed:,} of {num_ended:,} requests failed", *details)
    if felt.num_waiting:
        return _said(WARN, "Requests wait for a place", *details)
    if felt.unwell:
        return _said(WARN, "Requests are served, by fewer engines than there are", *details)
    if num_ended or felt.minute.gaps.count:
        return _said(GOOD, "Requests are served", *details)
    return _said(PLAIN, "Ready; nobody has asked for a minute")


def _said(tone: str, headline: str, *details: str) -> Banner:
    return Banner(tone=tone, headline=headline, details=[each for each in details if each])


def _alone(felt: Felt) -> str | None:
    """What is said where one side of a split deployment does everything."""
    for role, other in (_SPLIT, _SPLIT[::-1]):
        if felt.ready.get(role) and not felt.ready.get(other) and not felt.ready.get("both"):
            missing = "is ready" if felt.known.get(other) else "is here"
            return f"{role.capitalize()} engines do everything: no {other} engine {missing}"
    return None


def _failures(felt: Felt) -> list[str]:
    grown = felt.minute.outcomes
    parts = [f"{grown[name]:,} {what}" for name, what in FAILED.items() if grown.get(name)]
    return [f"In the last {felt.span_s:.0f} s: {', '.join(parts)}"] if parts else []


def _queue(felt: Felt) -> list[str]:
    if not felt.num_waiting:
        return []
    return [f"{felt.num_waiting:,} wait for a place at the proxy"]


def _waits(felt: Felt) -> list[str]:
    """How fast it is, as far as there is enough to tell."""
    rate = felt.minute.ended(_SERVED) / felt.span_s if felt.span_s else 0.0
    parts = [f"{rate:.1f} requests/s" if rate else ""]
    parts += [_quantiles("first token", felt.minute.ttft), _quantiles("gap", felt.minute.gaps)]
    said = " · ".join(part for part in parts if part)
    return [said] if said else []


def _quantiles(what: str, waits: Waits) -> str:
    known = [(q, waits.quantile(q)) for q in (0.5, 0.9, 0.99)]
    parts = [f"p{round(100 * q)} {_spoken(wait)}" for q, wait in known if wait is not None]
    return f"{what} {' '.join(parts)}" if parts else ""


def _spoken(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1.0 else f"{1e3 * seconds:.3g} ms"
