"""A worker: one rank's device, weights, KV memory and connector half, driven by steps.

    start() loads and allocates -> execute(step)* with poll() between
    -> close()

All calls come from one thread. Knows nothing of scheduling, sockets or processes.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

import msgspec
import torch

from pdserve.connectors import registry as connector_registry
from pdserve.connectors.base import ConnectorContext, KVConnectorWorker, KVLayout
from pdserve.errors import ConfigError, InternalError
from pdserve.kernels.cpu import build, native
from pdserve.models.registry import load_model
from pdserve.wire.transfer import Endpoint
from pdserve.worker import kv_memory
from pdserve.worker.model_runner import ModelRunner

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.config.schema import EngineConfig, ParallelConfig
    from pdserve.wire.ids import EngineId, Incarnation
    from pdserve.wire.step import ModelRunnerOutput, SchedulerOutput
    from pdserve.wire.transfer import ConnectorReport


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says of itself once it is ready.

    Attributes:
        layout_digest: Digest of `layout_fields`; equal ones can exchange KV.
        endpoint: The connector's side channel, if it has one.
        eos_token_ids: As in `config.json`.
        num_threads: CPU threads of its compute.
    """

    layout: KVLayout
    layout_digest: str
    layout_fields: dict[str, str]
    endpoint: Endpoint | None
    max_model_len: int
    architecture: str
    dtype: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    device: str
    num_threads: int


class Worker:
    """One rank.

    Args:
        incarnation: This process's life, which its handoffs are fenced with.
        wake: Called from any thread when `poll` has news.
        progress: Told, in words, where the start-up stands.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        incarnation: Incarnation,
        engine_id: EngineId,
        wake: Callable[[], None],
        progress: Callable[[str], None],
    ) -> None:
        self._config = config
        self._incarnation = incarnation
        self._engine_id = engine_id
        self._wake = wake
        self._progress = progress
        self._runner: ModelRunner | None = None
        self._connector: KVConnectorWorker | None = None

    def start(self) -> WorkerInfo:
        """Load the weights, allocate KV memory and register it with the connector.

        Raises:
            ConfigError: The model, the device, the memory or the connector cannot be had
                as configured.
        """
        config = self._config
        device = _device(config.device)
        num_threads = _set_threads(config.parallel)
        if device.type == "cpu":
            if not build.is_built():
                self._progress("compiling the CPU kernels, once per machine (about 10 s)")
            native.available()
        loaded = load_model(config.model, device, self._progress)
        layout = kv_memory.plan_layout(
            loaded.arch,
            loaded.dtype,
            config.cache,
            max_model_len=loaded.max_model_len,
            max_num_seqs=config.scheduler.max_num_seqs,
            offer=kv_memory.offer(device, config.cache),
        )
        mib = layout.num_blocks * layout.block_bytes / (1 << 20)
        self._progress(f"KV memory: {layout.num_blocks} blocks, {mib:.0f} MiB")
        kv = kv_memory.allocate(layout, device)
        fields = layout.fields(
            model=f"{loaded.arch.architecture}:{loaded.arch.digest}",
            weights=loaded.weights_digest,
        )
        digest = hashlib.sha256(msgspec.json.encode(fields, order="sorted")).hexdigest()[:32]
        context = ConnectorContext(
            config=config,
            engine_id=self._engine_id,
            incarnation=self._incarnation,
            layout=layout,
            layout_digest=digest,
            layout_fields=fields,
        )
        factory = connector_registry.find(config.transfer.kv_connector)
        connector = self._connector = factory.worker(context, self._wake)
        connector.register_kv_caches(kv, layout)
        self._runner = ModelRunner(
            loaded,
            kv,
            layout,
            config.scheduler,
            device=device,
            hooks=connector if connector.capabilities.layerwise else None,
        )
        return WorkerInfo(
            layout=layout,
            layout_digest=digest,
            layout_fields=fields,
            endpoint=connector.endpoint,
            max_model_len=loaded.max_model_len,
            architecture=loaded.arch.architecture,
            dtype=layout.dtype,
            vocab_size=loaded.arch.vocab_size,
            eos_token_ids=loaded.arch.eos_token_ids,
            device=str(device),
            num_threads=num_threads,
        )

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step; it may have no tokens, only connector metadata or gone requests.

        Raises:
            InternalError: The step is not legal, or its logits are not finite.
        """
        runner, connector = self._started()
        if step.connector_metadata is not None:
            connector.start_load_kv(step.connector_metadata)
        output = runner.execute(step)
        if step.num_scheduled_tokens:
            connector.wait_for_save()
        report = connector.get_finished()
        if not report:
            return output
        return msgspec.structs.replace(output, connector_report=report)

    def poll(self) -> ConnectorReport:
        """What the connector saw since the last report; for when no step runs."""
        _, connector = self._started()
        return connector.get_finished()

    def close(self, timeout_s: float) -> None:
        """End transfers within `timeout_s` and let go of everything. May be called twice."""
        connector, self._connector, self._runner = self._connector, None, None
        if connector is not None:
            connector.close(timeout_s)

    def _started(self) -> tuple[ModelRunner, KVConnectorWorker]:
        if self._runner is None or self._connector is None:
            raise InternalError("the worker is not started, or closed")
        return self._runner, self._connector


def _device(wanted: str) -> torch.device:
    """Resolve auto, cpu or cuda.

    Raises:
        ConfigError: CUDA was asked for and there is none.
    """
    has_cuda = torch.cuda.is_available()
    if wanted == "cuda" and not has_cuda:
        raise ConfigError(
            f"--device is 'cuda': torch {torch.__version__} finds no CUDA device; use --device cpu",
            param="device",
        )
    if wanted == "cuda" or (wanted == "auto" and has_cuda):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _set_threads(parallel: ParallelConfig) -> int:
    """Give compute the configured number of threads, or every core this process may use."""
    num_threads = parallel.num_threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(num_threads)
    return num_threads
