"""Makes the connector from the configured names and settings. Knows no connector itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import msgspec

from pdserve.config.connectors import chosen, load, read_settings
from pdserve.connectors.multi import MultiConnector

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.connectors.base import KVConnectorBase

_NOTHING: Mapping[str, Any] = {}


def find(kv_connector: str, values: Mapping[str, Any] = _NOTHING) -> KVConnectorBase:
    """Return the connector that an engine uses, which combines all that are named.

    Args:
        kv_connector, values: `kv_connector` and `settings` of `TransferConfig`.

    Raises:
        ConfigError: A name is unknown (the message lists the known names), a connector refuses a
            setting, or the connectors cannot be combined.
    """
    connectors = [
        msgspec.structs.replace(
            cast("KVConnectorBase", load(name)), settings=read_settings(name, values)
        )
        for name in chosen(kv_connector, values)
    ]
    return connectors[0] if len(connectors) == 1 else MultiConnector.of(connectors)
