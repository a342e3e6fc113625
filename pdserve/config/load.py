"""Where a setting's value comes from: command line > YAML file > environment > default.

A `Setting` ties a flag to one field of a frozen struct; its type and its default are the
field's own. `resolve` finds each setting's value and remembers who gave it, `build` makes
the struct. The same names serve everywhere: the flag `--max-model-len`, the YAML key
`max-model-len` (or `max_model_len`), the variable `PDSERVE_MAX_MODEL_LEN`.

Knows no particular setting (`settings` lists them) and no command.
"""

from __future__ import annotations

import enum
import json
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from pdserve.errors import ConfigError

ENVIRONMENT_PREFIX: Final = "PDSERVE_"

StructT = TypeVar("StructT", bound=msgspec.Struct)


class Source(enum.Enum):
    """Who gave a value; the first that has one wins."""

    COMMAND_LINE = "command line"
    FILE = "file"
    ENVIRONMENT = "environment"
    DEFAULT = "default"


class Required(enum.Enum):
    """The default of a setting that has none."""

    REQUIRED = enum.auto()


@dataclass(frozen=True, slots=True)
class Setting:
    """One flag and the struct field it fills.

    Attributes:
        flag: Long name, in dashes, without the leading ones.
        path: The field, from its root: `engine.cache.block_size`.
        annotation: The field's type: bool, int, float, str, tuple[str, ...],
            tuple[int, ...], an enum, or one of them or None.
        default: The field's default, or `Required.REQUIRED`.
        metavar: What stands for the value in the help.
        group: Heading in the help.
        hidden: Left out of the help.
    """

    flag: str
    path: str
    annotation: Any
    default: object
    help: str = ""
    metavar: str = ""
    group: str = ""
    hidden: bool = False

    @property
    def optional(self) -> bool:
        """Whether None is a value."""
        return type(None) in typing.get_args(self.annotation)

    @property
    def kind(self) -> Any:
        """The type without None; `tuple` for a list."""
        if typing.get_origin(self.annotation) is tuple:
            return tuple
        if isinstance(self.annotation, types.UnionType):
            return next(t for t in typing.get_args(self.annotation) if t is not type(None))
        return self.annotation


@dataclass(frozen=True, slots=True)
class Shorthand:
    """A flag that stands for several settings, which each may still be given by itself.

    Attributes:
        expand: From the raw value to raw values by flag. Raises ValueError.
    """

    flag: str
    expand: Callable[[object], Mapping[str, object]]
    help: str = ""
    metavar: str = ""
    group: str = ""
    hidden: bool = False


@dataclass(frozen=True, slots=True)
class Resolved:
    """A value and who gave it.

    Attributes:
        origin: For people: `--port`, `prefill.yaml`, `PDSERVE_PORT`, `default`.
    """

    value: object
    source: Source
    origin: str


@dataclass(frozen=True, slots=True)
class Table:
    """The settings one command takes.

    Attributes:
        defaults: Values by flag that stand in for the fields' own defaults.
    """

    settings: tuple[Setting, ...]
    shorthands: tuple[Shorthand, ...] = ()
    defaults: Mapping[str, object] = field(default_factory=dict)

    @property
    def variables(self) -> dict[str, str]:
        """The environment variable of each flag."""
        flags = [s.flag for s in self.settings] + [s.flag for s in self.shorthands]
        return {flag: variable(flag) for flag in flags}

    def default(self, setting: Setting) -> object:
        """The value of `setting` when nobody gives one."""
        return self.defaults.get(setting.flag, setting.default)


def variable(flag: str) -> str:
    """The environment variable that stands for a flag."""
    return ENVIRONMENT_PREFIX + re.sub(r"[-.]", "_", flag).upper()


def canonical(name: str) -> str:
    """The one spelling of a name that may be written with `_` or `-`."""
    return name.replace("_", "-")


def declare(
    root: str, struct: type[msgspec.Struct], group: str, rows: Iterable[Sequence[str]]
) -> tuple[Setting, ...]:
    """Tie flags to the fields of `struct`.

    Args:
        root: Name of the struct in the settings' paths.
        struct: The type that `build` will make.
        group: Heading in the help.
        rows: `(flag, path below root, metavar, help)`; a path's last part is a field.
    """
    settings = []
    for flag, path, metavar, text in rows:
        owner: Any = struct
        info = None
        for part in path.split("."):
            info = next(f for f in msgspec.structs.fields(owner) if f.name == part)
            owner = info.type
        assert info is not None, path
        settings.append(
            Setting(
                flag=flag,
                path=f"{root}.{path}",
                annotation=info.type,
                default=Required.REQUIRED if info.required else info.default,
                help=text,
                metavar=metavar,
                group=group,
            )
        )
    return tuple(settings)


