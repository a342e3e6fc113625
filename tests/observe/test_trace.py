"""The ring that traces are made from: bounded, and honest about what it lost."""

from __future__ import annotations

import tracemalloc
from typing import TYPE_CHECKING

import msgspec
import pytest

from pdserve.errors import BadRequestError
from pdserve.observe.clock import ManualClock
from pdserve.observe.trace import PIECE_BYTES, Recorder, whole
from pdserve.observe.trace_query import trace_query
from pdserve.wire.trace import EngineRequest, Part, StageSpan, StepEvent

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.wire.trace import Event


def step(at_s: float) -> StepEvent:
    return StepEvent(at_s, at_s - 0.5, at_s - 0.5, int(at_s), 1, 0, 1, 0.4)


def filled(recorder: Recorder, until_s: int) -> Recorder:
    for at_s in range(until_s + 1):
        recorder.add(step(float(at_s)))
    return recorder


NUM_STEPS = 10 * PIECE_BYTES // len(msgspec.json.encode(step(1000.0)))
"""Fill some ten pieces."""


def test_events_older_than_the_horizon_are_let_go_and_are_no_loss():
    recorder = filled(Recorder(horizon_s=10), NUM_STEPS)
    kept = [event.at_s for event in recorder.since(0.0)]
    assert kept == [NUM_STEPS - i for i in reversed(range(len(kept)))]
    assert 10 < len(kept) < NUM_STEPS / 4
    assert recorder.num_dropped == 0


def test_too_many_events_push_out_the_oldest_and_each_is_counted():
    recorder = filled(Recorder(horizon_s=1e9, max_bytes=4 * PIECE_BYTES), NUM_STEPS)
    kept = [event.at_s for event in recorder.since(0.0)]
    assert kept == [NUM_STEPS - i for i in reversed(range(len(kept)))]
    assert NUM_STEPS / 4 < len(kept) < NUM_STEPS / 2
    assert recorder.num_dropped == NUM_STEPS + 1 - len(kept)


def one_request(at_s: float) -> EngineRequest:
    return EngineRequest(
        at_s=at_s,
        request_id=f"one of many at {at_s}",
        source_id="",
        outcome="finished: length",
        spans=[StageSpan(name, at_s - 1.0, at_s) for name in ("queue", "prefill", "decode")],
        notes=[(at_s, f"what happened to it at {at_s}") for _ in range(5)],
        facts={name: int(at_s) + 1000 for name in ("prompt_tokens", "output_tokens")},
    )


@pytest.mark.slow
@pytest.mark.parametrize("make", [step, one_request])
def test_a_ring_takes_the_same_memory_whatever_its_events_are(make: Callable[[float], Event]):
    max_bytes = 16 * PIECE_BYTES
    tracemalloc.start()
    recorder = Recorder(horizon_s=1e9, max_bytes=max_bytes)
    for at_s in range(1 << 15):
        recorder.add(make(float(at_s)))
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert recorder.num_dropped > 0
    assert max_bytes < size < max_bytes + PIECE_BYTES


@pytest.mark.slow
def test_memory_of_events_that_are_old_is_used_again():
    tracemalloc.start()
    recorder = Recorder(horizon_s=NUM_STEPS)
    filled(recorder, 2 * NUM_STEPS)
    size = tracemalloc.get_traced_memory()[0]
    for at_s in range(2 * NUM_STEPS, 6 * NUM_STEPS):
        recorder.add(step(float(at_s)))
    grown = tracemalloc.get_traced_memory()[0] - size
    tracemalloc.stop()
    assert grown < 2 * PIECE_BYTES


def test_an_event_larger_than_a_piece_is_kept_whole():
    large = msgspec.structs.replace(one_request(1.0), outcome="x" * 2 * PIECE_BYTES)
    recorder = Recorder()
    for event in (events := [step(0.0), large, step(2.0)]):
        recorder.add(event)
    assert recorder.since(0.0) == events


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
    recorder = filled(Recorder(horizon_s=1e9, max_bytes=4 * PIECE_BYTES), NUM_STEPS)
    first_s = recorder.since(0.0)[0].at_s
    assert dumped(recorder, 3.0, NUM_STEPS).process.since_s == NUM_STEPS - 3.0
    assert dumped(recorder, NUM_STEPS - 1.0, NUM_STEPS).process.since_s == first_s - 1.0


def test_the_pieces_of_a_dump_are_its_events():
    recorder = filled(Recorder(horizon_s=1e9), NUM_STEPS)
    dump = dumped(recorder, 1e6 - NUM_STEPS / 2, 1e6)
    pieces = list(dump.pieces)
    assert 5 < len(pieces) < 9
    trace = whole(dump.process, pieces)
    half = [step(float(at_s)) for at_s in range(NUM_STEPS // 2 + NUM_STEPS % 2, NUM_STEPS + 1)]
    assert trace.decoded() == [*half, step(1e6)]
    assert msgspec.json.decode(msgspec.json.encode(trace), type=type(trace)) == trace


def test_a_dump_of_nothing_has_no_events():
    dump = Recorder().dump(
        5.0, clock=ManualClock(), part=Part.PROXY, role="", engine_id="", running=[]
    )
    assert whole(dump.process, dump.pieces).decoded() == []


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "121", "soon", ""])
def test_seconds_that_nobody_keeps_are_refused_by_name(seconds):
    with pytest.raises(BadRequestError, match=r"seconds is .*at most 120") as caught:
        trace_query({"seconds": seconds})
    assert caught.value.param == "seconds"


def test_a_format_that_does_not_exist_is_refused_by_name():
    with pytest.raises(BadRequestError, match="use json or chrome"):
        trace_query({"format": "perfetto"})
