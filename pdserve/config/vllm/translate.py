"""Translates vLLM's names and values into pdserve's settings.

A flag without effect is an unused setting, whose note is shown at start. A flag with another name
is a shorthand. If vLLM has other words for a value, the setting's reader turns them into ours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any, Final

from pdserve.config.schema import Role
from pdserve.config.setting import Setting, Shorthand, canonical, parse_bool, parse_object
from pdserve.config.vllm import commands, connectors, flags, variables
from pdserve.errors import ConfigError

_TRANSFER: Final = "kv-transfer-config"
_EXTRA: Final = f"{_TRANSFER}.kv-connector-extra-config"
ROLE: Final = f"{_TRANSFER}.kv-role"
"""The setting for an engine's part in the handoff; may be empty."""
_LMCACHE_PORT: Final = 5555
"""Default port of LMCache's server."""


def with_words(settings: Iterable[Setting]) -> tuple[Setting, ...]:
    """Return the settings so that they also accept vLLM's words."""
    return tuple(_with_words(setting) for setting in settings)


def _with_words(setting: Setting) -> Setting:
    if setting.flag == f"{_TRANSFER}.kv-connector":
        return dataclasses.replace(setting, read=_connector_names)
    if setting.flag in flags.WORDS:
        return dataclasses.replace(setting, read=partial(_word, flags.WORDS[setting.flag]))
    return setting


def _word(words: Mapping[str, str], raw: object) -> object:
    return words.get(str(raw), raw)


def _connector_names(raw: object) -> object:
    """Names with commas between them, vLLM's among them.

    Raises:
        ValueError: A connector is not supported.
    """
    if not isinstance(raw, str):
        return raw
    return ",".join(_connector_name(name.strip()) for name in raw.split(","))


def _connector_name(name: str) -> str:
    if name in connectors.ABSENT_CONNECTORS:
        raise ValueError(f"vLLM's {name} is not supported: {connectors.ABSENT_CONNECTORS[name]}")
    if name == connectors.MULTI:
        raise ValueError(
            f"{name} needs a list of connectors: write their names with commas between them, such "
            "as nixl,lmcache, or put them under kv_connector_extra_config.connectors"
        )
    return connectors.CONNECTORS.get(name, name)


def settings(group: str, known: Collection[str]) -> tuple[Setting, ...]:
    """Return a setting for each flag of `vllm serve` that has no effect here.

    Args:
        group: Heading in the help, where they are hidden.
        known: Flags of the command itself.
    """
    made = [_switch(flag, text, group) for flag, text in flags.NO_EFFECT.items()]
    for flag, (words, text) in flags.ONLY.items():
        made.append(
            _ignored(flag, text, group, read=partial(_only, words, text) if words else None)
        )
    for key, (words, text) in flags.ONLY_SPECULATIVE.items():
        read = partial(_only, words, text)
        made.append(_ignored(f"speculative-config.{key}", text, group, read=read))
    for key, text in connectors.KEYS_WITHOUT_EFFECT.items():
        made.append(_ignored(f"{_TRANSFER}.{key}", text, group))
    made.append(Setting(ROLE, "vllm.kv_role", str, "", group=group, hidden=True, read=_role))
    return tuple(setting for setting in made if setting.flag not in known)


def bench_settings(group: str) -> tuple[Setting, ...]:
    """The same of `vllm bench serve`."""
    return tuple(_switch(flag, text, group) for flag, text in commands.BENCH_NO_EFFECT.items())


def _switch(flag: str, text: str, group: str) -> Setting:
    return Setting(flag, f"vllm.{flag}", bool, False, group=group, hidden=True, note=text)


def _ignored(
    flag: str, text: str, group: str, *, read: Callable[[object], object] | None = None
) -> Setting:
    return Setting(flag, f"vllm.{flag}", object, "", group=group, hidden=True, note=text, read=read)


def _only(words: tuple[str, ...], text: str, raw: object) -> object:
    if str(raw).lower() not in (*words, "none"):
        raise ValueError(f"{raw!r} is not supported, only {' or '.join(words)}: {text}")
    return raw


def _role(raw: object) -> object:
    if raw not in ("", *connectors.ROLES):
        raise ValueError(f"{raw!r} is unknown: use {', '.join(connectors.ROLES)}")
    return raw


def role_of(role: Role, said: str) -> Role:
    """Return an engine's role: its command sets it, or `kv_role` for `pdserve serve`.

    Args:
        role: The command's.
        said: Value of the setting `ROLE`.

    Raises:
        ConfigError: The two do not fit.
    """
    for_part = {"kv_producer": Role.PREFILL, "kv_consumer": Role.DECODE}.get(said, role)
    if role not in (Role.BOTH, for_part):
        raise ConfigError(
            f"--{ROLE} is {said!r}, but the command is `pdserve {role.value}`: use `pdserve "
            f"{for_part.value}`, or leave the role out",
            param=ROLE,
        )
    return for_part


