"""LMCache's worker half: three threads of one rank beside its steps.

`watch` has the thread that looks up prompts and watches the server. `moving` has the two that load
layers into blocks, while the step waits for each, and save what was computed.
"""

from __future__ import annotations

import secrets
from functools import partial
from typing import TYPE_CHECKING

from pdserve.connectors.base import KVConnectorWorker
from pdserve.connectors.lmcache.client import StoreClient
from pdserve.connectors.lmcache.messages import read_instructions, read_loads
from pdserve.connectors.lmcache.moving import (
    LayerwiseLoad,
    LoadingThread,
    SavingThread,
    StoreLink,
)
from pdserve.connectors.lmcache.slots import ChunkMemory, StoreLayout, reach_from
from pdserve.connectors.lmcache.watch import StoreWatch
from pdserve.errors import ConfigError, InternalError
from pdserve.kernels.registry import kernels_on

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from pdserve.connectors.base import ConnectorContext, KVLayout
    from pdserve.connectors.lmcache.settings import LMCacheSettings
    from pdserve.wire.transfer import ConnectorMetadata, ConnectorReport, Endpoint, Failed


class _Threads:
    """The threads, which run once the KV memory is known."""

    def __init__(
        self,
        kv: torch.Tensor,
        context: ConnectorContext,
        settings: LMCacheSettings,
        *,
        wake: Callable[[], None],
        checks_digests: bool,
    ) -> None:
        layout = StoreLayout(context, settings.namespace)
        client = StoreClient(
            settings,
            layout,
            engine=f"{context.engine_id}-{context.incarnation}",
            instance_id=secrets.randbits(48),
            reach=partial(reach_from, kv.device) if kv.is_cuda else None,
        )
        make_memory = partial(ChunkMemory, kv, context, layout, kernels=kernels_on(kv.device))
        self.link = StoreLink(client, make_memory, rank=context.rank, wake=wake)
        self.watch = StoreWatch(
            self.link, settings, block_size=context.layout.block_size, tells=context.rank == 0
        )
        self.loading = LoadingThread(self.link, layout, checks_digests=checks_digests)
        self.saving = SavingThread(self.link, layout, self.loading.is_idle)

    def start(self) -> None:
        self.watch.connect()
        for thread in (self.watch, self.loading, self.saving):
            thread.start()

    def close(self) -> None:
        for thread in (self.saving, self.loading, self.watch):
            thread.close()
        # A server that is only of no use answers too, and logs a traceback if nobody is there.
        self.link.client.close(is_up=self.link.is_up or self.watch.is_refused)


class LMCacheWorker(KVConnectorWorker):
    """See `KVConnectorWorker` and the module.

    Args:
        checks_digests: See `LoadingThread`.
    """

    def __init__(
        self,
        context: ConnectorContext,
        settings: LMCacheSettings,
        wake: Callable[[], None],
        *,
        checks_digests: bool,
    ) -> None:
        self._context = context
        self._settings = settings
        self._make_threads = partial(
            _Threads, context=context, settings=settings, wake=wake, checks_digests=checks_digests
        )
        self._threads: _Threads | None = None
        self._loads: list[LayerwiseLoad] = []

    def register_kv_caches(self, kv: torch.Tensor, layout: KVLayout) -> Endpoint | None:
        """See `KVConnectorWorker`.

        Raises:
            ConfigError: LMCache is not installed, or its server cannot serve this engine.
        """
        self._threads = threads = self._make_threads(kv)
        try:
            threads.start()
        except ConfigError:
            self.close(0.0)
            raise
        return None

    def post(self, metadata: ConnectorMetadata) -> None:
        """See `KVConnectorWorker`."""
        threads, instructions = self._started(), read_instructions(metadata.payload)
        if self._context.rank == 0:
            threads.watch.post(instructions)
        for each in instructions.saves:
            threads.saving.put(each)

    def start_load_kv(self, metadata: ConnectorMetadata) -> bool:
        """See `KVConnectorWorker`."""
        threads, num_layers = self._started(), self._context.layout.num_layers
        self._loads = [LayerwiseLoad(load, num_layers) for load in read_loads(metadata.payload)]
        for load in self._loads:
            threads.watch.are_read(load.load.chunks)
            threads.loading.put(load)
        return bool(self._loads)

    def wait_for_layer_load(self, layer: int) -> None:
        """See `KVConnectorWorker`."""
        for load in self._loads:
            load.wait_for(layer, self._settings.timeout_s)

    def wait_for_save(self) -> Sequence[Failed]:
        """See `KVConnectorWorker`. Starts no saves, which depend on the results of the step."""
        if not self._loads:
            return ()
        loads, self._loads = self._loads, []
        memory = self._started().link.memory
        assert memory is not None
        for load in loads:
            load.cancel()  # the step has passed all layers, so only late loads are cancelled
        outcomes = [load.outcome(memory.chunk_tokens) for load in loads]
        return [failed for failed in outcomes if failed is not None]

    def get_finished(self) -> ConnectorReport:
        """See `KVConnectorWorker`."""
        return self._started().link.take_report()

    def close(self, timeout_s: float) -> None:
        """See `KVConnectorWorker`. Waits for the server at most once."""
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.close()

    def _started(self) -> _Threads:
        if self._threads is None:
            raise InternalError("the memory is not registered, or the connector is closed")
        return self._threads
