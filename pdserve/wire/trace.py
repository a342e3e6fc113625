"""Trace events as processes record and send them.

Times are seconds of the reporting process's monotonic clock. Events are compact (arrays on the
wire) and in the order in which they were recorded. An event is recorded when it is over: a slice
at its end, a request when it has left. Knows no viewer's format.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

import msgspec


class Part(enum.Enum):
    """A kind of process. PROXY; SERVER: an engine's HTTP side; CORE: an engine's steps."""

    PROXY = "proxy"
    SERVER = "server"
    CORE = "core"


class StepEvent(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="step"):
    """One step of an engine core.

    Attributes:
        at_s: When its results arrived.
        start_s: When it began: when it was submitted, or when the step before it had finished.
        submitted_s: When it was planned.
        num_requests: Requests in the step.
        num_prefill_tokens: Prompt tokens it computed.
        num_decode_tokens: All other tokens it computed.
        forward_s: Seconds in the model's forward alone.
    """

    at_s: float
    start_s: float
    submitted_s: float
    step_id: int
    num_requests: int
    num_prefill_tokens: int
    num_decode_tokens: int
    forward_s: float


class StageSpan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A stretch of a request's time, named after the field of `RequestStages` it counts in.

    Three names are not fields: `decode` (tokens after the first one computed here), `leased`
    (ended here, a peer may read its blocks) and `closing` (ended, its blocks are not free yet).
    """

    name: str
    start_s: float
    end_s: float


class EngineRequest(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="engine_request"):
    """One request's time in an engine core.

    Attributes:
        at_s: When nothing of it was left; while it still runs, the time of the dump.
        request_id: The engine's own id.
        source_id: Its id at the engine its KV came from; empty if there was none.
        outcome: Explanation of its last state change; empty while it runs.
        spans: In order, without a gap from its arrival on, and without overlap.
        notes: Its events in human-readable form: (time, text).
        facts: Counts to show beside it.
    """

    at_s: float
    request_id: str
    source_id: str
    outcome: str
    spans: list[StageSpan]
    notes: list[tuple[float, str]]
    facts: dict[str, int | float | str]


class Term(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A part of a window.

    Attributes:
        stages: The names of the engine's spans that it represents.
    """

    name: str
    seconds: float
    stages: list[str]


class Window(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A stretch of a request's time, as seen by the process that answers it.

    Attributes:
        name: Name of the remainder, outside the terms.
        terms: Parts accounted for elsewhere, in order; together no longer than the window.
        role: Role of the engine that accounted for them; empty if there are no terms.
    """

    name: str
    start_s: float
    end_s: float
    terms: list[Term]
    role: str


class FrontRequest(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="front_request"):
    """One request's time as seen by the process that answers it: proxy or engine server.

    Attributes:
        at_s: When it was over; while it still runs, the time of the dump.
        request_id: The client's id.
        outcome: Empty while it runs.
        ttft_s: From its arrival to the first token; 0 without one.
        windows: In order, without a gap from its arrival on, and without overlap.
        notes: Its events in human-readable form: (time, text).
        facts: Counts to show beside it.
    """

    at_s: float
    request_id: str
    outcome: str
    ttft_s: float
    windows: list[Window]
    notes: list[tuple[float, str]]
    facts: dict[str, int | float | str]


class SliceEvent(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="slice"):
    """An activity of a process, on a track of its own; slices of a track may overlap.

    Attributes:
        at_s: When it ended, or when its end was reported.
        ended_s: When it ended; None means at `at_s`.
    """

    at_s: float
    start_s: float
    track: str
    name: str
    facts: dict[str, int | float | str]
    ended_s: float | None = None


class RankSlice(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A rank's activity, by its own monotonic clock, as sent to its engine core."""

    start_s: float
    end_s: float
    track: str
    name: str
    facts: dict[str, int | float | str]


class CountersEvent(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="counters"):
    """Values by name, by counter, valid until the next such event."""

    at_s: float
    counters: dict[str, Mapping[str, float]]


Event = StepEvent | EngineRequest | FrontRequest | SliceEvent | CountersEvent


class TracedProcess(msgspec.Struct, frozen=True, kw_only=True):
    """The process that recorded a trace.

    Attributes:
        role: Its engine's role: prefill, decode or both; empty for a proxy.
        clock_id: Processes with equal ids share their monotonic clock (one boot of one kernel,
            one time namespace).
        monotonic_s, wall_s: The moment of this report, by both clocks.
        since_s: Monotonic time from which on nothing is missing.
        num_dropped: Total number of events lost because there were too many.
    """

    part: Part
    role: str
    engine_id: str
    host: str
    pid: int
    clock_id: str
    monotonic_s: float
    wall_s: float
    since_s: float
    num_dropped: int


class ProcessTrace(msgspec.Struct, frozen=True, kw_only=True):
    """The last seconds of one process. JSON only.

    Attributes:
        events: A JSON array of `Event`, which a process that passes it on need not read.
    """

    process: TracedProcess
    events: msgspec.Raw

    def decoded(self) -> list[Event]:
        """Return the events.

        Raises:
            msgspec.MsgspecError: They are malformed.
        """
        return EVENTS.decode(self.events)


class ClockReading(msgspec.Struct, frozen=True, kw_only=True):
    """A process's answer to a request for its time."""

    clock_id: str
    monotonic_s: float


class Alignment(msgspec.Struct, frozen=True, kw_only=True):
    """How a process's monotonic clock relates to the collector's.

    Attributes:
        offset_s: Offset to add to the process's times.
        uncertainty_s: Maximum error of the offset; 0 if both share one clock.
        measured_offset_s: Offset by the midpoint of the quickest round trip: equal to `offset_s`
            if the clocks differ, a check of it if they are one. None if not measured.
        round_trip_s: Duration of that round trip; None if not measured.
    """

    offset_s: float = 0.0
    uncertainty_s: float = 0.0
    measured_offset_s: float | None = None
    round_trip_s: float | None = None


class Collected(msgspec.Struct, frozen=True, kw_only=True):
    """One process's trace, and its clock."""

    trace: ProcessTrace
    alignment: Alignment


class Missing(msgspec.Struct, frozen=True, kw_only=True):
    """A process that was asked for its trace but gave none."""

    who: str
    reason: str


class Collection(msgspec.Struct, frozen=True, kw_only=True):
    """The last `seconds` of several processes, up to `until_s` of the collector's clock.

    Attributes:
        until_s, wall_s: The same moment by the collector's monotonic and wall clock.
    """

    seconds: float
    until_s: float
    wall_s: float
    processes: list[Collected]
    missing: list[Missing] = []


EVENTS: msgspec.json.Decoder[list[Event]] = msgspec.json.Decoder(list[Event])
"""Decodes `ProcessTrace.events`."""
