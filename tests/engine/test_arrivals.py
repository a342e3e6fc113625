"""What comes to an engine core all at once holds up nobody's stream."""

from __future__ import annotations

import itertools
import os
import socket
from typing import TYPE_CHECKING

import msgspec
import pytest

from pdserve.config.log import LogConfig
from pdserve.config.schema import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from pdserve.engine.core_pipe import CorePipe
from pdserve.engine.launch import EngineLaunch
from pdserve.engine.process import EngineProcess
from pdserve.wire.core_messages import (
    AbortRequests,
    Add,
    FromEngine,
    Outputs,
    Shutdown,
    ToEngine,
)
from pdserve.wire.ids import RequestId
from pdserve.wire.request import EngineOutput, FinishReason, GenerateRequest
from pdserve.wire.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow

NUM_LATER = 300
PROMPT = [5 + i % 250 for i in range(40)]


class Core:
    """An engine core's loop in this thread, fed before it begins."""

    def __init__(self, model: Path) -> None:
        ours, theirs = socket.socketpair()
        self._pipe = CorePipe(ours)
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self.process = EngineProcess(
            EngineLaunch(
                parent_pid=os.getpid(),
                log=LogConfig(level="warning"),
                config=EngineConfig(
                    model=ModelConfig(model=str(model), dtype="float32", max_model_len=256),
                    cache=CacheConfig(num_gpu_blocks_override=200),
                    scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=128),
                    parallel=ParallelConfig(distributed_executor_backend="inline", num_threads=1),
                ),
                pipe_fd=theirs.detach(),
            )
        )
        self.num_known: list[int] = []
        self._outputs: list[EngineOutput] = []

    def say(self, message: ToEngine) -> None:
        self._pipe.send(msgspec.msgpack.encode(message))

    def run(self) -> list[EngineOutput]:
        """Run until what it was told is done; the outputs, in order."""
        self.say(Shutdown(60.0))
        step = self.process.core.step

        def noting_step(publish: Callable[[list[EngineOutput]], None]) -> bool:
            scheduler = self.process.core.scheduler
            self.num_known.append(scheduler.num_unfinished)
            self._hear()
            return step(publish)

        self.process.core.step = noting_step  # type: ignore[method-assign]
        self.process.run()
        while not self._pipe.has_ended:
            self._hear()
        return self._outputs

    def _hear(self) -> None:
        self._pipe.flush()
        self._pipe.receive()
        while (frame := self._pipe.take()) is not None:
            match self._decoder.decode(frame):
                case Outputs(some):
                    self._outputs += some

    def close(self) -> None:
        self._pipe.close()


@pytest.fixture
def core(tiny_model: Path) -> Iterator[Core]:
    core = Core(tiny_model)
    yield core
    core.close()


def add(name: str, max_tokens: int) -> Add:
    return Add(
        GenerateRequest(
            request_id=RequestId(name),
            prompt_token_ids=PROMPT,
            sampling=SamplingParams(
                max_tokens=max_tokens, seed=1, temperature=0.0, ignore_eos=True
            ),
            arrival_s=0.0,
        )
    )


def test_a_core_ends_when_nobody_is_left_to_serve(core: Core) -> None:
    core.say(add("stream", 200))
    core.close()
    core.process.run()
    assert core.process.core.scheduler.num_unfinished == 0


def test_a_burst_of_requests_is_taken_some_at_a_time(core: Core) -> None:
    core.say(add("stream", 40))
    for number in range(NUM_LATER):
        core.say(add(f"later{number}", 1))
    outputs = core.run()
    jumps = [after - before for before, after in itertools.pairwise(core.num_known)]
    assert max(jumps) <= 64, "the loop took the whole burst before it did anything else"
    ended = [output for output in outputs if output.finish_reason is FinishReason.LENGTH]
    assert len(ended) == 1 + NUM_LATER


def test_what_is_aborted_while_it_waits_to_be_taken_is_never_run(core: Core) -> None:
    for number in range(NUM_LATER):
        core.say(add(f"later{number}", 1))
    core.say(AbortRequests([RequestId(f"later{number}") for number in range(10, NUM_LATER)]))
    ended = [output.request_id for output in core.run() if output.finish_reason is not None]
    assert ended[:10] == [f"later{number}" for number in range(10)]
    assert core.process.core.scheduler.num_unfinished == 0
