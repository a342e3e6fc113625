"""The connector of an engine that exchanges KV with nobody. It stages and reports nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.connectors.base import KVConnectorBase, KVConnectorScheduler, KVSource, refuse_any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.connectors.base import ConnectorContext
    from pdserve.connectors.views import RequestView
    from pdserve.wire.transfer import Endpoint


class NullScheduler(KVConnectorScheduler):
    """Offers no tokens, holds no blocks and takes no handoffs."""

    def request_arrived(self, request: RequestView) -> KVSource:
        """See `KVConnectorScheduler`. Every handoff is refused: nobody here can check it."""
        why = "this engine has no KV connector (kv_connector is null), so it takes no handoffs"
        refuse_any(request, why)
        return KVSource.LOCAL


class NullConnector(KVConnectorBase, frozen=True, kw_only=True):
    """See `KVConnectorBase`."""

    name: str = "null"

    def make_scheduler(
        self, context: ConnectorContext, endpoints: Sequence[Endpoint]
    ) -> NullScheduler:
        """See `KVConnectorBase`."""
        return NullScheduler()
