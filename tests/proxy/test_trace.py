"""The proxy's part of a trace: stories as windows, and engines' clocks aligned to its own."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.observe.clock import ManualClock
from pdserve.observe.trace import CLOCK_ID
from pdserve.observe.trace_layout import laid_out
from pdserve.proxy.errors import WorkerError
from pdserve.proxy.live import finished
from pdserve.proxy.story import Stage, Story
from pdserve.proxy.trace import Tracer, aligned, front_request, same_clock
from pdserve.wire.finished import FinishedRequests
from pdserve.wire.trace import (
    Alignment,
    ClockReading,
    Collected,
    Collection,
    FrontRequest,
    Part,
    ProcessTrace,
    TracedProcess,
)
from tests.proxy.test_story import seconds, stages, told


def fronts(story: Story, *, is_over: bool = True) -> FrontRequest:
    return front_request(finished(story, "ok", seq=1), is_over=is_over)


@given(st.lists(seconds, min_size=6, max_size=6), st.none() | stages)
def test_the_windows_of_a_story_sum_to_its_times(waits, engine_stages):
    event = fronts(told(ManualClock(), waits, engine_stages, engine_stages))
    assert event.ttft_s == pytest.approx(sum(waits[:4]), abs=1e-5)
    slices = [each for window in event.windows for each in laid_out(window, [], uncertainty_s=0.0)]
    for (_, _, end), (_, begin, _) in itertools.pairwise(slices):
        assert begin == pytest.approx(end, abs=1e-9)
    start_s = event.windows[0].start_s if event.windows else event.at_s
    until_first = sum(
        end - begin for _, begin, end in slices if (begin + end) / 2 < start_s + event.ttft_s
    )
    assert until_first == pytest.approx(event.ttft_s, abs=1e-5)
    assert event.at_s - start_s == pytest.approx(sum(waits), abs=1e-5)


def test_a_story_that_waits_for_its_first_token_says_so():
    clock = ManualClock()
    story = Story("r", "/v1/completions", clock)
    story.queued()
    story.admitted()
    story.leg_sent(Stage.PREFILL, "http://p")
    clock.advance(2.0)
    event = fronts(story, is_over=False)
    assert event.windows[-1].name == "until the first token"
    assert event.windows[-1].end_s - event.windows[-1].start_s == pytest.approx(2.0)
    assert (event.outcome, event.ttft_s) == ("", 0.0)


def test_the_midpoint_of_a_round_trip_is_wrong_by_half_of_it_at_most():
    for way_s in (0.0, 0.001, 0.004):  # of 4 ms; the way back takes the rest
        truth_s = 500.0
        found = aligned(10.0, 10.004, 10.0 + way_s - truth_s)
        assert abs(found.offset_s - truth_s) <= found.uncertainty_s + 1e-12
        assert found.uncertainty_s == pytest.approx(0.002)


def test_a_shared_clock_is_not_moved_by_what_was_measured():
    measured = aligned(10.0, 10.004, 10.0)
    shared = same_clock(measured)
    assert (shared.offset_s, shared.uncertainty_s) == (0.0, 0.0)
    assert shared.measured_offset_s == pytest.approx(0.002)


class Engines:
    """Engines as the proxy's HTTP sees them: each a clock, and ways that take their time."""

    def __init__(self, clock: ManualClock, *, ahead_s: float, clock_id: str) -> None:
        self.clock, self.ahead_s, self.clock_id = clock, ahead_s, clock_id
        self.garbled: dict[str, bytes] = {}
        self.ways_s = itertools.cycle([(0.010, 0.002), (0.001, 0.0005), (0.004, 0.030)])

    async def get_json(self, url: str, timeout_s: float, headers: object) -> tuple[int, bytes]:
        if url.startswith("http://gone"):
            raise WorkerError("cannot connect to http://gone", reason="connect")
        if (body := self.garbled.get(url.removesuffix("/debug/clock"))) is not None:
            return 200, body
        there_s, back_s = next(self.ways_s)
        self.clock.advance(there_s)
        now_s = self.clock.monotonic_s() + self.ahead_s
        self.clock.advance(back_s)
        if url.endswith("/debug/clock"):
            answer: object = ClockReading(clock_id=self.clock_id, monotonic_s=now_s)
        else:
            process = TracedProcess(
                part=Part.CORE,
                role="decode",
                engine_id="d",
                host="h",
                pid=1,
                clock_id=self.clock_id,
                monotonic_s=now_s,
                wall_s=0.0,
                since_s=now_s - 5.0,
                num_dropped=0,
            )
            trace = ProcessTrace(process=process, events=msgspec.Raw(b"[]"))
            each = Collected(trace=trace, alignment=Alignment())
            answer = Collection(seconds=5.0, until_s=now_s, wall_s=0.0, processes=[each])
        return 200, msgspec.json.encode(answer)


async def collected(engines: Engines, *urls: str) -> Collection:
    tracer = Tracer(engines, engines.clock, FinishedRequests())  # type: ignore[arg-type]
    return await tracer.collect(5.0, engines=urls, running=[], headers={})


async def test_another_machines_clock_is_taken_from_the_quickest_round_trip():
    engines = Engines(ManualClock(), ahead_s=700.0, clock_id="elsewhere")
    _, engine = (await collected(engines, "http://d")).processes
    assert engine.alignment.round_trip_s == pytest.approx(0.0015)
    assert engine.alignment.uncertainty_s == pytest.approx(0.00075)
    assert abs(engine.alignment.offset_s + 700.0) <= engine.alignment.uncertainty_s


async def test_an_engine_of_this_machine_has_this_clock():
    engines = Engines(ManualClock(), ahead_s=0.0, clock_id=CLOCK_ID)
    _, engine = (await collected(engines, "http://d")).processes
    assert engine.alignment.offset_s == 0.0
    assert engine.alignment.uncertainty_s == 0.0
    assert engine.alignment.measured_offset_s is not None


async def test_an_engine_that_does_not_answer_is_missing_and_the_others_are_there():
    engines = Engines(ManualClock(), ahead_s=0.0, clock_id=CLOCK_ID)
    found = await collected(engines, "http://gone", "http://d")
    assert len(found.processes) == 2
    assert [each.who for each in found.missing] == ["http://gone"]


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"clock_id": "\xff"}', b"no JSON"])
async def test_an_engine_whose_answer_cannot_be_read_is_missing(body):
    engines = Engines(ManualClock(), ahead_s=0.0, clock_id=CLOCK_ID)
    engines.garbled["http://odd"] = body
    found = await collected(engines, "http://odd", "http://d")
    assert len(found.processes) == 2
    assert [each.who for each in found.missing] == ["http://odd"]
