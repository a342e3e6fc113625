"""Makes an engine: its executor, its connector's halves, and the core between them."""

from __future__ import annotations

import logging
import secrets
from typing import TYPE_CHECKING

from pdserve.config.schema import Role
from pdserve.connectors.base import ConnectorContext
from pdserve.connectors.registry import find
from pdserve.engine.core import EngineCore
from pdserve.errors import ConfigError
from pdserve.imports import large_imports
from pdserve.observe.log import log_event
from pdserve.wire.ids import EngineId, Incarnation
from pdserve.wire.request import EngineInfo
from pdserve.wire.seal import PROTOCOL

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.config.schema import EngineConfig
    from pdserve.connectors.base import KVConnectorBase
    from pdserve.executor.base import Executor
    from pdserve.observe.clock import Clock
    from pdserve.parallel.place import CorePlace
    from pdserve.worker.info import WorkerInfo

_log = logging.getLogger(__name__)


def load_engine(
    config: EngineConfig,
    *,
    place: CorePlace,
    clock: Clock,
    progress: Callable[[str], None],
) -> tuple[EngineCore, EngineInfo]:
    """Load the engine that `config` describes.

    Args:
        place: The core's place among those of its world.
        progress: Called with messages about the progress of loading.

    Returns:
        Its core, and the facts to announce about it.

    Raises:
        ConfigError: The model, the device, the memory or the connector cannot be used.
        RankDiedError: A rank ended for another reason.
    """
    incarnation = Incarnation(secrets.token_hex(8))
    engine_id = EngineId(config.engine_id or f"{config.role.value}-{incarnation[:6]}")
    connector = find(config.transfer.kv_connector, config.transfer.settings)
    executor = _executor_class(config.parallel.executor_backend)(
        config, core=place, engine_id=engine_id, incarnation=incarnation, progress=progress
    )
    return start_engine(
        executor,
        connector,
        clock,
        config=config,
        engine_id=engine_id,
        incarnation=incarnation,
        in_waves=place.num_cores > 1,
    )


def _executor_class(backend: str) -> Callable[..., Executor]:
    """Return the executor that `--distributed-executor-backend` names.

    Raises:
        ConfigError: It cannot be used here.
    """
    # Each backend imports only what it needs: a core without a worker in it imports no torch.
    if backend == "inline":
        with large_imports():
            from pdserve.executor.inline import InlineExecutor

        return InlineExecutor
    if backend == "ray":
        try:
            from pdserve.executor.ray import RayExecutor
        except ImportError as error:
            raise ConfigError(
                f"--distributed-executor-backend is 'ray', which is not installed ({error}): pip "
                "install 'pdserve[ray]'",
                param="distributed-executor-backend",
            ) from None

        return RayExecutor
    from pdserve.executor.multiprocess import MultiprocessExecutor

    return MultiprocessExecutor


def start_engine(
    executor: Executor,
    connector: KVConnectorBase,
    clock: Clock,
    *,
    config: EngineConfig,
    engine_id: EngineId,
    incarnation: Incarnation,
    in_waves: bool = False,
) -> tuple[EngineCore, EngineInfo]:
    """Start an executor and put a core over it; the executor is closed if that fails.

    Args:
        connector: The scheduler half; the executor has its worker halves.
        in_waves: See `EngineCore`.

    Raises:
        ConfigError, RankDiedError: As of `load_engine`.
    """
    try:
        workers = executor.start()
        first = workers[0]
        _check_capacity(first)
        endpoints = [worker.endpoint for worker in workers if worker.endpoint is not None]
        context = ConnectorContext(
            config=config,
            engine_id=engine_id,
            incarnation=incarnation,
            layout=first.layout,
            layout_digest=first.layout_digest,
            layout_fields=first.layout_fields,
            shape=first.shape,
            numerics=first.numerics,
        )
        half = connector.make_scheduler(context, endpoints)
        if config.role is not Role.BOTH and not half.hands_over:
            log_event(
                _log,
                "this engine hands no KV over, and takes none: it serves whole requests",
                level=logging.WARNING,
                role=config.role.value,
                kv_connector=config.transfer.kv_connector,
                remedy="add nixl to --kv-transfer-config.kv-connector",
            )
        core = EngineCore(executor, half, clock, config=config, workers=workers, in_waves=in_waves)
    except BaseException:
        executor.close(1.0)
        raise
    names = config.model.served_model_name
    info = EngineInfo(
        engine_id=engine_id,
        incarnation=incarnation,
        role=config.role.value,
        model=names[0] if names else config.model.model,
        dtype=first.layout.dtype,
        max_model_len=first.max_model_len,
        block_size=first.layout.block_size,
        num_blocks=first.layout.num_blocks,
        max_num_seqs=config.scheduler.max_num_seqs,
        endpoints=endpoints,
        layout_digest=first.layout_digest,
        layout=first.layout_fields,
        can_push=first.can_push,
        kv_shape=first.shape,
        protocol=PROTOCOL,
        numerics=first.numerics,
    )
    return core, info


def _check_capacity(worker: WorkerInfo) -> None:
    layout = worker.layout
    capacity = layout.num_blocks * layout.block_size
    if capacity < worker.max_model_len:
        raise ConfigError(
            f"the KV pool holds {capacity} tokens ({layout.num_blocks} blocks of "
            f"{layout.block_size}), fewer than one request of --max-model-len "
            f"{worker.max_model_len}: raise --kv-cache-memory-bytes or lower "
            "--max-model-len",
            param="max-model-len",
        )
