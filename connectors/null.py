"""The connector of an engine that exchanges KV with nobody. It stages and reports nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.connectors.base import KVConnectorScheduler, KVConnectorWorker, KVSource
from pdserve.errors import HandoffRefusedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.connectors.base import ConnectorContext, ConnectorFactory, RequestView
    from pdserve.wire.transfer import Endpoint


class NullScheduler(KVConnectorScheduler):
    """Offers no tokens, holds no blocks and takes no handoffs."""

    def request_arrived(self, request: RequestView) -> KVSource:
        """See `KVConnectorScheduler`. Every handoff is refused: nobody here can check it."""
        if request.handoff is not None or request.ticket is not None:
            raise HandoffRefusedError(
                "this engine has no KV connector (kv_connector is null), so it takes no handoffs"
            )
        return KVSource.LOCAL


class NullFactory:
    """See `ConnectorFactory`."""

    def scheduler(
        self, context: ConnectorContext, endpoints: list[Endpoint]
    ) -> KVConnectorScheduler:
        """See `ConnectorFactory`."""
        return NullScheduler()

    def worker(self, context: ConnectorContext, wake: Callable[[], None]) -> KVConnectorWorker:
        """See `ConnectorFactory`."""
        return KVConnectorWorker()


FACTORY: ConnectorFactory = NullFactory()
