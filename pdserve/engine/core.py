"""One engine: a scheduler, a connector's scheduler half, and an executor.

`step` is the whole of it: take the connector's news, plan and submit as many steps as
may be in flight, collect the oldest. It knows no sockets and starts no threads.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from pdserve.connectors.base import ConnectorContext
from pdserve.connectors.registry import find
from pdserve.errors import ConfigError
from pdserve.executor.inline import InlineExecutor
from pdserve.executor.multiprocess import MultiprocessExecutor
from pdserve.scheduler.scheduler import Scheduler
from pdserve.wire.ids import EngineId, Incarnation
from pdserve.wire.request import EngineInfo

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.config.schema import EngineConfig
    from pdserve.executor.base import Executor
    from pdserve.observe.clock import Clock
    from pdserve.wire.request import EngineOutput


def make_executor(
    config: EngineConfig,
    *,
    engine_id: EngineId,
    incarnation: Incarnation,
    progress: Callable[[str], None],
) -> Executor:
    """The executor that `--distributed-executor-backend` names."""
    is_inline = config.parallel.distributed_executor_backend == "inline"
    backend = InlineExecutor if is_inline else MultiprocessExecutor
    return backend(config, engine_id=engine_id, incarnation=incarnation, progress=progress)


class EngineCore:
    """A loaded engine.

    Args:
        progress: Told, in words, how loading goes on.

    Raises:
        ConfigError: The model, the device, the memory or the connector cannot be used.
    """

    def __init__(
        self, config: EngineConfig, *, clock: Clock, progress: Callable[[str], None]
    ) -> None:
        incarnation = Incarnation(secrets.token_hex(8))
        engine_id = EngineId(config.engine_id or f"{config.role.value}-{incarnation[:6]}")
        factory = find(config.transfer.kv_connector)
        self.executor = make_executor(
            config, engine_id=engine_id, incarnation=incarnation, progress=progress
        )
        try:
            worker = self.executor.start()
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
            context = ConnectorContext(
                config=config,
                engine_id=engine_id,
                incarnation=incarnation,
                layout=layout,
                layout_digest=worker.layout_digest,
                layout_fields=worker.layout_fields,
            )
            self.scheduler = Scheduler(
                config.scheduler,
                config.cache,
                num_blocks=layout.num_blocks,
                max_model_len=worker.max_model_len,
                vocab_size=worker.vocab_size,
                connector=factory.scheduler(context, worker.endpoint),
                clock=clock,
            )
        except BaseException:
            self.executor.close(1.0)
            raise
        names = config.model.served_model_name
        self.info = EngineInfo(
            engine_id=engine_id,
            incarnation=incarnation,
            role=config.role.value,
            model=names[0] if names else config.model.model,
            dtype=layout.dtype,
            max_model_len=worker.max_model_len,
            block_size=layout.block_size,
            num_blocks=layout.num_blocks,
            max_num_seqs=config.scheduler.max_num_seqs,
            endpoint=worker.endpoint,
            layout_digest=worker.layout_digest,
            layout=worker.layout_fields,
        )

    def step(self) -> tuple[list[EngineOutput], bool]:
        """Advance by at most one collected step. Waits only for a step in flight.

        Returns:
            Outputs, and whether anything happened (if not, wait for news).
        """
        scheduler, executor = self.scheduler, self.executor
        is_active = False
        while (report := executor.poll_report()) is not None:
            scheduler.apply_report(report)
            is_active = True
        while scheduler.num_in_flight < executor.max_in_flight:
            step = scheduler.schedule()
            if step is None:
                break
            executor.submit(step)
        if scheduler.num_in_flight:
            scheduler.update(executor.collect())
            is_active = True
        outputs = scheduler.drain_outputs()
        return outputs, is_active or bool(outputs)

    def close(self, timeout_s: float) -> None:
        """End the executor. Idempotent."""
        self.executor.close(timeout_s)