_MULTIPLIER: Final[dict[str, int]] = {
    **{letter: 1000**power for power, letter in enumerate("kmgt", start=1)},
    **{letter: 1024**power for power, letter in enumerate("KMGT", start=1)},
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", start=1)},
}
_NUMBER = re.compile(r"([+-]?[0-9]+(?:\.[0-9]+)?)\s*([kmgt]|[KMGT](?:iB)?)?")


def parse_int(text: str) -> int:
    """Read a whole number with an optional multiplier: 2048, 2k (2000), 2K or 2KiB (2048), 25.6k.

    Raises:
        ValueError: It is no number, or not a whole one.
    """
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a whole number, as 512, 2k, 4M or 1GiB")
    digits, suffix = match.groups()
    whole, _, decimals = digits.partition(".")
    scale: int = 10 ** len(decimals)
    multiplier = _MULTIPLIER[suffix] if suffix else 1
    value, rest = divmod(int(whole + decimals) * multiplier, scale)
    if rest:
        raise ValueError(f"{text!r} is not a whole number")
    return value


def parse(setting: Setting, raw: object) -> object:
    """Turn what a person wrote into a value of the setting's type.

    Args:
        setting: Whose value it is.
        raw: A string (command line, environment), a list of strings, what YAML made of it,
            or a value that was parsed already.

    Raises:
        ValueError: It does not fit; the message begins with the value.
    """
    if setting.optional and raw in (None, "auto", "none"):
        return None
    kind = setting.kind
    if kind is bool:
        return _parse_bool(raw)
    if kind is int:
        if isinstance(raw, str):
            return parse_int(raw)
        if isinstance(raw, int) and not isinstance(raw, bool):
            return raw
        raise ValueError(f"{raw!r} is not a whole number")
    if kind is float:
        if isinstance(raw, (str, int, float)) and not isinstance(raw, bool):
            try:
                return float(raw)
            except ValueError:
                pass
        raise ValueError(f"{raw!r} is not a number")
    if kind is tuple:
        items = _parse_list(raw)
        if int in typing.get_args(setting.annotation):
            parts = [p for i in items for p in (_parse_list(i) if isinstance(i, str) else [i])]
            return tuple(parse_int(str(part)) for part in parts)
        return tuple(_text_of(item) for item in items)
    if isinstance(raw, kind):
        return raw
    if not isinstance(raw, str):
        raise ValueError(f"{raw!r} is not a text: put it in quotes")
    if issubclass(kind, enum.Enum):
        try:
            return kind(raw)
        except ValueError:
            known = " or ".join(member.value for member in kind)
            raise ValueError(f"{raw!r} is not known: use {known}") from None
    return raw


def _parse_bool(raw: object) -> bool:
    if isinstance(raw, bool):
        return raw
    words = {"true": True, "1": True, "yes": True, "on": True}
    words |= {"false": False, "0": False, "no": False, "off": False}
    if isinstance(raw, str) and raw.lower() in words:
        return words[raw.lower()]
    raise ValueError(f"{raw!r} is neither true nor false")


def _parse_list(raw: object) -> list[object]:
    """The items of a list that is JSON, words between commas, or what YAML made of it."""
    if isinstance(raw, str) and raw.lstrip().startswith("["):
        try:
            raw = json.loads(raw)
        except json.JSONDecodeError as error:
            raise ValueError(f"{raw!r} is not JSON: {error}") from None
    if isinstance(raw, str):
        return [part.strip() for part in raw.split(",") if part.strip()]
    if isinstance(raw, (list, tuple)):
        return list(raw)
    raise ValueError(f"{raw!r} is not a list")


def _text_of(item: object) -> str:
    if isinstance(item, str):
        return item
    raise ValueError(f"{item!r} is not a text: put it in quotes")


def parse_object(raw: object) -> Mapping[str, object]:
    """Read a JSON object, or take a YAML mapping as it is.

    Raises:
        ValueError: It is neither.
    """
    if isinstance(raw, str):
        try:
            raw = json.loads(raw, object_pairs_hook=_no_key_twice)
        except json.JSONDecodeError as error:
            raise ValueError(f"{raw!r} is not JSON: {error}") from None
    if not isinstance(raw, Mapping):
        raise ValueError(f'{raw!r} is not an object, as {{"name": value}}')
    return _no_key_twice([(str(key), value) for key, value in raw.items()])


def _no_key_twice(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    names = [canonical(name) for name, _ in pairs]
    for (name, _), spelled in zip(pairs, names, strict=True):
        if names.count(spelled) > 1:
            raise ValueError(f"the key {name!r} stands there twice")
    return dict(pairs)


def read_yaml(path: Path) -> dict[str, object]:
    """Read a file of settings.

    Raises:
        ConfigError: The file is missing, not YAML, not a mapping, or has a key twice.
    """
    import yaml  # costs 20 ms, and most commands have no file

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            mapping = super().construct_mapping(node, deep=True)
            if len(mapping) < len(node.value):
                names = [self.construct_object(key, deep=True) for key, _ in node.value]
                twice = next(name for name in names if names.count(name) > 1)
                raise yaml.MarkedYAMLError(
                    problem=f"the key {twice!r} stands there twice", problem_mark=node.start_mark
                )
            return mapping

    try:
        with path.open(encoding="utf-8") as file:  # errors name an open file
            content = yaml.load(file, Loader)  # a SafeLoader
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}", param="config") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} is not valid YAML: {error}", param="config") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(
            f"--config {path} must map flag names to values, as `port: 8100`", param="config"
        )
    return {str(key): value for key, value in content.items()}


