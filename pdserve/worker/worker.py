"""A worker: one rank's device, weights, KV memory and connector half, driven by steps.

    start() meets the other ranks, loads and allocates
    -> (execute(step), finish_step() once it is answered)*
       with post() and poll() at any time meanwhile
    -> close()

All calls come from one thread, except `post` and `poll`: those may come from another thread while
steps run, and involve only the connector. Every rank of an engine runs the same steps. Knows
nothing of scheduling, nor of its launcher.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import time
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec
import torch

from pdserve.connectors import registry as connector_registry
from pdserve.connectors.base import ConnectorContext, KVConnectorWorker
from pdserve.errors import ConfigError, InternalError
from pdserve.kernels.registry import kernels_on
from pdserve.models.registry import load_model
from pdserve.observe.trace import CLOCK_ID
from pdserve.parallel.group import World, join
from pdserve.parallel.placed import where_they_lie
from pdserve.text.grammar import GrammarCompiler
from pdserve.text.load import load_text
from pdserve.wire.transfer import Failed, KVShape, LoadFailure, Numerics
from pdserve.worker import kv_memory
from pdserve.worker.device import device_of
from pdserve.worker.drafting.loading import (
    draft_cost,
    layout_of,
    load_draft,
    load_medusa,
    needs_draft,
)
from pdserve.worker.grammar import GrammarPool
from pdserve.worker.info import WorkerInfo
from pdserve.worker.memory_shares import MemoryShares, measure
from pdserve.worker.model_runner import ModelRunner
from pdserve.worker.step_slices import StepSlices

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from pdserve.config.schema import EngineConfig, ParallelConfig
    from pdserve.connectors.base import KVLayout
    from pdserve.kernels.backend import KernelBackend
    from pdserve.models.registry import LoadedModel
    from pdserve.parallel.place import RankPlace
    from pdserve.wire.ids import EngineId, Incarnation, RequestId
    from pdserve.wire.step import ModelRunnerOutput, SchedulerOutput
    from pdserve.wire.transfer import ConnectorMetadata, ConnectorReport
    from pdserve.worker.device import Device, DeviceMemory
    from pdserve.worker.step import LaunchedStep

_ALL_CAME: Final = 1 << 62


class Worker:
    """One rank.

    Args:
        place: Its place in the mesh.
        incarnation: Identifies this run of the engine, to fence its handoffs.
        wake: Called from any thread when `poll` has news.
        progress: Called with messages on the progress of the start-up.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        place: RankPlace,
        incarnation: Incarnation,
        engine_id: EngineId,
        wake: Callable[[], None],
        progress: Callable[[str], None],
    ) -> None:
        self._config = config
        self._place = place
        self._incarnation = incarnation
        self._engine_id = engine_id
        self._wake = wake
        self._progress = progress
        self._runner: ModelRunner | None = None
        self._connector: KVConnectorWorker | None = None
        self._slices: StepSlices | None = None
        self._began_s = 0.0
        self._world: World | None = None
        self._grammars: GrammarPool | None = None

    def start(self) -> WorkerInfo:
        """Meet the other ranks, load the weights, allocate KV memory, register it.

        Raises:
            ConfigError: The model, device, memory or connector is not available as
                configured. Every rank raises it if one rank has too little memory.
        """
        config, place = self._config, self._place
        where = _device(config.device, place)
        num_threads = _set_threads(config.parallel, place)
        device = device_of(where, has_graphs=not config.model.enforce_eager)
        before = device.memory()
        kernels = kernels_on(where, self._progress, config.numerics)
        world = self._world = self._join(where, kernels)
        if world.pp.is_last and world.tp.is_first:
            model = config.model
            self._grammars = GrammarPool(
                lambda: GrammarCompiler(load_text(model)),
                finds_forced=bool(config.speculative.method),
            )
        if world.pp.size * world.tp.size > 1:
            self._slices = StepSlices(place.engine_rank, wake=self._wake)
        loaded = load_model(config, where, kernels, world, self._progress)
        medusa = load_medusa(config, loaded, world, where, kernels)
        loaded = dataclasses.replace(loaded, medusa=medusa)
        draft_bytes = 0
        if needs_draft(config, world):
            draft = load_draft(config, loaded, world.tp, where, kernels, self._progress)
            loaded = dataclasses.replace(loaded, draft=draft)
            if draft is not None:
                block_size = kv_memory.block_size_on(where, config.cache)
                draft_bytes = layout_of(draft, loaded.dtype, block_size).block_bytes
        run_over = partial(ModelRunner, loaded, config=config, device=device, world=world)
        layout = self._plan(loaded, draft_bytes, device, world, run_over=run_over, before=before)
        self._progress(_in_words(layout, draft_bytes, loaded.max_model_len))
        kv = kv_memory.allocate(layout, where)
        arch = loaded.arch
        whole = msgspec.structs.replace(
            layout, num_layers=arch.num_layers, num_kv_heads=arch.num_kv_heads
        )
        named = f"{arch.architecture}:{arch.digest}"
        fields = whole.fields(model=named, weights=loaded.weights_digest)
        shape = _shape(whole, loaded.layers, world)
        digest = hashlib.sha256(msgspec.json.encode(fields, order="sorted")).hexdigest()[:32]
        numerics = self._numerics(where, kernels, world)
        context = ConnectorContext(
            config=config,
            engine_id=self._engine_id,
            incarnation=self._incarnation,
            layout=layout,
            layout_digest=digest,
            layout_fields=fields,
            shape=shape,
            rank=place.engine_rank,
            numerics=numerics,
        )
        transfer = config.transfer
        connector = connector_registry.find(transfer.kv_connector, transfer.settings)
        half = self._connector = connector.make_worker(context, self._wake)
        endpoint = half.register_kv_caches(kv, layout)
        self._runner = run_over(kv, grammars=self._grammars)
        self._runner.rehearse(self._progress)
        self._runner.capture(self._progress)
        return WorkerInfo(
            rank=place.engine_rank,
            layout=layout,
            layout_digest=digest,
            layout_fields=fields,
            shape=shape,
            can_push=connector.capabilities.push,
            endpoint=endpoint,
            max_model_len=loaded.max_model_len,
            architecture=loaded.arch.architecture,
            dtype=layout.dtype,
            vocab_size=loaded.arch.vocab_size,
            eos_token_ids=loaded.arch.eos_token_ids,
            device=str(where),
            num_threads=num_threads,
            row_costs=self._runner.row_costs(),
            draft_cost=draft_cost(loaded) / world.pp.size,
            numerics=numerics,
        )

    def _join(self, device: torch.device, kernels: KernelBackend) -> World:
        place = self._place
        if place.mesh.shape.world_size == 1:
            return World.alone()
        if place.rendezvous is None:
            raise InternalError(f"rank {place.mesh.rank} was not told where its world meets")
        return join(place.mesh, place.rendezvous, device, sum_ranks=kernels.sum_ranks)

    def _numerics(self, device: torch.device, kernels: KernelBackend, world: World) -> Numerics:
        return Numerics(
            device=f"{device.type} {kernels.arch}".strip(),
            kernels=f"{kernels.name} {kernels.sources[:12]}".strip(),
            compiler=kernels.compiler,
            tp_size=world.tp.size,
            experts=where_they_lie(self._config.parallel, world, self._engine_id),
        )

    def _plan(
        self,
        loaded: LoadedModel,
        draft_bytes: int,
        device: Device,
        world: World,
        *,
        run_over: Callable[[Tensor], ModelRunner],
        before: DeviceMemory | None,
    ) -> KVLayout:
        """Agree with the other ranks of the engine on the number of blocks.

        Args:
            draft_bytes: Bytes that a draft model adds to a block here.
            run_over: Makes a runner of steps over a pool.
            before: The device's memory before weights were loaded; None if it is the host's.

        Raises:
            ConfigError: Some rank cannot hold one request; every rank raises it.
        """
        cache = self._config.cache
        layout = kv_memory.layout_of_block(
            loaded.arch,
            loaded.dtype,
            kv_memory.block_size_on(device.torch, cache),
            num_layers=len(loaded.layers),
            num_kv_heads=loaded.num_kv_heads,
        )
        per_request = kv_memory.blocks_for(loaded.max_model_len, layout.block_size)
        block_bytes = layout.block_bytes + draft_bytes
        # Free memory is read when every rank has its weights, and none has its KV yet.
        for group in (world.tp, world.pp):
            group.barrier()
        offer = kv_memory.host_offer(num_local=self._place.num_local)
        shares: MemoryShares | None = None
        if before is not None and not kv_memory.is_sized(cache):
            small = msgspec.structs.replace(layout, num_blocks=per_request)
            shares = measure(
                device,
                before,
                lambda: run_over(kv_memory.allocate(small, device.torch)),
                self._progress,
                kv_bytes=per_request * block_bytes,
                utilization=cache.gpu_memory_utilization,
            )
            offer = kv_memory.Offer(shares.for_kv, shares.for_kv)
        scarcest = kv_memory.supply(
            block_bytes,
            cache,
            per_request=per_request,
            max_num_seqs=self._config.scheduler.max_num_seqs,
            offer=offer,
        )
        # The smallest supply of each stage, then of all stages.
        for group in (world.tp, world.pp):
            supplies = group.gather_ints([scarcest.num_blocks, scarcest.block_bytes])
            scarcest = min(kv_memory.Supply(*numbers) for numbers in supplies)
        if shares is not None:
            self._progress(shares.in_words(scarcest.num_blocks * block_bytes))
        kv_memory.require_one_request(
            scarcest,
            cache,
            max_model_len=loaded.max_model_len,
            block_size=layout.block_size,
            is_share=shares is not None,
        )
        return msgspec.structs.replace(layout, num_blocks=scarcest.num_blocks)

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step; it may have no tokens, only requests to forget.

        Raises:
            InternalError: The step is not legal.
        """
        return self.collect(self.launch(step))

    @property
    def runs_ahead(self) -> bool:
        """Whether a step may be launched before the previous one is collected."""
        runner, _ = self._started()
        return runner.runs_ahead

    def may_follow(self, step: SchedulerOutput) -> bool:
        """Return whether `step` may be launched before the previous one is collected."""
        runner, _ = self._started()
        return runner.may_follow(step)

    def launch(self, step: SchedulerOutput) -> LaunchedStep:
        """Begin one step, or run it to its end: see `ModelRunner.launch`.

        Raises:
            InternalError: The step is not legal.
        """
        runner, connector = self._started()
        self._began_s = time.monotonic()
        metadata = step.connector_metadata
        is_layerwise = metadata is not None and connector.start_load_kv(metadata)
        return runner.launch(step, connector if is_layerwise else None)

    def complete(self) -> None:
        """Give the device the rest of the last step, if that waited for the one before it.

        Between steps this may be left out: the next call here does it.
        """
        runner, _ = self._started()
        runner.complete()

    def collect(self, launched: LaunchedStep) -> ModelRunnerOutput:
        """Wait for the results of the oldest launched step, and return them."""
        runner, connector = self._started()
        step, output = launched.step, runner.collect(launched)
        if step.num_scheduled_tokens:
            failed = connector.wait_for_save()
            if step.loading_request_ids:
                assert self._world is not None
                failed_loads = failed_anywhere(self._world, step.loading_request_ids, failed)
                output = msgspec.structs.replace(output, failed_loads=failed_loads)
            if self._slices is not None:
                self._slices.add(step, self._began_s, runner.began_s, time.monotonic())
        return output

    def finish_step(self) -> None:
        """Do the work that the last step's answer need not wait for; a second call does nothing.

        Every rank of the world that runs the step must call this, or begin its next step.
        """
        runner, _ = self._started()
        runner.finish_step()

    def post(self, metadata: ConnectorMetadata) -> None:
        """Give the connector instructions that belong to no step. Never blocks."""
        _, connector = self._started()
        connector.post(metadata)

    def poll(self) -> ConnectorReport:
        """Return what the connector and this rank have done since the last report."""
        _, connector = self._started()
        report = connector.get_finished()
        if self._slices is None:
            return report
        slices = report.slices + self._slices.take()
        return msgspec.structs.replace(report, slices=slices, clock_id=CLOCK_ID)

    def close(self, timeout_s: float) -> None:
        """End transfers within `timeout_s` and release everything. May be called twice."""
        connector, self._connector = self._connector, None
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.close()
        if connector is not None:
            connector.close(timeout_s)
        grammars, self._grammars = self._grammars, None
        if grammars is not None:
            grammars.close()
        world, self._world = self._world, None
        if world is not None:
            world.close()

    def _started(self) -> tuple[ModelRunner, KVConnectorWorker]:
        if self._runner is None or self._connector is None:
            raise InternalError("the worker is not started, or closed")
        return self._runner, self._connector


def failed_anywhere(
    world: World, request_ids: Sequence[RequestId], failed: Sequence[Failed]
) -> list[Failed]:
    """Return the loads of a step that failed on any rank of the engine; the same on every rank.

    Args:
        request_ids: Requests that load, in the order of the step; the same on all ranks.
        failed: Failures on this rank.
    """
    mine = {each.request_id: each for each in failed}
    num_valid = [mine[each].num_valid_tokens if each in mine else _ALL_CAME for each in request_ids]
    for group in (world.tp, world.pp):
        num_valid = [min(ranks) for ranks in zip(*group.gather_ints(num_valid), strict=True)]
    return [
        Failed(
            request_id=request_id,
            reason=mine[request_id].reason if request_id in mine else LoadFailure.PEER_LOST,
            detail=mine[request_id].detail if request_id in mine else "on another rank",
            num_valid_tokens=num,
            connector=mine[request_id].connector if request_id in mine else "",
        )
        for request_id, num in zip(request_ids, num_valid, strict=True)
        if num != _ALL_CAME
    ]


def _in_words(layout: KVLayout, draft_bytes: int, max_model_len: int) -> str:
    """Describe the KV capacity, in tokens and in requests of maximum length."""
    num_tokens = layout.num_blocks * layout.block_size
    mib = layout.num_blocks * (layout.block_bytes + draft_bytes) / (1 << 20)
    return (
        f"KV cache: {num_tokens:,} tokens in {layout.num_blocks:,} blocks of {layout.block_size} "
        f"({mib:,.0f} MiB), maximum concurrency for {max_model_len:,} tokens per request: "
        f"{num_tokens / max_model_len:.2f}x"
    )


def _shape(whole: KVLayout, layers: range, world: World) -> KVShape:
    """Return how the engine's KV is split over its ranks; the same on every rank.

    Args:
        whole: The layout that one rank with all of the model would have.
        layers: Those of this rank.
    """
    stages = tuple(
        (start, stop) for start, stop in world.pp.gather_ints([layers.start, layers.stop])
    )
    return msgspec.structs.replace(whole.shape_of_one_rank(), tp_size=world.tp.size, stages=stages)


def _device(wanted: str, place: RankPlace) -> torch.device:
    """Resolve auto, cpu or cuda: each rank of this machine has a device of its own.

    Raises:
        ConfigError: CUDA was asked for and there is none, or there are fewer devices than ranks.
    """
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cuda" and not num_devices:
        raise ConfigError(
            f"--device is 'cuda', but torch {torch.__version__} finds no CUDA device: use "
            "--device cpu",
            param="device",
        )
    if wanted == "cpu" or not num_devices:
        return torch.device("cpu")
    if num_devices < place.num_local:
        raise ConfigError(
            f"{place.num_local} ranks on this machine need one CUDA device each, but only "
            f"{num_devices} are visible: use smaller parallel sizes, or --device cpu",
            param="device",
        )
    device = torch.device("cuda", place.local_index % num_devices)
    torch.cuda.set_device(device)
    return device


def _set_threads(parallel: ParallelConfig, place: RankPlace) -> int:
    """Give compute the configured number of threads, or this rank's share of the cores."""
    num_cores = len(os.sched_getaffinity(0))
    num_threads = parallel.num_threads or max(1, num_cores // place.num_local)
    torch.set_num_threads(num_threads)
    return num_threads
