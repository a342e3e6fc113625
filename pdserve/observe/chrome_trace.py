"""A collection of traces in the Trace Event Format, which Perfetto and Chromium's viewer read.

A process of the deployment is a process there. Requests are asynchronous slices, one row each:
what contains them, and in it their stages without a gap. Steps and KV transfers are slices of
threads, because arrows bind to those alone: one arrow leads from the prefill step that gave a
request's first token over its KV transfer to the first step that the decode engine runs it in.
Counters are counters. Slices of a thread that overlap are put on several, its lanes.

Source: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
(phases X, b/e/n, s/t/f, C, M). Pure: knows no sockets and no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec

from pdserve.observe.process_tracks import CoreRequest, Cores, ProcessTracks, microseconds
from pdserve.wire.trace import (
    FrontRequest,
    Part,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pdserve.wire.trace import Alignment, Collection, TracedProcess

_ROLES: Final = {"": 0, "prefill": 1, "decode": 2, "both": 3}
_EVENTS_PER_PIECE: Final = 2048


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


class ChromeTrace:
    """The trace as a list of events.

    Raises:
        msgspec.MsgspecError: A process's events are not what they should be.
    """

    def __init__(self, collection: Collection) -> None:
        self.summary = Summary(seconds=collection.seconds)
        ordered = sorted(collection.processes, key=lambda each: _rank(each.trace.process))
        tracks = [
            ProcessTracks(pid, each.trace.process, each.alignment, each.trace.decoded())
            for pid, each in enumerate(ordered, start=1)
        ]
        self._start_s = min((each.first_s for each in tracks), default=collection.until_s)
        self._collection = collection
        self.events: list[dict[str, Any]] = []
        cores = Cores(tracks)
        for each in tracks:
            self.events += each.chrome(self._start_s, cores)
        self.events += self._arrows(cores)
        self._sum_up(tracks)

    def pieces(self) -> Iterator[bytes]:
        """The JSON, some at a time."""
        yield b'{"displayTimeUnit":"ms","metadata":' + msgspec.json.encode(self.metadata())
        yield b',"traceEvents":[\n'
        for start in range(0, len(self.events), _EVENTS_PER_PIECE):
            lines = map(msgspec.json.encode, self.events[start : start + _EVENTS_PER_PIECE])
            yield (b",\n" if start else b"") + b",\n".join(lines)
        yield b"\n]}\n"

    def metadata(self) -> dict[str, Any]:
        """What is said about the trace in it."""
        collection, summary = self._collection, self.summary
        return {
            "producer": "pdserve trace",
            "wall_s_at_0": collection.wall_s - (collection.until_s - self._start_s),
            "seconds": collection.seconds,
            "complete_s": summary.complete_s,
            "clock_uncertainty_ms": round(summary.uncertainty_s * 1e3, 4),
            "clocks": summary.clocks,
            "dropped_events": summary.num_dropped,
            "missing": summary.missing,
        }

    def _arrows(self, cores: Cores) -> Iterator[dict[str, Any]]:
        """Prefill's last step -> KV transfer -> decode's first step."""
        for target in cores.tracks:
            for request in target.requests:
                source = cores.by_id.get(request.event.source_id)
                points = None if source is None else _points(source, request)
                if points is None:
                    continue
                self.summary.num_arrows += 1
                number = self.summary.num_arrows
                for index, (tracks, tid, at_s) in enumerate(points):
                    is_last = index == len(points) - 1
                    yield {
                        "ph": "s" if index == 0 else "f" if is_last else "t",
                        "id": number,
                        "cat": "handover",
                        "name": "handover",
                        "pid": tracks.pid,
                        "tid": tid,
                        "ts": microseconds(at_s - self._start_s),
                        **({"bp": "e"} if is_last else {}),
                    }

    def _sum_up(self, tracks: Sequence[ProcessTracks]) -> None:
        collection, summary = self._collection, self.summary
        since_s = collection.until_s - collection.seconds
        has_proxy = any(each.process.part is Part.PROXY for each in tracks)
        front = Part.PROXY if has_proxy else Part.SERVER
        for each in tracks:
            summary.processes.append(each.name)
            summary.num_steps += each.num_steps
            summary.num_dropped += each.process.num_dropped
            summary.uncertainty_s = max(summary.uncertainty_s, each.alignment.uncertainty_s)
            summary.clocks.append(_clock_in_words(each.name, each.alignment))
            since_s = max(since_s, each.process.since_s + each.alignment.offset_s)
            if each.process.part is front:
                requests = [e for e in each.of_events if isinstance(e, FrontRequest)]
                summary.num_requests += len(requests)
                summary.num_unfinished += sum(not request.outcome for request in requests)
        summary.complete_s = round(max(0.0, collection.until_s - since_s), 3)
        summary.missing = [f"{each.who}: {each.reason}" for each in collection.missing]


def _clock_in_words(name: str, alignment: Alignment) -> str:
    """Describe how a process's clock relates to the collector's."""
    measured, trip = alignment.measured_offset_s, alignment.round_trip_s
    if measured is None or trip is None:
        return f"{name}: the collector's own clock"
    within = f"{trip / 2 * 1e3:.3f} ms"
    if alignment.uncertainty_s == 0:
        return f"{name}: the same clock (measured {measured * 1e3:+.3f} ms, within {within})"
    return f"{name}: {alignment.offset_s:+.6f} s, within {within}"


def _points(
    source: CoreRequest, target: CoreRequest
) -> list[tuple[ProcessTracks, int, float]] | None:
    """Where an arrow touches slices: process, thread and time; None if one of them is missing.

    Times go forward, as viewers want it: a transfer may begin while the step that it waits for is
    still finished.
    """
    prefill, first = source.span("prefill"), target.span("first_step")
    if prefill is None or first is None:
        return None
    last_step = source.tracks.step_at(prefill.end_s, is_end=True)
    first_step = target.tracks.step_at(first.start_s, is_end=False)
    if last_step is None or first_step is None:
        return None
    begin_s = last_step.start_s + source.tracks.offset_s
    at_s = max(begin_s, last_step.at_s + source.tracks.offset_s - 1e-6)
    end_s = first_step.start_s + target.tracks.offset_s + 5e-7
    middle = []
    if target.transfer is not None:
        tid, from_s, until_s = target.transfer
        from_s, until_s = from_s + target.tracks.offset_s, until_s + target.tracks.offset_s
        at_s = max(begin_s, min(at_s, from_s))
        middle = [(target.tracks, tid, max(at_s, from_s))]
        if middle[0][2] > min(until_s, end_s):
            return None
    if at_s > end_s:
        return None
    return [
        (source.tracks, source.tracks.tid_of(last_step), at_s),
        *middle,
        (target.tracks, target.tracks.tid_of(first_step), end_s),
    ]


def _rank(process: TracedProcess) -> tuple[bool, int, str, int, str, int]:
    """The proxy first, then prefill engines, then decode engines, each with its server."""
    parts = list(Part)
    return (
        process.part is not Part.PROXY,
        _ROLES.get(process.role, len(_ROLES)),
        process.engine_id,
        parts.index(process.part),
        process.host,
        process.pid,
    )
