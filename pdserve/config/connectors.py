"""The list of KV connectors, one line each, and the settings that each one adds.

Connectors lie above the settings, so a line names its class as text, as the entry points of other
packages do (group `pdserve.connectors`). It is imported to learn its settings: flags, files,
variables and the help take it from there. Knows no particular setting.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import typing
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final, Protocol

import msgspec

from pdserve.config.setting import Setting, canonical
from pdserve.errors import ConfigError

BUILT_IN: Final = {
    "null": "pdserve.connectors.base:NullConnector",
    "memory": "pdserve.connectors.memory:MemoryConnector",
    "nixl": "pdserve.connectors.nixl:NixlConnector",
    "ucx": "pdserve.connectors.ucx:UcxConnector",
    "lmcache": "pdserve.connectors.lmcache:LMCacheConnector",
}
"""Each is called without arguments and returns the connector, as what an entry point names is."""

_WITHIN_A_PROCESS: Final = "memory"
_METAVARS: Final = {bool: "", int: "N", float: "NUMBER", str: "TEXT", tuple: "NAME"}


class HasSettings(Protocol):
    """As much of a connector as is known here."""

    @property
    def settings(self) -> msgspec.Struct:
        """Its settings."""
        ...


@functools.cache
def entry_points_by_name() -> dict[str, EntryPoint]:
    """The connectors of other packages; looked for once."""
    return {each.name: each for each in entry_points(group="pdserve.connectors")}


def names() -> list[str]:
    """Every known connector name."""
    return sorted({*BUILT_IN, *entry_points_by_name()})


def load(name: str) -> HasSettings:
    """Return the connector called `name`, with default settings.

    Raises:
        ConfigError: There is none, and the message lists the known names; or another package's
            cannot be imported.
    """
    make: Callable[[], HasSettings]
    if name in BUILT_IN:
        module, attribute = BUILT_IN[name].split(":")
        make = getattr(importlib.import_module(module), attribute)
    elif name in entry_points_by_name():
        entry = entry_points_by_name()[name]
        try:
            make = entry.load()
        except ImportError as error:
            raise ConfigError(
                f"the KV connector {name!r} cannot be imported from {entry.value} ({error}): "
                "repair or remove the package that provides it",
                param="kv-transfer-config.kv-connector",
            ) from error
    else:
        usable = ", ".join(each for each in names() if each != _WITHIN_A_PROCESS)
        raise ConfigError(
            f"--kv-transfer-config.kv-connector is {name!r}: use one of {usable}",
            param="kv-transfer-config.kv-connector",
        )
    return make()


def chosen(kv_connector: str, values: Mapping[str, Any]) -> list[str]:
    """Return the names of an engine's connectors: those that are named, and stores with a `url`.

    Args:
        kv_connector: Names with commas between them.
        values: As `TransferConfig.settings`.
    """
    names = [name.strip() for name in kv_connector.split(",")]
    for key, value in values.items():
        name, _, field = key.partition(".")
        if field == "url" and name not in names and value != getattr(load(name).settings, field):
            names.append(name)
    return [name for name in names if name != "null"] or ["null"]


def check_settings(kv_connector: str, values: Mapping[str, Any]) -> None:
    """Refuse what an engine's connectors would refuse, and one that reaches no other process.

    Raises:
        ConfigError: As of `read_settings`.
    """
    for name in chosen(kv_connector, values):
        if name == _WITHIN_A_PROCESS:
            param = "kv-transfer-config.kv-connector"
            why = "joins engines of one process, for tests: use nixl"
            raise ConfigError(f"--{param} contains {name!r}, which {why}", param=param)
        read_settings(name, values)


def read_settings(name: str, values: Mapping[str, Any]) -> msgspec.Struct:
    """Make the settings of the connector called `name`.

    Args:
        values: Values by `NAME.FIELD`; those of other connectors are left alone.

    Raises:
        ConfigError: It refuses a value, or there is no such connector.
    """
    prefix = f"{name}."
    own = {key.removeprefix(prefix): values[key] for key in values if key.startswith(prefix)}
    return msgspec.convert(own, type(load(name).settings))


def connector_settings() -> dict[str, tuple[Setting, ...]]:
    """The settings of each connector that has any: `kv-transfer-config.NAME.FIELD`.

    One that cannot be imported has none; choosing it is an error that says why.
    """
    found = {}
    for name in names():
        with contextlib.suppress(ConfigError):
            found[name] = _settings(name, type(load(name).settings))
    return {name: settings for name, settings in found.items() if settings}


@functools.cache  # each table of a command asks several times
def _settings(name: str, struct: type[msgspec.Struct]) -> tuple[Setting, ...]:
    return tuple(_setting(name, info) for info in msgspec.structs.fields(struct))


def _setting(name: str, info: msgspec.structs.FieldInfo) -> Setting:
    annotation, help_text = info.type, ""
    if typing.get_origin(annotation) is typing.Annotated:
        annotation, meta = typing.get_args(annotation)[:2]
        help_text = meta.description or ""
    setting = Setting(
        flag=f"kv-transfer-config.{canonical(name)}.{canonical(info.name)}",
        path=f"engine.transfer.settings.{name}.{info.name}",
        annotation=annotation,
        default=info.default,
        help=help_text,
        group="KV transfer",
    )
    return dataclasses.replace(setting, metavar=_METAVARS.get(setting.kind, "VALUE"))
