"""The worker half of the NIXL connector: a facade over its transfer thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.connectors.base import Capabilities, KVConnectorWorker
from pdserve.connectors.nixl.transfer import TransferThread
from pdserve.connectors.pull.secret import check_secret
from pdserve.errors import InternalError
from pdserve.wire.transfer import ConnectorReport

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from pdserve.connectors.base import ConnectorContext, KVLayout
    from pdserve.observe.clock import Clock
    from pdserve.wire.transfer import ConnectorMetadata, Endpoint


class NixlWorker(KVConnectorWorker):
    """See `KVConnectorWorker`.

    Args:
        quarantine_s: See `TransferThread`.

    Raises:
        ConfigError: The secret is empty although the host is not a loopback one.
    """

    capabilities = Capabilities()

    def __init__(
        self,
        context: ConnectorContext,
        wake: Callable[[], None],
        *,
        clock: Clock,
        quarantine_s: float,
    ) -> None:
        transfer = context.config.transfer
        self._secret = check_secret(host=transfer.host, secret=transfer.secret)
        self._context = context
        self._wake = wake
        self._clock = clock
        self._quarantine_s = quarantine_s
        self._thread: TransferThread | None = None

    def register_kv_caches(self, kv: torch.Tensor, layout: KVLayout) -> None:
        """See `KVConnectorWorker`. Starts the transfer thread and the side channel.

        Raises:
            ConfigError: NIXL cannot be loaded, or the side channel cannot be bound.
        """
        if self._thread is not None:
            raise InternalError("KV memory was registered twice")
        self._thread = TransferThread(
            self._context,
            kv=kv,
            layout=layout,
            secret=self._secret,
            wake=self._wake,
            clock=self._clock,
            quarantine_s=self._quarantine_s,
        )

    @property
    def endpoint(self) -> Endpoint | None:
        """See `KVConnectorWorker`."""
        return None if self._thread is None else self._thread.endpoint

    def start_load_kv(self, metadata: ConnectorMetadata) -> None:
        """See `KVConnectorWorker`."""
        if self._thread is None:
            raise InternalError("instructions came before KV memory was registered")
        self._thread.submit(metadata)

    def get_finished(self) -> ConnectorReport:
        """See `KVConnectorWorker`."""
        return ConnectorReport() if self._thread is None else self._thread.take_report()

    def close(self, timeout_s: float) -> None:
        """See `KVConnectorWorker`."""
        if self._thread is not None:
            self._thread.close(timeout_s)
