"""Summarises a trace in figures and words."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve.wire.trace import Alignment


@dataclass
class Summary:
    """The contents of a trace.

    Attributes:
        processes: Names of the processes, in order.
        num_requests: Requests at the processes that answer clients: the proxy, or else the servers.
        num_unfinished: Those of them that were still running.
        num_steps: Steps of all engine cores.
        num_arrows: Requests whose path from one engine to the other is drawn.
        num_dropped: Total number of lost events.
        seconds: Seconds asked for.
        complete_s: Length of the last period of which nothing is missing, in seconds.
        uncertainty_s: Largest uncertainty of the alignments.
        clocks: Alignment of each process, in words.
        missing: Processes that gave no trace, and why.
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
    """Describe how a process's clock relates to the collector's."""
    measured, trip = alignment.measured_offset_s, alignment.round_trip_s
    if measured is None or trip is None:
        return f"{name}: the collector's own clock"
    within = f"{trip / 2 * 1e3:.3f} ms"
    if alignment.uncertainty_s == 0:
        return f"{name}: the same clock (measured {measured * 1e3:+.3f} ms, within {within})"
    return f"{name}: {alignment.offset_s:+.6f} s, within {within}"
