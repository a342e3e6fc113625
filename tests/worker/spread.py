"""An engine core over a real worker on every rank, without processes or rings of an executor.

The output rank has the core, whose steps go into a store; every rank takes them from there in
order. As many steps are in flight as there are pipeline stages.
"""

from __future__ import annotations

import pickle
from collections import deque
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec
import torch.distributed as dist

from pdserve.config.schema import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from pdserve.config.speculative import SpeculativeConfig
from pdserve.connectors.base import KVConnectorScheduler
from pdserve.engine.core import EngineCore
from pdserve.observe.clock import ManualClock
from pdserve.parallel.mesh import MeshShape
from pdserve.parallel.place import RankPlace
from pdserve.parallel.rendezvous import Rendezvous, listen
from pdserve.wire.ids import EngineId, Incarnation, RequestId
from pdserve.wire.request import GenerateRequest
from pdserve.worker.worker import Worker
from tests.scheduler.invariants import assert_nothing_held

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pdserve.parallel.group import World
    from pdserve.wire.request import EngineOutput
    from pdserve.wire.sampling import SamplingParams, TokenLogprobs
    from pdserve.wire.step import ModelRunnerOutput, SchedulerOutput
    from pdserve.wire.transfer import ConnectorReport
    from pdserve.worker.info import WorkerInfo

Requests = dict[str, tuple[list[int], "SamplingParams"]]

FREE_ROWS = ((1, 1.0), (64, 1.01))
"""Costs of rows with which most drafts are verified. What is measured differs by machine."""


@dataclass
class Outcome:
    """What one rank saw.

    Attributes:
        tokens, logprobs, prompt_logprobs, pooled: By request, on the output rank.
        says_nothing: Whether every step's answer was its id alone.
        most_in_flight: Steps submitted and not retired.
    """

    tokens: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprobs | None]] = field(default_factory=dict)
    pooled: dict[str, bytes] = field(default_factory=dict)
    num_preemptions: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_steps: int = 0
    most_in_flight: int = 0
    says_nothing: bool = True


def config_of(
    directory: Path,
    shape: MeshShape,
    *,
    cache: CacheConfig | None = None,
    scheduler: SchedulerConfig | None = None,
    pipeline_layers: tuple[int, ...] = (),
    enable_sequence_parallel: bool = False,
    speculative: SpeculativeConfig | None = None,
    load_format: str = "dummy",
) -> EngineConfig:
    """An engine of `shape`."""
    return EngineConfig(
        model=ModelConfig(model=str(directory), load_format=load_format),
        device="cpu",
        cache=cache or CacheConfig(num_gpu_blocks_override=64),
        scheduler=scheduler or SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=512),
        parallel=ParallelConfig(
            tensor_parallel_size=shape.tp,
            pipeline_parallel_size=shape.pp,
            pipeline_layers=pipeline_layers,
            enable_sequence_parallel=enable_sequence_parallel,
            distributed_executor_backend="multiprocess",
            num_threads=1,
        ),
        speculative=speculative or SpeculativeConfig(),
    )


def start_rank(world: World, config: EngineConfig) -> tuple[Worker, WorkerInfo, RankPlace]:
    """A started worker in a world of its own, whose ranks are those of `world`."""
    place = RankPlace()
    if world.all.size > 1:
        place = RankPlace(
            mesh=world.mesh,
            rendezvous=_meet_again(world),
            local_index=world.mesh.rank,
            num_local=world.all.size,
        )
        world.close()
    worker = Worker(
        config,
        place=place,
        incarnation=Incarnation("life"),
        engine_id=EngineId(config.engine_id or "engine"),
        wake=lambda: None,
        progress=lambda _: None,
    )
    return worker, worker.start(), place


def _meet_again(world: World) -> Rendezvous:
    """A free port of the first rank, known to all; the socket is the first rank's for life."""
    if world.all.is_first:
        listener, place = listen("127.0.0.1")
        listener.detach()
        world.all.gather_ints([place.port])
        return place
    return Rendezvous(host="127.0.0.1", port=world.all.gather_ints([0])[0][0])


