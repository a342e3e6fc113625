"""What a step costs between an engine core and its ranks, and how well a pipeline is filled.

Prints one JSON object. Four questions, one run:

`broadcast`: one step of 32 decoding requests is encoded and sent to every rank; one of them
answers at once, with an answer that it has ready, and that comes back. Over our rings, over a
`multiprocessing` pipe per rank, and over ZMQ (a PUSH socket per rank and a PULL for the
answer, over ipc), in turns, so that all see the machine in the same mood.

`step`: the same through the executor with all that it does for a step, and over ZMQ with the
same codec: ranks decode the step, encode the answer, and the core decodes it. The codec's
part is `codec_us`, as measured in one process; ranks that outnumber the cores share it badly.

`post`: instructions go to every rank's connector, whose report is back at once, while the ranks
are in a step (they sleep, as a process does whose device computes).

`pipeline`: stages that are busy for a known time per micro-batch (they sleep, as a process
does whose device computes) and pass a token on; the share of the time that a stage is busy.

Times are medians of a turn, then of the turns; ratios are medians of the turns' own.

    python -m benchmarks.executor [--rounds N] [--steps N]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import secrets
import select
import socket
import statistics
import time
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from pdserve.config.schema import EngineConfig, ModelConfig, ParallelConfig
from pdserve.connectors.base import KVLayout
from pdserve.executor.channel import SPIN_S, Waiter
from pdserve.executor.messages import FromRank, RunStep, StepDone, ToRank
from pdserve.executor.multiprocess import MultiprocessExecutor
from pdserve.executor.rings import RingEnds, RingHub, RingLink
from pdserve.parallel.mesh import Axis
from pdserve.parallel.place import CorePlace
from pdserve.wire.ids import BlockId, EngineId, Incarnation, RequestId
from pdserve.wire.step import ModelRunnerOutput, SchedulerOutput
from pdserve.wire.transfer import ConnectorMetadata, ConnectorReport, LeaseEnd, Settled
from pdserve.worker.info import WorkerInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.connection import Connection

    from pdserve.parallel.place import RankPlace

    RoundTrip = Callable[[SchedulerOutput], object]

NUM_RANKS = (1, 2, 4)
NUM_REQUESTS = 32
NUM_STAGES = 4
MICRO_BATCHES = (1, 2, 4)
STAGE_S = 0.005
LONG_STEP_S = 2.0

_REQUEST_IDS = [RequestId(f"cmpl-{secrets.token_hex(12)}-0") for _ in range(NUM_REQUESTS)]

_OUTPUT = ModelRunnerOutput(
    step_id=0,
    request_ids=_REQUEST_IDS,
    sampled_token_ids=[[17 * i] for i in range(NUM_REQUESTS)],
    forward_s=0.01,
)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=300, help="of a round")
    args = parser.parse_args()
    sizes = {"num_rounds": args.rounds, "num_steps": args.steps}
    broadcast = {"rings": rings, "pipe": pipes, "zmq": zmqs}
    step = {"executor": executor_step, "zmq": zmq_step}
    result = {
        "benchmark": "executor",
        "goals": {"broadcast.zmq_over_rings": 3.0},
        "requests": NUM_REQUESTS,
        "step_bytes": len(_ENCODE(RunStep(make_step(0), 0))),
        "answer_bytes": len(_ANSWER),
        "spin_us": SPIN_S * 1e6,
        "codec_us": measure_codec(),
        "broadcast": {str(num): measure(broadcast, num, **sizes) for num in NUM_RANKS},
        "step": {str(num): measure(step, num, **sizes) for num in NUM_RANKS},
        "post": {str(num): measure_post(num) for num in NUM_RANKS},
        "pipeline": measure_pipeline(),
        "environment": _environment(),
    }
    print(json.dumps(result, indent=1))


def make_step(step_id: int) -> SchedulerOutput:
    """32 requests that decode; one in eight begins a block."""
    return SchedulerOutput(
        step_id=step_id,
        num_scheduled_tokens=dict.fromkeys(_REQUEST_IDS, 1),
        num_computed_tokens=[700 + 13 * i + step_id for i in range(NUM_REQUESTS)],
        new_block_ids={
            request_id: [BlockId(7000 + i)]
            for i, request_id in enumerate(_REQUEST_IDS)
            if (i + step_id) % 8 == 0
        },
    )


class AnsweringWorker:
    """A worker that has its answers at once."""

    def __init__(
        self, config: EngineConfig, *, place: RankPlace, wake: Callable[[], None], **_: object
    ) -> None:
        self._place, self._wake = place, wake
        self._num_posts = 0

    def start(self) -> WorkerInfo:
        layout = KVLayout(
            num_blocks=1,
            num_layers=1,
            num_kv_heads=1,
            block_size=1,
            head_dim=1,
            dtype="float32",
            dtype_bytes=4,
        )
        return WorkerInfo(
            rank=self._place.engine_rank,
            layout=layout,
            layout_digest="",
            layout_fields={},
            shape=layout.shape_of_one_rank(),
            can_push=False,
            endpoint=None,
            max_model_len=1,
            architecture="none",
            dtype="float32",
            vocab_size=1,
            eos_token_ids=(),
            device="cpu",
            num_threads=1,
        )

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        return msgspec.structs.replace(_OUTPUT, step_id=step.step_id)

    def finish_step(self) -> None:
        return

    def post(self, metadata: ConnectorMetadata) -> None:
        self._num_posts += 1
        self._wake()

    def poll(self) -> ConnectorReport:
        name = str(self._num_posts)
        return ConnectorReport(
            settled=[Settled(request_id=RequestId(name), end=LeaseEnd.READ, nonce=name)]
        )

    def close(self, timeout_s: float) -> None:
        return


class SleepingWorker(AnsweringWorker):
    """A worker whose steps take long."""

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        time.sleep(LONG_STEP_S)
        return super().execute(step)


class StageWorker(AnsweringWorker):
    """A pipeline stage: waits for the one before, is busy, lets the one after begin."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        place: RankPlace,
        incarnation: Incarnation,
        wake: Callable[[], None],
        **_: object,
    ) -> None:
        super().__init__(config, place=place, wake=wake)
        self._stage = place.mesh.index(Axis.PP)
        self._is_last = self._stage == place.mesh.shape.pp - 1
        self._name = f"\0pdserve-bench-{incarnation}-"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(f"{self._name}{self._stage}")

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        if self._stage:
            assert int(self._socket.recv(32)) == step.step_id
        start = time.perf_counter()
        time.sleep(STAGE_S)
        busy_s = time.perf_counter() - start
        if not self._is_last:
            self._socket.sendto(b"%d" % step.step_id, f"{self._name}{self._stage + 1}")
        return ModelRunnerOutput(step_id=step.step_id, forward_s=busy_s)


