"""What recording for traces costs: nanoseconds an event, microseconds a step.

Prints one JSON object. `event` is the making and keeping of one step's event; `step` is all that
an engine core does for traces in one step (the step's event, its prompt tokens counted apart, the
look at the counters), by the scheduler's own code over a batch of that many decoding requests;
`dump` is what a full ring costs the loop that is asked for it, at a time and in all.

    python -m benchmarks.trace [--rounds N]
"""

from __future__ import annotations

import argparse
import json
import time
import timeit
from typing import Any

from pdserve.config.schema import CacheConfig, SchedulerConfig
from pdserve.connectors.null import NullScheduler
from pdserve.observe.clock import SystemClock
from pdserve.observe.trace import MAX_EVENTS, Recorder
from pdserve.scheduler.inflight import Step
from pdserve.scheduler.scheduler import Scheduler
from pdserve.wire.ids import RequestId
from pdserve.wire.request import GenerateRequest
from pdserve.wire.sampling import SamplingParams
from pdserve.wire.step import ModelRunnerOutput
from pdserve.wire.trace import Part, StepEvent


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    result = {
        "benchmark": "trace",
        "event_ns": round(min(_event_ns() for _ in range(args.rounds)), 0),
        "step_us": {
            str(batch): round(min(_step_us(batch) for _ in range(args.rounds)), 2)
            for batch in (1, 32, 256)
        },
        "goal_us": 5.0,
        "dump": _dump(),
    }
    print(json.dumps(result, indent=1))


def _event_ns(number: int = 100_000) -> float:
    recorder = Recorder()

    def once() -> None:
        recorder.add(StepEvent(1e6, 1e6 - 0.005, 1e6 - 0.005, 7, 32, 0, 32, 0.004))

    return timeit.timeit(once, number=number) / number * 1e9


def _step_us(batch: int, number: int = 2000) -> float:
    scheduler = _running(batch)
    recording = scheduler._recording
    clock = SystemClock()
    running = list(scheduler._roster.running.values())
    after = {request.request_id: request.num_computed_tokens for request in running}

    def traced() -> None:
        num_prefill = 0
        for request in running:
            num_left = len(request.prompt_token_ids) - request.num_computed_tokens
            if num_left > 0:
                num_prefill += min(num_left, 1)
        now_s = clock.monotonic_s()
        step = Step(1, after, now_s, num_prefill_tokens=num_prefill, num_decode_tokens=batch)
        recording.step(step, 0.004, now_s)
        recording._sampled_s = float("-inf")  # as if every step were 10 ms
        scheduler.sample_counters()

    def bare() -> None:
        for _ in running:
            pass
        Step(1, after, clock.monotonic_s())

    cost = timeit.timeit(traced, number=number) - timeit.timeit(bare, number=number)
    return cost / number * 1e6


def _running(batch: int) -> Scheduler:
    """A scheduler whose requests all decode."""
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=batch, max_num_batched_tokens=64 * batch),
        CacheConfig(block_size=16),
        num_blocks=16 * batch,
        max_model_len=256,
        vocab_size=100,
        connector=NullScheduler(),
        clock=SystemClock(),
    )
    for index in range(batch):
        scheduler.add(
            GenerateRequest(
                request_id=RequestId(f"r-{index}-x"),
                prompt_token_ids=[1 + index % 90] * 32,
                sampling=SamplingParams(max_tokens=64, ignore_eos=True, seed=0),
                arrival_s=0.0,
            )
        )
    step = scheduler.schedule()
    assert step is not None
    ids = list(step.num_scheduled_tokens)
    scheduler.update(
        ModelRunnerOutput(step_id=step.step_id, request_ids=ids, sampled_token_ids=[1] * len(ids))
    )
    return scheduler


def _dump() -> dict[str, Any]:
    recorder = Recorder(horizon_s=1e9)
    for index in range(MAX_EVENTS):
        at_s = 1e5 + index * 0.001
        recorder.add(StepEvent(at_s, at_s - 0.005, at_s - 0.005, index, 32, 0, 32, 0.004))
    start_s = time.perf_counter()
    dump = recorder.dump(
        1e9, clock=SystemClock(), part=Part.CORE, role="both", engine_id="e", running=[]
    )
    copied_s = time.perf_counter() - start_s
    longest_s, num_bytes = 0.0, 0
    begun_s = time.perf_counter()
    for piece in dump.pieces():
        now_s = time.perf_counter()
        longest_s, begun_s = max(longest_s, now_s - begun_s), now_s
        num_bytes += len(piece)
    return {
        "events": MAX_EVENTS,
        "snapshot_ms": round(copied_s * 1e3, 2),
        "longest_piece_ms": round(longest_s * 1e3, 2),
        "all_ms": round((time.perf_counter() - start_s) * 1e3, 1),
        "mb": round(num_bytes / 1e6, 1),
    }


if __name__ == "__main__":
    main()