def shorthands(group: str, known: Collection[str]) -> tuple[Shorthand, ...]:
    """Return a shorthand for each flag of `vllm serve` that has another name here.

    Args:
        group: Heading in the help, where they are hidden.
        known: Flags of the command itself.
    """
    keys = {f"{_TRANSFER}.{key}": flag for key, flag in connectors.RENAMED_KEYS.items()}
    renamed = {**flags.RENAMED, **keys}
    return (
        *(_renamed(flag, ours, group) for flag, ours in renamed.items() if ours in known),
        *(
            Shorthand(
                flag, partial(_switched, ours, is_on), group=group, hidden=True, is_switch=True
            )
            for flag, (ours, is_on) in flags.RENAMED_SWITCHES.items()
        ),
        Shorthand(f"{_TRANSFER}.kv-load-failure-policy", _failure_policy, group=group, hidden=True),
        Shorthand(_EXTRA, partial(_extra, "nixl"), group=group, hidden=True),
        *(_renamed(f"{_EXTRA}.{key}", ours, group) for (_, key), ours in connectors.EXTRA.items()),
    )


def bench_shorthands(group: str) -> tuple[Shorthand, ...]:
    """The same of `vllm bench serve`."""
    return tuple(_renamed(flag, ours, group) for flag, ours in commands.BENCH_RENAMED.items())


def _renamed(flag: str, ours: str, group: str) -> Shorthand:
    return Shorthand(flag, lambda raw: dict.fromkeys(ours.split(), raw), group=group, hidden=True)


def _switched(ours: str, is_on: bool, raw: object) -> Mapping[str, object]:
    return {ours: parse_bool(raw) is is_on}


def _failure_policy(raw: object) -> Mapping[str, object]:
    if raw == "recompute":
        return {}
    if raw == "fail":
        return {"recompute-tokens-per-second": 0}
    raise ValueError(f"{raw!r} is unknown: use recompute or fail")


def transfer_config(raw: object) -> Mapping[str, object]:
    """Read `--kv-transfer-config` in vLLM's or pdserve's form; return raw values by flag.

    The flag of the secret has no prefix.

    Raises:
        ValueError: It is not an object, or contains something that is not supported.
    """
    content = {canonical(key): value for key, value in parse_object(raw).items()}
    extra = content.pop("kv-connector-extra-config", None) or {}
    found: dict[str, object] = {}
    if content.get("kv-connector") == connectors.MULTI:
        found |= _several(parse_object(extra))
        del content["kv-connector"]
    elif extra:
        name = _connector_name(str(content.get("kv-connector", "nixl")))
        found |= _extra(name, extra)
    for key, value in content.items():
        found["secret" if key == "secret" else f"{_TRANSFER}.{key}"] = value
    return found


def _several(extra: Mapping[str, object]) -> dict[str, object]:
    """Read the settings of `MultiConnector`: an object like its own for each connector."""
    objects = extra.get("connectors")
    if not isinstance(objects, list) or not objects:
        raise ValueError(
            f"{connectors.MULTI} needs a list of connectors under "
            "kv_connector_extra_config.connectors"
        )
    names: list[str] = []
    found: dict[str, object] = {}
    for each in objects:
        part = dict(transfer_config(each))
        part.pop(ROLE, None)  # the one beside them counts
        names.append(str(_connector_names(part.pop(f"{_TRANSFER}.kv-connector", ""))))
        found |= part
    return {**found, f"{_TRANSFER}.kv-connector": ",".join(names)}


def _extra(name: str, raw: object) -> Mapping[str, object]:
    """Read the settings of the connector `name` alone."""
    content = {canonical(key): value for key, value in parse_object(raw).items()}
    found: dict[str, object] = {}
    host = content.pop(connectors.LMCACHE_HOST, None)
    port = content.pop(connectors.LMCACHE_PORT, None)
    if host is not None or port is not None:
        address = str(host or "localhost").removeprefix("tcp://")
        found[f"{_TRANSFER}.lmcache.url"] = f"tcp://{address}:{port or _LMCACHE_PORT}"
    for key, value in content.items():
        if key in connectors.ABSENT_EXTRA:
            raise ValueError(f"vLLM's {key} is not supported: {connectors.ABSENT_EXTRA[key]}")
        flag = connectors.EXTRA.get((name, key), f"{_TRANSFER}.{canonical(name)}.{key}")
        found[flag] = value
    return found


def variable_readers(
    known: Collection[str] | None = None,
) -> dict[str, Callable[[str], Mapping[str, object]]]:
    """Return what makes raw values by flag of vLLM's environment variables.

    Args:
        known: Flags that the command has; None if it has all of engines'.
    """
    return {
        name: partial(_variable, flag, _VALUES.get(name, _as_it_is))
        for name, flag in variables.VARIABLES.items()
        if known is None or flag in known
    }


def _variable(flag: str, read: Callable[[str], object], text: str) -> Mapping[str, object]:
    return {flag: read(text)}


def _as_it_is(text: str) -> object:
    return text


def _gibibytes(text: str) -> object:
    return "auto" if text.strip() in ("", "0") else f"{text.strip()}GiB"


def _level(text: str) -> object:
    return {"warn": "warning", "critical": "error"}.get(text.lower(), text.lower())


_VALUES: Final[dict[str, Callable[[str], Any]]] = {
    "VLLM_CPU_KVCACHE_SPACE": _gibibytes,
    "VLLM_LOGGING_LEVEL": _level,
}
