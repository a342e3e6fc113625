"""The ring that traces are made from: bounded, and honest about what it lost."""

from __future__ import annotations

import msgspec
import pytest

from pdserve.errors import BadRequestError
from pdserve.observe.clock import ManualClock
from pdserve.observe.trace import EVENTS_PER_PIECE, Recorder, whole
from pdserve.observe.trace_query import trace_query
from pdserve.wire.trace import Part, StepEvent


def step(at_s: float) -> StepEvent:
    return StepEvent(at_s, at_s - 0.5, at_s - 0.5, int(at_s), 1, 0, 1, 0.4)


def filled(recorder: Recorder, until_s: int) -> Recorder:
    for at_s in range(until_s + 1):
        recorder.add(step(float(at_s)))
    return recorder


def test_events_older_than_the_horizon_are_let_go_and_are_no_loss():
    recorder = filled(Recorder(horizon_s=10), 100)
    assert [event.at_s for event in recorder.since(0.0)] == [90.0 + i for i in range(11)]
    assert recorder.num_dropped == 0


def test_too_many_events_push_out_the_oldest_and_each_is_counted():
    recorder = filled(Recorder(horizon_s=1000, max_events=8), 20)
    assert [event.at_s for event in recorder.since(0.0)] == [13.0 + i for i in range(8)]
    assert recorder.num_dropped == 13


def test_since_has_what_was_not_over_before():
    recorder = filled(Recorder(), 20)
    assert [event.at_s for event in recorder.since(17.5)] == [18.0, 19.0, 20.0]


def dumped(recorder: Recorder, seconds: float, now_s: float):
    return recorder.dump(
        seconds,
        clock=ManualClock(now_s),
        part=Part.CORE,
        role="decode",
        engine_id="d",
        running=[step(now_s)],
    )


def test_a_dump_says_from_when_on_nothing_is_missing():
    recorder = filled(Recorder(horizon_s=1000, max_events=8), 20)
    assert dumped(recorder, 3.0, 20.0).process.since_s == 17.0
    assert dumped(recorder, 15.0, 20.0).process.since_s == 12.0


def test_the_pieces_of_a_dump_are_its_events():
    recorder = filled(Recorder(horizon_s=1e9), 3 * EVENTS_PER_PIECE)
    dump = dumped(recorder, 1e9, 1e6)
    pieces = list(dump.pieces())
    assert len(pieces) == 4
    trace = whole(dump.process, pieces)
    assert trace.decoded() == [*recorder.since(0.0), step(1e6)]
    assert msgspec.json.decode(msgspec.json.encode(trace), type=type(trace)) == trace


def test_a_dump_of_nothing_has_no_events():
    dump = Recorder().dump(
        5.0, clock=ManualClock(), part=Part.PROXY, role="", engine_id="", running=[]
    )
    assert whole(dump.process, dump.pieces()).decoded() == []


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "121", "soon", ""])
def test_seconds_that_nobody_keeps_are_refused_by_name(seconds):
    with pytest.raises(BadRequestError, match=r"seconds is .*at most 120") as caught:
        trace_query({"seconds": seconds})
    assert caught.value.param == "seconds"


def test_a_format_that_does_not_exist_is_refused_by_name():
    with pytest.raises(BadRequestError, match="use json or chrome"):
        trace_query({"format": "perfetto"})