def serve(
    world: World,
    config: EngineConfig,
    requests: Requests,
    predictions: Mapping[str, list[int]] = MappingProxyType({}),
    row_costs: tuple[tuple[int, float], ...] | None = None,
) -> Outcome:
    """Run `requests` to their end, on every rank of the engine.

    Args:
        row_costs: Instead of those measured, so that drafts get the same rows in every run.
    """
    store = _store(world)
    worker, info, place = start_rank(world, config)
    if row_costs is not None:
        info = msgspec.structs.replace(info, row_costs=row_costs)
    try:
        if not place.is_output:
            return _follow(worker, store)
        return _lead(worker, info, store, requests, predictions)
    finally:
        assert worker._world is not None
        worker._world.all.barrier()  # the first rank has the store, and must not leave early
        worker.close(1.0)


def _store(world: World) -> dist.Store:
    if world.all.size == 1:
        return dist.HashStore()
    place = _meet_again(world)
    return dist.TCPStore(
        place.host,
        place.port,
        is_master=world.all.is_first,
        wait_for_workers=False,
        master_listen_fd=place.listen_fd,
    )


def _follow(worker: Worker, store: dist.Store) -> Outcome:
    """Run what the output rank plans."""
    outcome = Outcome()
    while True:
        step: SchedulerOutput | None = pickle.loads(store.get(f"step {outcome.num_steps}"))
        if step is None:
            return outcome
        answer = worker.execute(step)
        outcome.num_steps += 1
        outcome.says_nothing &= answer == type(answer)(step_id=step.step_id)


class _StoreExecutor:
    """See `Executor`: the output rank's worker, here; the others take their steps from a store."""

    def __init__(self, worker: Worker, store: dist.Store, max_in_flight: int) -> None:
        self.max_in_flight = max_in_flight
        self.wake_fds: list[int] = []
        self.num_steps = 0
        self.most_in_flight = 0
        self._worker, self._store = worker, store
        self._in_flight: deque[SchedulerOutput] = deque()

    def submit(self, step: SchedulerOutput) -> None:
        self._publish(step)
        self.num_steps += 1
        self._in_flight.append(step)
        self.most_in_flight = max(self.most_in_flight, len(self._in_flight))

    def poll_result(self) -> ModelRunnerOutput | None:
        return self._worker.execute(self._in_flight.popleft()) if self._in_flight else None

    def poll_report(self) -> ConnectorReport | None:
        return None

    def close(self, timeout_s: float) -> None:
        """Tell the others that there are no more steps."""
        self._publish(None)

    def _publish(self, step: SchedulerOutput | None) -> None:
        self._store.set(f"step {self.num_steps}", pickle.dumps(step))


def _lead(
    worker: Worker,
    info: WorkerInfo,
    store: dist.Store,
    requests: Requests,
    predictions: Mapping[str, list[int]],
) -> Outcome:
    """Run requests to their end, on the output rank."""
    config = worker._config
    parallel = config.parallel
    most = max(parallel.pipeline_parallel_size, min(2, parallel.tensor_parallel_size))
    executor = _StoreExecutor(worker, store, most)
    core = EngineCore(
        executor, KVConnectorScheduler(), ManualClock(), config=config, workers=[info]
    )
    outcome = Outcome(says_nothing=False)

    def take(outputs: list[EngineOutput]) -> None:
        for output in outputs:
            name = str(output.request_id)
            assert output.error is None, output.error
            outcome.tokens[name] += output.new_token_ids
            outcome.logprobs[name] += output.logprobs or []
            if output.prompt_logprobs is not None:
                outcome.prompt_logprobs[name] = output.prompt_logprobs
            if output.pooled is not None:
                outcome.pooled[name] = output.pooled

    for name, (prompt, sampling) in requests.items():
        outcome.tokens[name] = []
        outcome.logprobs[name] = []
        core.scheduler.add(
            GenerateRequest(
                request_id=RequestId(name),
                prompt_token_ids=prompt,
                sampling=sampling,
                arrival_s=0.0,
                prediction_token_ids=predictions.get(name, []),
            )
        )
    while core.step(take):
        pass
    core.close(0.0)
    assert_nothing_held(core.scheduler)
    stats = core.scheduler.stats()
    outcome.num_preemptions = stats.num_preemptions
    outcome.num_drafted, outcome.num_accepted = (
        stats.num_draft_tokens,
        sum(stats.accepted_by_position),
    )
    outcome.num_steps, outcome.most_in_flight = executor.num_steps, executor.most_in_flight
    return outcome