_ENCODE = msgspec.msgpack.Encoder().encode
_DECODE_ANSWER = msgspec.msgpack.Decoder(FromRank).decode
_DECODE_STEP = msgspec.msgpack.Decoder(ToRank).decode
_ANSWER = _ENCODE(StepDone(_OUTPUT))


@contextmanager
def executor_step(num_ranks: int) -> Iterator[RoundTrip]:
    """The executor itself."""
    with _executor("benchmarks.executor:AnsweringWorker", tp=num_ranks) as executor:

        def round_trip(step: SchedulerOutput) -> object:
            while executor.poll_report() is not None:
                pass
            executor.submit(step)
            return _collect(executor, poller)

        poller = _poller(executor)
        yield round_trip


@contextmanager
def zmq_step(num_ranks: int) -> Iterator[RoundTrip]:
    """What an executor over ZMQ would do at least."""
    with _zmq(num_ranks, _serve_zmq_steps) as (steps, answers):

        def round_trip(step: SchedulerOutput) -> object:
            frame = _ENCODE(RunStep(step, 0))
            for pushing in steps:
                pushing.send(frame)
            return _DECODE_ANSWER(answers.recv())

        yield round_trip


@contextmanager
def rings(num_ranks: int) -> Iterator[RoundTrip]:
    """Our links."""
    hub = RingHub(num_ranks)
    waiter = Waiter(spin_s=SPIN_S)
    hub.wake_on(waiter)
    with _processes(_serve_ring, [hub.ends(rank, spin_s=SPIN_S) for rank in range(num_ranks)]):

        def round_trip(step: SchedulerOutput) -> object:
            hub.broadcast(_ENCODE(RunStep(step, 0)), on_full=lambda: None)
            return waiter.wait(hub.receive)

        yield round_trip
    hub.close()
    waiter.close()


