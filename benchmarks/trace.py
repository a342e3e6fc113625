"""What recording for traces costs: nanoseconds an event, microseconds a step.

Prints one JSON object. `event` is the making and keeping of one step's event; `step` is all that
an engine core does for traces in one step (the step's event, its prompt tokens counted apart, the
look at the counters), by the scheduler's own code over a batch of that many decoding requests;
`rank_step` is what a rank does in one where there are several, and `told` what the core does for
each slice that it is told of;
`dump` is what a full ring costs the loop that is asked for it, at a time and in all.

    python -m benchmarks.trace [--rounds N]
"""

from __future__ import annotations

import argparse
import json
import time
import timeit
from typing import TYPE_CHECKING, Any

from pdserve.config.schema import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from pdserve.connectors.base import KVConnectorScheduler, NullConnector
from pdserve.engine.core import EngineCore
from pdserve.observe.clock import SystemClock
from pdserve.observe.trace import CLOCK_ID, Recorder
from pdserve.scheduler.steps import Step
from pdserve.wire.ids import EngineId, Incarnation, RequestId
from pdserve.wire.request import GenerateRequest
from pdserve.wire.sampling import SamplingParams
from pdserve.wire.step import ModelRunnerOutput, SchedulerOutput
from pdserve.wire.trace import Part, RankSlice, StepEvent
from pdserve.wire.transfer import ConnectorReport
from pdserve.worker.step_slices import MAX_SLICES, StepSlices
from tests.toy_executor import TOY_VOCAB_SIZE, ToyExecutor, toy_shape

if TYPE_CHECKING:
    from pdserve.scheduler.scheduler import Scheduler


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
        "rank_step_us": round(min(_rank_step_us() for _ in range(args.rounds)), 2),
        "told_us": round(min(_told_us() for _ in range(args.rounds)), 2),
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
    telemetry = scheduler.telemetry
    clock = SystemClock()
    running = list(scheduler.state.running.values())
    after = {request.request_id: request.num_computed_tokens for request in running}
    ones = dict.fromkeys(after, 1)

    result = ModelRunnerOutput(step_id=1, forward_s=0.004)

    # Both loops read what `StepQueue.submit` has to read of each request anyway.
    def traced() -> None:
        num_prefill = 0
        for request in running:
            num_computed = request.num_computed_tokens
            num_prompt = len(request.prompt_token_ids)
            if num_computed < num_prompt:
                num_prefill += min(num_prompt - num_computed, 1)
            if num_computed == num_prompt:
                pass
        now_s = clock.monotonic_s()
        step = Step(
            1, after, now_s, num_tokens=ones, num_prefill_tokens=num_prefill, num_draft_rows={}
        )
        telemetry.step(step, result, now_s)
        telemetry._sampled_s = float("-inf")  # as if every step were 10 ms
        telemetry._last_sample = None  # and something had changed
        telemetry.sample(clock.monotonic_s())

    def bare() -> None:
        for request in running:
            num_computed = request.num_computed_tokens
            num_prompt = len(request.prompt_token_ids)
            if num_computed == num_prompt:
                pass
        Step(1, after, clock.monotonic_s(), num_tokens=ones, num_draft_rows={})

    with_s, without_s = (min(timeit.repeat(each, number=number)) for each in (traced, bare))
    return (with_s - without_s) / number * 1e6


def _rank_step_us(number: int = MAX_SLICES // 2) -> float:
    slices = StepSlices(0, wake=lambda: None)
    step = SchedulerOutput(
        step_id=7,
        num_scheduled_tokens={RequestId(f"r-{index}"): 1 for index in range(32)},
    )
    cost = timeit.timeit(lambda: slices.add(step, 1e6, 1e6, 1e6), number=number)
    return cost / number * 1e6


def _told_us(number: int = 200, num_slices: int = 100) -> float:
    did = RankSlice(1e6, 1e6, "rank 0", "forward", {"step": 7, "batch_size": 32})
    report = ConnectorReport(slices=[did] * num_slices, clock_id=CLOCK_ID)
    telemetry = _running(1).telemetry
    cost = timeit.timeit(lambda: telemetry.ranks(report, 1e6), number=number)
    return cost / number / num_slices * 1e6


def _running(batch: int) -> Scheduler:
    """The scheduler of a core whose requests all decode."""
    config = EngineConfig(
        model=ModelConfig(model="toy"),
        cache=CacheConfig(block_size=16),
        scheduler=SchedulerConfig(max_num_seqs=batch, max_num_batched_tokens=64 * batch),
    )
    executor = ToyExecutor(
        config,
        NullConnector(),
        shape=toy_shape(16 * batch, 16),
        engine_id=EngineId("toy"),
        incarnation=Incarnation("life"),
        max_model_len=256,
    )
    executor.max_in_flight = 1
    core = EngineCore(
        executor, KVConnectorScheduler(), SystemClock(), config=config, workers=executor.start()
    )
    for index in range(batch):
        core.scheduler.add(
            GenerateRequest(
                request_id=RequestId(f"r-{index}-x"),
                prompt_token_ids=[index % TOY_VOCAB_SIZE] * 32,
                sampling=SamplingParams(max_tokens=64, ignore_eos=True, seed=0),
                arrival_s=0.0,
            )
        )
    # One step, with the prompts of all; room for the next is taken away before it is planned.
    core.step(lambda outputs: setattr(executor, "max_in_flight", 0))
    return core.scheduler


def _dump() -> dict[str, Any]:
    recorder = Recorder(horizon_s=1e9)
    num_events = 0
    while not recorder.num_dropped:
        at_s = 1e5 + num_events * 0.001
        recorder.add(StepEvent(at_s, at_s - 0.005, at_s - 0.005, num_events, 32, 0, 32, 0.004))
        num_events += 1
    start_s = time.perf_counter()
    dump = recorder.dump(
        1e9, clock=SystemClock(), part=Part.CORE, role="both", engine_id="e", running=[]
    )
    copied_s = time.perf_counter() - start_s
    longest_s, num_bytes = 0.0, 0
    begun_s = time.perf_counter()
    for piece in dump.pieces:
        now_s = time.perf_counter()
        longest_s, begun_s = max(longest_s, now_s - begun_s), now_s
        num_bytes += len(piece)
    return {
        "events": num_events - recorder.num_dropped,
        "snapshot_ms": round(copied_s * 1e3, 2),
        "longest_piece_ms": round(longest_s * 1e3, 2),
        "all_ms": round((time.perf_counter() - start_s) * 1e3, 1),
        "mb": round(num_bytes / 1e6, 1),
    }


if __name__ == "__main__":
    main()
