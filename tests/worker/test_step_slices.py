"""What a rank did in its steps: kept in bounds, and told now and then."""

from __future__ import annotations

from pdserve.wire.ids import RequestId
from pdserve.wire.step import SchedulerOutput
from pdserve.worker.step_slices import MAX_SLICES, TELL_EVERY_S, StepSlices


def step(step_id: int) -> SchedulerOutput:
    return SchedulerOutput(
        step_id=step_id,
        num_scheduled_tokens={RequestId("a"): 3, RequestId("b"): 1},
    )


def test_a_step_is_the_wait_for_its_input_and_its_forward_on_the_ranks_own_track():
    slices = StepSlices(1, wake=lambda: None)
    slices.add(step(7), 10.0, 10.2, 10.5)
    wait, forward = slices.take()
    assert (wait.start_s, wait.end_s, forward.start_s, forward.end_s) == (10.0, 10.2, 10.2, 10.5)
    assert {wait.track, forward.track} == {"rank 1"}
    assert forward.facts == {"step": 7, "batch_size": 2}
    assert slices.take() == []


def test_a_short_preparation_is_no_slice_of_its_own():
    slices = StepSlices(1, wake=lambda: None)
    slices.add(step(7), 10.0, 10.0001, 10.5)
    assert [each.name for each in slices.take()] == ["forward"]


def test_it_tells_every_so_often_and_not_in_each_step():
    told: list[float] = []
    now_s = 100.0
    slices = StepSlices(0, wake=lambda: told.append(now_s))
    for _ in range(64):
        slices.add(step(1), now_s, now_s, now_s)
        now_s += TELL_EVERY_S / 16
    assert told == [100.0 + k * TELL_EVERY_S for k in range(4)]


def test_what_nobody_takes_is_kept_in_bounds():
    slices = StepSlices(0, wake=lambda: None)
    for number in range(MAX_SLICES):
        slices.add(step(number), 1.0, 1.0, 1.0)
    kept = slices.take()
    assert len(kept) == MAX_SLICES
    assert kept[-1].facts["step"] == MAX_SLICES - 1