@contextmanager
def pipes(num_ranks: int) -> Iterator[RoundTrip]:
    """A `multiprocessing` pipe per rank."""
    ends = [multiprocessing.Pipe() for _ in range(num_ranks)]
    with _processes(_serve_pipe, [(theirs, theirs is ends[0][1]) for _, theirs in ends]):

        def round_trip(step: SchedulerOutput) -> object:
            frame = _ENCODE(RunStep(step, 0))
            for ours, _ in ends:
                ours.send_bytes(frame)
            return ends[0][0].recv_bytes()

        yield round_trip


@contextmanager
def zmqs(num_ranks: int) -> Iterator[RoundTrip]:
    """A PUSH socket per rank, and a PULL for the answer."""
    with _zmq(num_ranks, _serve_zmq) as (steps, answers):

        def round_trip(step: SchedulerOutput) -> object:
            frame = _ENCODE(RunStep(step, 0))
            for pushing in steps:
                pushing.send(frame)
            return answers.recv()

        yield round_trip


def _serve_ring(ends: RingEnds) -> None:
    link = RingLink(ends)
    while True:
        link.recv()
        if ends.rank == 0:
            link.send(_ANSWER)


def _serve_pipe(end: tuple[Connection, bool]) -> None:
    pipe, is_output = end
    while True:
        pipe.recv_bytes()
        if is_output:
            pipe.send_bytes(_ANSWER)


def _serve_zmq(end: tuple[str, int]) -> None:
    steps, answers = _zmq_rank(*end)
    while True:
        steps.recv()
        if end[1] == 0:
            answers.send(_ANSWER)


def _serve_zmq_steps(end: tuple[str, int]) -> None:
    steps, answers = _zmq_rank(*end)
    while True:
        message = _DECODE_STEP(steps.recv())
        if end[1] == 0:
            answers.send(_answer(message))


@contextmanager
def _zmq(num_ranks: int, serve: Callable[[Any], None]) -> Iterator[tuple[list[Any], Any]]:
    name = f"ipc://@pdserve-bench-{secrets.token_hex(6)}"
    # The ranks are forked before there is a ZMQ thread.
    with _processes(serve, [(name, rank) for rank in range(num_ranks)]):
        context = zmq.Context()
        answers = context.socket(zmq.PULL)
        answers.bind(f"{name}-answers")
        steps = [context.socket(zmq.PUSH) for _ in range(num_ranks)]
        for rank, pushing in enumerate(steps):
            pushing.bind(f"{name}-{rank}")
        yield steps, answers
        context.destroy(linger=0)


def _zmq_rank(name: str, rank: int) -> tuple[Any, Any]:
    context = zmq.Context()
    steps, answers = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    steps.connect(f"{name}-{rank}")
    answers.connect(f"{name}-answers")
    return steps, answers


def _poller(executor: MultiprocessExecutor) -> select.poll:
    poller = select.poll()
    for fd in executor.wake_fds:
        poller.register(fd, select.POLLIN)
    return poller


def _collect(executor: MultiprocessExecutor, poller: select.poll) -> ModelRunnerOutput:
    """The next result; looks for it for as long as ranks look for steps, then sleeps."""
    stop_s = time.perf_counter() + SPIN_S
    while (result := executor.poll_result()) is None:
        if time.perf_counter() < stop_s:
            os.sched_yield()
        else:
            poller.poll()
    return result


def _answer(message: ToRank) -> bytes:
    assert isinstance(message, RunStep)
    return _ENCODE(StepDone(msgspec.structs.replace(_OUTPUT, step_id=message.step.step_id)))


