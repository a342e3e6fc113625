"""Trace events as processes record and send them.

Times are seconds of the monotonic clock of the process that says them. Events are compact
(arrays on the wire), in the order in which they were recorded, and an event is recorded when it is
over: a slice at its end, a request when it has left. Knows no viewer's format.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

import msgspec


class Part(enum.Enum):
    """Which process of a deployment. PROXY; SERVER: an engine's HTTP side; CORE: its steps."""

    PROXY = "proxy"
    SERVER = "server"
    CORE = "core"


class StepEvent(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="step"):
    """One step of an engine core.

    Attributes:
        at_s: Its results were there.
        start_s: It began: when it was submitted, or when the step before it was out of the way.
        submitted_s: It was planned.
        num_requests: In it.
        num_prefill_tokens: Prompt tokens it computed.
        num_decode_tokens: All others.
        forward_s: In the model's forward alone.
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
    """A stretch of a request's time, named as the field of `RequestStages` it counts in.

    Three names are no such field: `decode` (the tokens behind the first one computed here),
    `leased` (over here, a peer may read its blocks) and `closing` (over, its blocks are not free).
    """

    name: str
    start_s: float
    end_s: float


class EngineRequest(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="engine_request"):
    """One request's time in an engine core.

    Attributes:
        at_s: Nothing of it was left; of one that still runs, the time of the dump.
        request_id: The engine's own.
        source_id: The same at the engine its KV came from; empty if it came from none.
        outcome: Explanation of its last move; empty while it runs.
        spans: In order, without a gap from its arrival on, and without overlap.
        notes: What happened to it, for people: (time, text).
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
        stages: The names of an engine's spans that it stands for.
    """

    name: str
    seconds: float
    stages: list[str]


class Window(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A stretch of a request's time as who answers it sees it.

    Attributes:
        name: What it is but for its terms: the remainder.
        terms: Parts that were accounted for elsewhere, in order. Their seconds fit.
        role: Of the engine that accounted for them; empty if there are no terms.
    """

    name: str
    start_s: float
    end_s: float
    terms: list[Term]
    role: str


class FrontRequest(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="front_request"):
    """One request's time as seen by who answers it: the proxy, or an engine's server.

    Attributes:
        at_s: It was over; of one that still runs, the time of the dump.
        request_id: The client's.
        outcome: Empty while it runs.
        ttft_s: From its arrival to the first token; 0 without one.
        windows: In order, without a gap from its arrival on, and without overlap.
        notes: What happened to it, for people: (time, text).
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
    """Something a process did, on a track of its own; slices of a track may overlap.

    Attributes:
        at_s: It was over, or it was told of, being over.
        ended_s: It was over; None: at `at_s`.
    """

    at_s: float
    start_s: float
    track: str
    name: str
    facts: dict[str, int | float | str]
    ended_s: float | None = None


class RankSlice(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Something a rank did, by its own monotonic clock, on its way to its engine core."""

    start_s: float
    end_s: float
    track: str
    name: str
    facts: dict[str, int | float | str]


class CountersEvent(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="counters"):
    """Values by name, by counter, from then on until the next such event."""

    at_s: float
    counters: dict[str, Mapping[str, float]]


Event = StepEvent | EngineRequest | FrontRequest | SliceEvent | CountersEvent


class TracedProcess(msgspec.Struct, frozen=True, kw_only=True):
    """Who says something of its last seconds.

    Attributes:
        role: Of its engine: prefill, decode or both; empty for a proxy.
        clock_id: Processes with equal ids share their monotonic clock (one boot of one kernel,
            one time namespace).
        monotonic_s, wall_s: The same moment by both clocks, when this was said.
        since_s: Nothing is missing from then on, by the monotonic clock.
        num_dropped: Events lost because there were too many, ever.
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
        events: A JSON array of `Event`: whoever passes it on need not read it.
    """

    process: TracedProcess
    events: msgspec.Raw

    def decoded(self) -> list[Event]:
        """The events.

        Raises:
            msgspec.MsgspecError: They are not what they should be.
        """
        return EVENTS.decode(self.events)


class ClockReading(msgspec.Struct, frozen=True, kw_only=True):
    """What a process answers when it is asked for the time."""

    clock_id: str
    monotonic_s: float


class Alignment(msgspec.Struct, frozen=True, kw_only=True):
    """How a process's monotonic clock stands to the collector's.

    Attributes:
        offset_s: To be added to its times.
        uncertainty_s: Maximum error of the offset; 0 where the clock is the same one.
        measured_offset_s: By the midpoint of the quickest round trip: what `offset_s` is where
            the clocks differ, and a check of it where they are one. None if nobody measured.
        round_trip_s: That round trip; None if nobody measured.
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
    """A process that was asked, and gave nothing."""

    who: str
    reason: str


class Collection(msgspec.Struct, frozen=True, kw_only=True):
    """The last `seconds` of several processes, until `until_s` of the collector's clock.

    Attributes:
        until_s, wall_s: The same moment by the collector's monotonic and wall clock.
    """

    seconds: float
    until_s: float
    wall_s: float
    processes: list[Collected]
    missing: list[Missing] = []


EVENTS: msgspec.json.Decoder[list[Event]] = msgspec.json.Decoder(list[Event])
"""Reads what `ProcessTrace.events` holds."""
