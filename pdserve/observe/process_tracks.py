"""One process of a trace: its rows of requests, the threads of its steps, its counters.

Pure: knows no sockets and no clock. How processes are put together is `chrome_trace`'s.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, assert_never

from pdserve.observe.trace_layout import by_number, laid_out, lanes_of, requests_in_front
from pdserve.wire.ids import client_id_of
from pdserve.wire.trace import (
    CountersEvent,
    EngineRequest,
    FrontRequest,
    Part,
    SliceEvent,
    StageSpan,
    StepEvent,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pdserve.wire.trace import Alignment, Event, TracedProcess

_PARTS: Final = {Part.PROXY: "proxy", Part.SERVER: "server", Part.CORE: "engine"}
_REQUESTS: Final = "request"
_NS_PER_S: Final = 1_000_000_000


@dataclass(slots=True)
class CoreRequest:
    """An engine core's request, by the collector's clock.

    Attributes:
        transfer: Where its KV transfer is drawn: thread, begin and end; None without one.
    """

    tracks: ProcessTracks
    event: EngineRequest
    transfer: tuple[int, float, float] | None = None

    def by_clock_of(self, tracks: ProcessTracks) -> list[StageSpan]:
        """Its spans by another process's clock."""
        offset_s = self.tracks.offset_s - tracks.offset_s
        return [
            StageSpan(span.name, span.start_s + offset_s, span.end_s + offset_s)
            for span in self.event.spans
        ]

    def span(self, name: str) -> StageSpan | None:
        """The last of a name."""
        return next((span for span in reversed(self.event.spans) if span.name == name), None)


class Cores:
    """All engine cores' requests, to be found by id."""

    def __init__(self, tracks: Iterable[ProcessTracks]) -> None:
        self.tracks = [each for each in tracks if each.process.part is Part.CORE]
        self.by_id: dict[str, CoreRequest] = {}
        self._by_client: dict[str, list[CoreRequest]] = defaultdict(list)
        for each in self.tracks:
            for request in each.requests:
                self.by_id[request.event.request_id] = request
                client_id, index = client_id_of(request.event.request_id)
                if index == 0:
                    self._by_client[client_id].append(request)

    def serving(
        self, client_id: str, role: str, start_s: float, end_s: float
    ) -> CoreRequest | None:
        """Who served a client's request last between two times of the collector's clock."""
        best: CoreRequest | None = None
        best_s = float("-inf")
        for request in self._by_client.get(client_id, ()):
            tracks, spans = request.tracks, request.event.spans
            if not spans or role not in ("", tracks.process.role):
                continue
            began_s = spans[0].start_s + tracks.offset_s
            ended_s = spans[-1].end_s + tracks.offset_s
            if began_s < end_s and ended_s > start_s and began_s > best_s:
                best, best_s = request, began_s
        return best