def measure(
    ways: dict[str, Callable[[int], AbstractContextManager[RoundTrip]]],
    num_ranks: int,
    *,
    num_rounds: int,
    num_steps: int,
) -> dict[str, Any]:
    """Microseconds by way, and the ratios of the others to the first."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    with ExitStack() as stack:
        round_trips = {name: stack.enter_context(way(num_ranks)) for name, way in ways.items()}
        for round_id in range(num_rounds + 1):
            steps = [make_step(round_id * num_steps + index) for index in range(num_steps)]
            for name, round_trip in round_trips.items():
                took = []
                for step in steps:
                    start = time.perf_counter()
                    round_trip(step)
                    took.append(time.perf_counter() - start)
                if round_id:  # the first warms up
                    times[name].append(statistics.median(took) * 1e6)
    ours, *others = times
    return {
        **{f"{name}_us": round(statistics.median(found), 1) for name, found in times.items()},
        **{
            f"{name}_over_{ours}": round(
                statistics.median(a / b for a, b in zip(times[name], times[ours], strict=True)), 2
            )
            for name in others
        },
    }


def measure_codec() -> float:
    """Microseconds for encoding and decoding both messages: in every way's round trip."""
    took = []
    for step_id in range(1000):
        step = make_step(step_id)
        start = time.perf_counter()
        _DECODE_ANSWER(_answer(_DECODE_STEP(_ENCODE(RunStep(step, 0)))))
        took.append(time.perf_counter() - start)
    return round(statistics.median(took) * 1e6, 1)


def measure_post(num_ranks: int, num_posts: int = 300) -> dict[str, float]:
    """Microseconds from a post to the report of all ranks."""
    took = []
    with _executor("benchmarks.executor:SleepingWorker", tp=num_ranks) as executor:
        poller = _poller(executor)
        executor.submit(make_step(0))
        time.sleep(0.05)
        for _ in range(num_posts):
            start = time.perf_counter()
            executor.post(ConnectorMetadata(b"x" * 100))
            while executor.poll_report() is None:
                poller.poll()
            took.append(time.perf_counter() - start)
            time.sleep(0.001)
        assert executor.poll_result() is None, "the step is over"
    took.sort()
    return {
        "p50_us": round(statistics.median(took) * 1e6, 1),
        "p99_us": round(took[int(len(took) * 0.99)] * 1e6, 1),
    }


def measure_pipeline(num_steps: int = 60) -> dict[str, Any]:
    """Utilisation of the stages by the number of micro-batches in flight."""
    found = {}
    with _executor("benchmarks.executor:StageWorker", pp=NUM_STAGES) as executor:
        poller = _poller(executor)
        step_id = 0
        for num_in_flight in MICRO_BATCHES:
            busy_s, start, first, last = 0.0, time.perf_counter(), step_id, step_id + num_steps
            for collected in range(first, last):
                while step_id < last and step_id - collected < num_in_flight:
                    executor.submit(make_step(step_id))
                    step_id += 1
                busy_s += _collect(executor, poller).forward_s
            # Every stage is busy for as long as the last one, whose time comes with the answers.
            found[str(num_in_flight)] = {
                "utilisation": round(busy_s / (time.perf_counter() - start), 3),
                "ideal": min(1.0, num_in_flight / NUM_STAGES),
            }
    return {"stages": NUM_STAGES, "stage_ms": STAGE_S * 1e3, "micro_batches": found}


@contextmanager
def _executor(worker: str, *, tp: int = 1, pp: int = 1) -> Iterator[MultiprocessExecutor]:
    executor = MultiprocessExecutor(
        EngineConfig(
            model=ModelConfig(model="none"),
            parallel=ParallelConfig(tensor_parallel_size=tp, pipeline_parallel_size=pp),
        ),
        core=CorePlace(),
        engine_id=EngineId("benchmark"),
        incarnation=Incarnation(secrets.token_hex(8)),
        progress=lambda text: None,
        worker=worker,
    )
    try:
        executor.start()
        yield executor
    finally:
        executor.close(1.0)


@contextmanager
def _processes(serve: Callable[[Any], None], ends: Sequence[Any]) -> Iterator[None]:
    context = multiprocessing.get_context("fork")
    started = [context.Process(target=serve, args=(end,), daemon=True) for end in ends]
    for process in started:
        process.start()
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.join()


def _environment() -> dict[str, Any]:
    from benchmarks.engine import environment

    return environment(1)


if __name__ == "__main__":
    main()