def resolve(
    table: Table,
    *,
    command_line: Mapping[str, object],
    file: Path | None = None,
    environ: Mapping[str, str],
) -> dict[str, Resolved]:
    """Find each setting's value.

    Args:
        table: The command's settings.
        command_line: Raw values by flag.
        file: YAML with flags as keys.
        environ: The process's environment; names outside `PDSERVE_` are not looked at.

    Returns:
        A value per flag, in the table's order.

    Raises:
        ConfigError: A value does not fit its setting (says which source gave it), a key of
            the file is unknown (names the nearest flag), or a required value is missing.
    """
    given = _expand(table, command_line, lambda flag: f"--{flag}")
    in_file = (
        {} if file is None else _expand(table, read_yaml(file), lambda flag: f"{flag} in {file}")
    )
    names = table.variables
    variables = {flag: environ[name] for flag, name in names.items() if name in environ}
    in_environ = _expand(table, variables, lambda flag: names.get(flag, flag))

    resolved = {}
    for setting in table.settings:
        flag = setting.flag
        for source, values, origin in (
            (Source.COMMAND_LINE, given, f"--{flag}"),
            (Source.FILE, in_file, file.name if file else ""),
            (Source.ENVIRONMENT, in_environ, names[flag]),
        ):
            if flag in values:
                resolved[flag] = Resolved(values[flag], source, origin)
                break
        else:
            default = table.default(setting)
            if default is Required.REQUIRED:
                raise ConfigError(f"--{flag} is needed and nobody gave it", param=flag)
            resolved[flag] = Resolved(default, Source.DEFAULT, "default")
    return resolved


def _expand(
    table: Table, raw: Mapping[str, object], where: Callable[[str], str]
) -> dict[str, object]:
    """Parse one source's raw values; a setting given by itself wins over a shorthand."""
    settings = {setting.flag: setting for setting in table.settings}
    shorthands = {shorthand.flag: shorthand for shorthand in table.shorthands}
    values: dict[str, object] = {}

    def take(items: Mapping[str, object]) -> None:
        names: dict[str, str] = {}
        for name in items:
            if names.setdefault(canonical(name), name) != name:
                raise ConfigError(f"{where(name)}: {names[canonical(name)]!r} is the same setting")
        for flag in sorted(names, key=lambda flag: flag not in shorthands):
            value = items[names[flag]]
            try:
                if flag in shorthands:
                    take(shorthands[flag].expand(value))
                elif flag in settings:
                    values[flag] = parse(settings[flag], value)
                else:
                    raise ConfigError(
                        f"{where(names[flag])}: no such setting; "
                        f"{nearest(flag, [*settings, *shorthands])}",
                        param=flag,
                    )
            except ValueError as error:
                raise ConfigError(f"{where(flag)}: {error}", param=flag) from None

    take(raw)
    return values


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint that names the flag most like `name`."""
    import difflib

    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)
    return f"did you mean {found[0]}?" if found else "there are none"


def unknown_variables(tables: Iterable[Table], environ: Mapping[str, str]) -> list[str]:
    """The `PDSERVE_` variables in `environ` that no command reads."""
    known = {name for table in tables for name in table.variables.values()}
    return sorted(
        name for name in environ if name.startswith(ENVIRONMENT_PREFIX) and name not in known
    )


def build(
    root: str, struct: type[StructT], table: Table, resolved: Mapping[str, Resolved]
) -> StructT:
    """Make the struct called `root` in the settings' paths.

    Raises:
        ConfigError: The struct refuses a value.
    """
    values = {
        setting.path.removeprefix(f"{root}."): resolved[setting.flag].value
        for setting in table.settings
        if setting.path.startswith(f"{root}.")
    }
    return _make(struct, values)


def _make(struct: type[StructT], values: Mapping[str, object]) -> StructT:
    arguments: dict[str, object] = {}
    below: dict[str, dict[str, object]] = {}
    for path, value in values.items():
        head, _, rest = path.partition(".")
        if rest:
            below.setdefault(head, {})[rest] = value
        else:
            arguments[head] = value
    kinds = {info.name: info.type for info in msgspec.structs.fields(struct)}
    for name, inner in below.items():
        is_open = typing.get_origin(kinds[name]) is dict  # what is in it, others know
        arguments[name] = inner if is_open else _make(kinds[name], inner)
    return struct(**arguments)
