"""The connector of an engine that exchanges KV with nobody. It stages and reports nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.connectors.base import Capabilities, KVConnectorScheduler, KVConnectorWorker, Match
from pdserve.wire.transfer import ConnectorReport

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from pdserve.connectors.base import ConnectorContext, ConnectorFactory, KVLayout, RequestView
    from pdserve.wire.ids import BlockId
    from pdserve.wire.step import SchedulerOutput
    from pdserve.wire.transfer import ConnectorMetadata, Endpoint, KVHandoff


class NullScheduler(KVConnectorScheduler):
    """Offers no tokens, leases no blocks and takes no handoffs."""

    def check_handoff(self, request: RequestView) -> str | None:
        """See `KVConnectorScheduler`. Everything is refused: nobody here can check it."""
        return "this engine has no KV connector (kv_connector is null), so it takes no handoffs"

    def request_queued(self, request: RequestView) -> None:
        """See `KVConnectorScheduler`."""

    def get_num_new_matched_tokens(
        self, request: RequestView, num_computed_tokens: int
    ) -> Match | None:
        """See `KVConnectorScheduler`."""
        return Match(0, is_async=False)

    def update_state_after_alloc(
        self,
        request: RequestView,
        block_ids: Sequence[BlockId],
        num_external_tokens: int,
        *,
        generations: Sequence[int] = (),
    ) -> None:
        """See `KVConnectorScheduler`."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ConnectorMetadata | None:
        """See `KVConnectorScheduler`."""
        return None

    def take_instructions(self) -> ConnectorMetadata | None:
        """See `KVConnectorScheduler`."""
        return None

    def request_finished(
        self, request: RequestView, block_ids: Sequence[BlockId], generations: Sequence[int]
    ) -> KVHandoff | None:
        """See `KVConnectorScheduler`."""
        return None

    def request_aborted(self, request: RequestView) -> bool:
        """See `KVConnectorScheduler`."""
        return False

    def release_lease(self, nonce: str) -> None:
        """See `KVConnectorScheduler`."""

    def update_connector_output(self, report: ConnectorReport) -> None:
        """See `KVConnectorScheduler`."""


class NullWorker(KVConnectorWorker):
    """Touches nothing."""

    capabilities = Capabilities()

    def register_kv_caches(self, kv: torch.Tensor, layout: KVLayout) -> None:
        """See `KVConnectorWorker`."""

    @property
    def endpoint(self) -> Endpoint | None:
        """See `KVConnectorWorker`."""
        return None

    def post(self, metadata: ConnectorMetadata) -> None:
        """See `KVConnectorWorker`."""

    def start_load_kv(self, metadata: ConnectorMetadata) -> None:
        """See `KVConnectorWorker`."""

    def get_finished(self) -> ConnectorReport:
        """See `KVConnectorWorker`."""
        return ConnectorReport()

    def close(self, timeout_s: float) -> None:
        """See `KVConnectorWorker`."""


class NullFactory:
    """See `ConnectorFactory`."""

    def scheduler(
        self, context: ConnectorContext, endpoints: list[Endpoint]
    ) -> KVConnectorScheduler:
        """See `ConnectorFactory`."""
        return NullScheduler()

    def worker(self, context: ConnectorContext, wake: Callable[[], None]) -> KVConnectorWorker:
        """See `ConnectorFactory`."""
        return NullWorker()


FACTORY: ConnectorFactory = NullFactory()
