"""The table that `pdserve vllm-flags` prints: what pdserve does with each of vLLM's names.

Flags that are the same are not listed: they are the flags that the command has.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from pdserve.config.setting import declare
from pdserve.config.vllm import RELEASE, commands, connectors, flags, variables


class VllmAnswer(enum.Enum):
    """What pdserve does with one of vLLM's names."""

    SAME = "same"
    TRANSLATED = "translated"
    NO_EFFECT = "no effect"
    ABSENT = "not supported"


class VllmKind(enum.Enum):
    """The kind of a name."""

    FLAG = "flags"
    VARIABLE = "environment variables"
    CONNECTOR = "KV connectors"
    KEY = "keys of --kv-transfer-config"
    COMMAND = "commands"


@dataclass(frozen=True, slots=True)
class VllmName:
    """One row.

    Attributes:
        name: The name as written, with its dashes and short forms.
        text: What it becomes, or why it is not supported; may be empty.
    """

    kind: VllmKind
    name: str
    answer: VllmAnswer
    text: str = ""


class VllmFlagsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Which rows of the table are shown.

    Attributes:
        filters: Rows that have each of these words, in any case.
    """

    filters: tuple[str, ...] = ()


VLLM_FLAGS_SETTINGS: Final = declare(
    "vllm_flags",
    VllmFlagsConfig,
    "output",
    (("filters", "filters", "FILTER", "words that a row must have"),),
)


def table(settings: Collection[str]) -> list[VllmName]:
    """Return the row of every name, by kind and name.

    Args:
        settings: The flags of the engines' commands.
    """
    rows = [*_flags(settings), *_variables(settings), *_connectors(), *_keys(), *_commands()]
    order = list(VllmKind)
    return sorted(rows, key=lambda row: (order.index(row.kind), row.name.lower()))


def _flags(settings: Collection[str]) -> Iterator[VllmName]:
    same = flags.SAME.split()

    def row(flag: str, answer: VllmAnswer, text: str) -> VllmName:
        short = [f", -{short}" for short, long in flags.SHORT.items() if long == flag]
        if flag in settings or flag in same:
            answer, text = VllmAnswer.SAME, flags.DIFFERENCES.get(flag, "")
        return VllmName(VllmKind.FLAG, f"--{flag}{''.join(short)}", answer, text)

    for flag in same:
        yield row(flag, VllmAnswer.SAME, "")
    for flag, ours in flags.RENAMED.items():
        yield row(flag, VllmAnswer.TRANSLATED, f"--{ours}")
    for flag, (ours, is_on) in flags.RENAMED_SWITCHES.items():
        yield row(flag, VllmAnswer.TRANSLATED, f"--{ours}" if is_on else f"--no-{ours}")
    for flag, text in flags.NO_EFFECT.items():
        yield row(flag, VllmAnswer.NO_EFFECT, text)
    for flag, (words, text) in flags.ONLY.items():
        which = f"only {' or '.join(words)}; " if words else ""
        yield row(flag, VllmAnswer.NO_EFFECT, which + text)
    for flag, text in _one_by_one(flags.ABSENT):
        yield row(flag, VllmAnswer.ABSENT, text)


def _variables(settings: Collection[str]) -> Iterator[VllmName]:
    for name, flag in variables.VARIABLES.items():
        note = variables.VARIABLE_NOTES.get(name)
        text = f"--{flag}" + (f" ({note})" if note else "")
        assert flag in settings, flag
        yield VllmName(VllmKind.VARIABLE, name, VllmAnswer.TRANSLATED, text)
    for name, text in variables.VARIABLES_WITHOUT_EFFECT.items():
        yield VllmName(VllmKind.VARIABLE, name, VllmAnswer.NO_EFFECT, text)
    for name, text in _one_by_one(variables.ABSENT_VARIABLES):
        yield VllmName(VllmKind.VARIABLE, name, VllmAnswer.ABSENT, text)


def _connectors() -> Iterator[VllmName]:
    for name, ours in connectors.CONNECTORS.items():
        note = connectors.CONNECTOR_NOTES.get(name)
        text = ours + (f"; {note}" if note else "")
        yield VllmName(VllmKind.CONNECTOR, name, VllmAnswer.TRANSLATED, text)
    text = "a list of connectors, such as nixl,lmcache"
    yield VllmName(VllmKind.CONNECTOR, connectors.MULTI, VllmAnswer.TRANSLATED, text)
    for name, text in connectors.ABSENT_CONNECTORS.items():
        yield VllmName(VllmKind.CONNECTOR, name, VllmAnswer.ABSENT, text)


def _keys() -> Iterator[VllmName]:
    def row(key: str, answer: VllmAnswer, text: str) -> VllmName:
        return VllmName(VllmKind.KEY, key.replace("-", "_"), answer, text)

    yield row("kv-connector", VllmAnswer.SAME, "vLLM's names and pdserve's")
    yield row(
        "kv-role", VllmAnswer.SAME, "must match the command; with `pdserve serve` it sets the role"
    )
    yield row(
        "kv-load-failure-policy",
        VllmAnswer.TRANSLATED,
        "fail is --recompute-tokens-per-second 0; recompute is its default",
    )
    yield row("kv-connector-extra-config", VllmAnswer.TRANSLATED, "the keys below")
    for key, flag in connectors.RENAMED_KEYS.items():
        yield row(key, VllmAnswer.TRANSLATED, f"--{flag}")
    for key, text in connectors.KEYS_WITHOUT_EFFECT.items():
        yield row(key, VllmAnswer.NO_EFFECT, text)
    for key, text in connectors.ABSENT_KEYS.items():
        yield row(key, VllmAnswer.ABSENT, text)
    extra = "kv-connector-extra-config"
    for (_, key), flag in connectors.EXTRA.items():
        yield row(f"{extra}.{key}", VllmAnswer.TRANSLATED, f"--{flag}")
    yield row(
        f"{extra}.connectors", VllmAnswer.TRANSLATED, "MultiConnector's; --kv-transfer-config"
    )
    for key in (connectors.LMCACHE_HOST, connectors.LMCACHE_PORT):
        flag = "--kv-transfer-config.lmcache.url"
        yield row(f"{extra}.{key}", VllmAnswer.TRANSLATED, flag)
    for key, text in connectors.ABSENT_EXTRA.items():
        yield row(f"{extra}.{key}", VllmAnswer.ABSENT, text)


def _commands() -> Iterator[VllmName]:
    for name in ("serve", "bench serve", "bench sweep serve"):
        text = "pdserve bench sweep" if name == "bench sweep serve" else ""
        answer = VllmAnswer.TRANSLATED if text else VllmAnswer.SAME
        yield VllmName(VllmKind.COMMAND, name, answer, text)
    for name, text in commands.ABSENT_COMMANDS.items():
        yield VllmName(VllmKind.COMMAND, name, VllmAnswer.ABSENT, text)


def _one_by_one(reasons: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for text, names in reasons.items():
        for name in names.split():
            yield name, text


def absent_flags() -> dict[str, str]:
    """Why flags of `vllm serve` are not supported, by flag or short form, without dashes."""
    found = {flag: _not_here(flag, text) for flag, text in _one_by_one(flags.ABSENT)}
    found |= {short: found[flag] for short, flag in flags.SHORT.items() if flag in found}
    for key, text in connectors.ABSENT_KEYS.items():
        flag = f"kv-transfer-config.{key}"
        found[flag] = _not_here(flag, text)
    for key, text in _one_by_one(flags.ABSENT_SPECULATIVE_KEYS):
        flag = f"speculative-config.{key}"
        found[flag] = _not_here(flag, text)
    return found


def absent_bench_flags() -> dict[str, str]:
    """The same of `vllm bench serve`."""
    return {flag: _not_here(flag, text) for flag, text in _one_by_one(commands.BENCH_ABSENT)}


def _not_here(flag: str, text: str) -> str:
    return f"vLLM's --{flag} is not supported: {text}"


def unread(environ: Iterable[str]) -> list[str]:
    """Return a line for each of vLLM's variables in `environ` that sets nothing here."""
    absent = dict(_one_by_one(variables.ABSENT_VARIABLES))
    lines = []
    for name in sorted(environ):
        if name in variables.VARIABLES_WITHOUT_EFFECT:
            lines.append(f"{name} changes nothing: {variables.VARIABLES_WITHOUT_EFFECT[name]}")
        elif name.startswith("VLLM_") and name not in variables.VARIABLES:
            if name in absent:
                lines.append(f"{name} is not read: {absent[name]}")
            elif _OF_A_CLUSTER.search(name) is None:
                lines.append(f"{name} is not read: vLLM {RELEASE} has no such variable")
    return lines


_OF_A_CLUSTER: Final = re.compile(r"_SERVICE_HOST$|_SERVICE_PORT|_PORT(_|$)")
"""Kubernetes sets such variables for a service that is called vllm."""
