"""Connector names -> factories. Imports a connector only when it is asked for.

Another package adds one through an entry point of the group `pdserve.connectors` whose
object is a `ConnectorFactory`.
"""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from typing import cast

from pdserve.connectors.base import ConnectorFactory
from pdserve.errors import ConfigError

_BUILT_IN = {
    "null": "pdserve.connectors.null",
    "memory": "pdserve.connectors.memory",
    "nixl": "pdserve.connectors.nixl",
}


def names() -> list[str]:
    """Every known connector name."""
    return sorted({*_BUILT_IN, *(e.name for e in entry_points(group="pdserve.connectors"))})


def find(name: str) -> ConnectorFactory:
    """Return the factory called `name`.

    Raises:
        ConfigError: There is none; the message lists the known names.
    """
    if name in _BUILT_IN:
        return cast(ConnectorFactory, importlib.import_module(_BUILT_IN[name]).FACTORY)
    for entry in entry_points(group="pdserve.connectors"):
        if entry.name == name:
            return cast(ConnectorFactory, entry.load())
    raise ConfigError(
        f"--kv-transfer-config.kv-connector is {name!r}: use one of {', '.join(names())}",
        param="kv-transfer-config.kv-connector",
    )
