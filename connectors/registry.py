"""From a connector's name and what it is told to the connector. Knows none itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import msgspec

from pdserve.config.connectors import load, read_settings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.connectors.base import KVConnectorBase

_NOTHING: Mapping[str, Any] = {}


def find(name: str, told: Mapping[str, Any] = _NOTHING) -> KVConnectorBase:
    """Return the connector called `name`.

    Args:
        told: As `TransferConfig.settings`.

    Raises:
        ConfigError: There is none, and the message lists the known names; or it refuses a setting.
    """
    connector = cast("KVConnectorBase", load(name))
    return msgspec.structs.replace(connector, settings=read_settings(name, told))