class ProcessTracks:
    """One process."""

    def __init__(
        self, pid: int, process: TracedProcess, alignment: Alignment, events: list[Event]
    ) -> None:
        self.pid, self.process, self.alignment = pid, process, alignment
        self.of_events = events
        self.offset_s = alignment.offset_s
        part = _PARTS[process.part]
        self.name = part if process.part is Part.PROXY else f"{process.engine_id} {part}"
        self.requests = [
            CoreRequest(self, event) for event in events if isinstance(event, EngineRequest)
        ]
        self._steps = [event for event in events if isinstance(event, StepEvent)]
        self._step_tids: dict[int, int] = {}
        self._tids: dict[int, str] = {}
        self._num_rows = 0

    @property
    def num_steps(self) -> int:
        """Number of its steps."""
        return len(self._steps)

    @property
    def first_s(self) -> float:
        """When the earliest of its events began, by the collector's clock."""
        starts = [min(_start_of(event) for event in self.of_events)] if self.of_events else []
        return min([*starts, self.process.monotonic_s]) + self.offset_s

    def chrome(self, start_s: float, cores: Cores) -> list[dict[str, Any]]:
        """Its events; arrows are drawn when every process has its threads."""
        self._zero_s = start_s - self.offset_s
        events: list[dict[str, Any]] = []
        slices: dict[str, list[SliceEvent]] = defaultdict(list)
        for event in self.of_events:
            match event:
                case StepEvent():
                    pass  # drawn below, in lanes
                case SliceEvent():
                    slices[event.track].append(event)
                case EngineRequest():
                    events += self._engine_request(event)
                case FrontRequest():
                    events += self._front_request(event, cores)
                case CountersEvent():
                    events += self._counters(event)
                case _:
                    assert_never(event)
        if self.process.part is Part.PROXY:
            front = [event for event in self.of_events if isinstance(event, FrontRequest)]
            for counted in requests_in_front(front):
                events += self._counters(counted)
        events += self._draw_steps()
        events += self._draw_transfers()
        for track, of_track in sorted(slices.items(), key=lambda each: by_number(each[0])):
            events += self._draw_slices(track, of_track)
        return [*self._names(), *events]

    # --- rows of requests

    def _row(
        self,
        name: str,
        start_s: float,
        end_s: float,
        slices: Iterable[tuple[str, float, float]],
        notes: Iterable[tuple[float, str]],
        facts: dict[str, Any],
    ) -> Iterator[dict[str, Any]]:
        """One asynchronous row: a slice, those in it, and what happened."""
        self._num_rows += 1
        # An id of the process: as a global one, rows would not be drawn under it.
        identity = {"local": f"{self._num_rows:#x}"}
        row = {"cat": _REQUESTS, "id2": identity, "pid": self.pid, "tid": 0}
        yield {**row, "ph": "b", "name": name, "ts": self._ts(start_s), "args": facts}
        for stage, begin_s, until_s in slices:
            ms = round((until_s - begin_s) * 1e3, 4)
            yield {
                **row,
                "ph": "b",
                "name": stage,
                "ts": self._ts(begin_s),
                "args": {"ms": ms},
            }
            yield {**row, "ph": "e", "name": stage, "ts": self._ts(until_s)}
        for at_s, text in notes:
            if start_s <= at_s <= end_s:
                yield {**row, "ph": "n", "name": text, "ts": self._ts(at_s)}
        yield {**row, "ph": "e", "name": name, "ts": self._ts(end_s)}

    def _engine_request(self, event: EngineRequest) -> Iterator[dict[str, Any]]:
        client_id, _ = client_id_of(event.request_id)
        start_s = event.spans[0].start_s if event.spans else event.at_s
        facts: dict[str, Any] = {"request": event.request_id, **event.facts}
        facts["outcome"] = event.outcome or "running"
        slices = [(span.name.replace("_", " "), span.start_s, span.end_s) for span in event.spans]
        return self._row(client_id, start_s, event.at_s, slices, event.notes, facts)

    def _front_request(self, event: FrontRequest, cores: Cores) -> Iterator[dict[str, Any]]:
        slices: list[tuple[str, float, float]] = []
        for window in event.windows:
            spans: list[StageSpan] = []
            uncertainty_s = 0.0
            if window.terms:
                start_s, end_s = window.start_s + self.offset_s, window.end_s + self.offset_s
                served = cores.serving(event.request_id, window.role, start_s, end_s)
                if served is not None:
                    spans = served.by_clock_of(self)
                    uncertainty_s = served.tracks.alignment.uncertainty_s
            slices += laid_out(window, spans, uncertainty_s=uncertainty_s)
        start_s = event.windows[0].start_s if event.windows else event.at_s
        notes = list(event.notes)
        facts: dict[str, Any] = {"request": event.request_id, **event.facts}
        facts["outcome"] = event.outcome or "running"
        if event.ttft_s:
            facts["ttft_ms"] = round(event.ttft_s * 1e3, 4)
            notes.append((start_s + event.ttft_s, "first token"))
        return self._row(event.request_id, start_s, event.at_s, slices, notes, facts)

    # --- threads

    def _draw_steps(self) -> Iterator[dict[str, Any]]:
        intervals = [(step.start_s, step.at_s) for step in self._steps]
        for step, lane in zip(self._steps, lanes_of(intervals), strict=True):
            tid = self._tid("steps", 1, lane)
            self._step_tids[step.step_id] = tid
            yield self._slice(
                tid,
                _step_name(step),
                "step",
                step.start_s,
                step.at_s,
                {
                    "step": step.step_id,
                    "batch_size": step.num_requests,
                    "tokens": step.num_prefill_tokens + step.num_decode_tokens,
                    "prefill_tokens": step.num_prefill_tokens,
                    "decode_tokens": step.num_decode_tokens,
                    "forward_ms": round(step.forward_s * 1e3, 3),
                    "waited_ms": round((step.start_s - step.submitted_s) * 1e3, 3),
                },
            )

    def _draw_transfers(self) -> Iterator[dict[str, Any]]:
        found = [
            (request, span)
            for request in self.requests
            for span in request.event.spans
            if span.name == "kv_transfer"
        ]
        found.sort(key=lambda each: each[1].start_s)
        lanes = lanes_of([(span.start_s, span.end_s) for _, span in found])
        for (request, span), lane in zip(found, lanes, strict=True):
            tid = self._tid("KV transfers", 101, lane)
            request.transfer = (tid, span.start_s, span.end_s)
            facts = request.event.facts
            wait = request.span("kv_wait")
            args: dict[str, Any] = {
                "request": request.event.request_id,
                "from": request.event.source_id,
            }
            if "external_tokens" in facts:
                args["tokens"] = facts["external_tokens"]
            args |= {name: facts[name] for name in facts if name.startswith("kv_")}
            args["wait_ms"] = 0.0 if wait is None else round((wait.end_s - wait.start_s) * 1e3, 3)
            name = f"KV {facts.get('kv_mode', '')}".rstrip()
            yield self._slice(tid, name, "kv", span.start_s, span.end_s, args)

    def _draw_slices(self, track: str, slices: list[SliceEvent]) -> Iterator[dict[str, Any]]:
        slices = sorted(slices, key=lambda each: each.start_s)
        first_tid = 201 + 100 * len({tid // 100 for tid in self._tids if tid > 200})
        intervals = [
            (each.start_s, each.at_s if each.ended_s is None else each.ended_s) for each in slices
        ]
        for each, (start_s, end_s), lane in zip(
            slices, intervals, lanes_of(intervals), strict=True
        ):
            tid = self._tid(track, first_tid, lane)
            yield self._slice(tid, each.name, track, start_s, end_s, dict(each.facts))

    def _slice(
        self, tid: int, name: str, cat: str, start_s: float, end_s: float, args: dict[str, Any]
    ) -> dict[str, Any]:
        start_ns, end_ns = self._ns(start_s), self._ns(end_s)
        return {
            "ph": "X",
            "name": name,
            "cat": cat,
            "pid": self.pid,
            "tid": tid,
            "ts": start_ns / 1000,
            "dur": (end_ns - start_ns) / 1000,
            "args": args,
        }

    def _tid(self, track: str, first: int, lane: int) -> int:
        tid = first + lane
        self._tids[tid] = track if lane == 0 else f"{track} {lane + 1}"
        return tid

    # --- the rest

    def _counters(self, event: CountersEvent) -> Iterator[dict[str, Any]]:
        for name, values in event.counters.items():
            yield {
                "ph": "C",
                "name": name,
                "pid": self.pid,
                "tid": 0,
                "ts": self._ts(event.at_s),
                "args": values,
            }

    def _names(self) -> Iterator[dict[str, Any]]:
        process = self.process

        def metadata(what: str, tid: int, args: dict[str, Any]) -> dict[str, Any]:
            return {"ph": "M", "name": what, "pid": self.pid, "tid": tid, "ts": 0, "args": args}

        yield metadata("process_name", 0, {"name": self.name})
        yield metadata("process_sort_index", 0, {"sort_index": self.pid})
        yield metadata("process_labels", 0, {"labels": f"{process.host}, process {process.pid}"})
        for tid, name in sorted(self._tids.items()):
            yield metadata("thread_name", tid, {"name": name})
            yield metadata("thread_sort_index", tid, {"sort_index": tid})

    def _ns(self, at_s: float) -> int:
        return round((at_s - self._zero_s) * _NS_PER_S)

    def _ts(self, at_s: float) -> float:
        return self._ns(at_s) / 1000

    def step_at(self, at_s: float, *, is_end: bool) -> StepEvent | None:
        """The step that ended at a time, or that was submitted then (the process's own clock)."""
        steps = self._steps
        if is_end:
            index = bisect_right(steps, at_s, key=lambda step: step.at_s) - 1
            return steps[index] if index >= 0 and steps[index].at_s == at_s else None
        index = bisect_right(steps, at_s, key=lambda step: step.submitted_s) - 1
        return steps[index] if index >= 0 and steps[index].submitted_s == at_s else None

    def tid_of(self, step: StepEvent) -> int:
        """The thread a step is drawn on."""
        return self._step_tids[step.step_id]


def _start_of(event: Event) -> float:
    match event:
        case StepEvent() | SliceEvent():
            return event.start_s
        case EngineRequest():
            return event.spans[0].start_s if event.spans else event.at_s
        case FrontRequest():
            return event.windows[0].start_s if event.windows else event.at_s
        case CountersEvent():
            return event.at_s
        case _:
            assert_never(event)


def _step_name(step: StepEvent) -> str:
    if not step.num_prefill_tokens:
        return "decode"
    return "prefill + decode" if step.num_decode_tokens else "prefill"


def microseconds(seconds: float) -> float:
    """Microseconds, to the nanosecond."""
    return round(seconds * _NS_PER_S) / 1000
