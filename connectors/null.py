"""The connector of an engine that exchanges KV with nobody. It stages and reports nothing."""

from __future__ import annotations

from pdserve.connectors.base import KVConnectorBase


class NullConnector(KVConnectorBase, frozen=True, kw_only=True):
    """See `KVConnectorBase`."""

    name: str = "null"
