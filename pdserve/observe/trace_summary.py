"""Summarises a trace in figures and words."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve.wire.trace import Alignment


@dataclass
class Summary:
    """What a trace holds.

    Attributes:
        processes: Their names, in order.
        num_requests: Of those who answer clients: the proxy, or without one the servers.
        num_unfinished: Those of them that still ran.
        num_steps: Of all engine cores.
        num_arrows: Requests whose way from one engine to the other is drawn.
        num_dropped: Events that were lost, ever.
        seconds: That were asked for.
        complete_s: The last seconds of which nothing is missing.
        uncertainty_s: The worst of the alignments.
        clocks: Per process, in words.
        missing: Who gave nothing, and why.
    """

    processes: list[str] = field(default_factory=list)
    num_requests: int = 0
    num_unfinished: int = 0
    num_steps: int = 0
    num_arrows: int = 0
    num_dropped: int = 0
    seconds: float = 0.0
    complete_s: float = 0.0
    uncertainty_s: float = 0.0
    clocks: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether nothing ran."""
        return not (self.num_requests or self.num_steps)


def clock_in_words(name: str, alignment: Alignment) -> str:
    """How a process's clock stands to the collector's."""
    measured, trip = alignment.measured_offset_s, alignment.round_trip_s
    if measured is None or trip is None:
        return f"{name}: the collector's own clock"
    within = f"{trip / 2 * 1e3:.3f} ms"
    if alignment.uncertainty_s == 0:
        return f"{name}: the same clock (measured {measured * 1e3:+.3f} ms, within {within})"
    return f"{name}: {alignment.offset_s:+.6f} s, within {within}"
