"""Resolves settings: command line > YAML file > environment > default.

`resolve` finds each setting's value and remembers who gave it, `build` makes the struct. The same
names serve everywhere: the flag `--max-model-len`, the YAML key `max-model-len` (or
`max_model_len`), the variable `PDSERVE_MAX_MODEL_LEN`, or `PDSERVE_MAX_MODEL_LEN_FILE`, which
names a file that holds the value.

Knows no particular setting (`settings` lists them) and no command.
"""

from __future__ import annotations

import enum
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from pdserve.config.setting import IdleRow, Required, Setting, Shorthand, canonical, parse
from pdserve.config.yaml_file import read_yaml
from pdserve.errors import ConfigError

ENVIRONMENT_PREFIX: Final = "PDSERVE_"
_LIKE: Final = 0.6
"""How much alike two names are, from 0 to 1, if one is taken for the other."""
_FILE: Final = "_FILE"
"""Behind a variable's name: the value stands in a file, as secrets of containers do."""

StructT = TypeVar("StructT", bound=msgspec.Struct)


class Source(enum.Enum):
    """Who gave a value; the first that has one wins."""

    COMMAND_LINE = "command line"
    FILE = "file"
    ENVIRONMENT = "environment"
    DEFAULT = "default"


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
        other_variables: Variables of another program, and how each becomes raw values by flag; of
            two for one flag the first wins, and ours over all of them.
        absent: Flags of another program that are not supported, and a sentence that says why.
        idle: What changes nothing beside certain values of other settings.
    """

    settings: tuple[Setting, ...]
    shorthands: tuple[Shorthand, ...] = ()
    defaults: Mapping[str, object] = field(default_factory=dict)
    other_variables: Mapping[str, Callable[[str], Mapping[str, object]]] = field(
        default_factory=dict
    )
    absent: Mapping[str, str] = field(default_factory=dict)
    idle: tuple[IdleRow, ...] = ()

    @property
    def variables(self) -> dict[str, str]:
        """The environment variable of each flag."""
        flags = [s.flag for s in self.settings] + [s.flag for s in self.shorthands]
        return {flag: variable(flag) for flag in flags}

    def default(self, setting: Setting) -> object:
        """The value of `setting` when nobody gives one."""
        return self.defaults.get(setting.flag, setting.default)

    def hint(self, name: str, dashes: str = "") -> str:
        """Say what to do about a flag that is not supported.

        Args:
            name: Without dashes in front.
            dashes: How flags are written where it was found.
        """
        for each in (name, name.removeprefix("no-"), name.partition(".")[0]):
            if each in self.absent:
                return self.absent[each]
        items: list[Setting | Shorthand] = [*self.settings, *self.shorthands]
        known = [item.flag for item in items]
        near = nearest(name, [*known, *self.absent])
        if near is None:
            return "nothing here has a name like it"
        return f"did you mean {dashes}{near}?" + (
            f" {self.absent[near]}" if near in self.absent else ""
        )

    def notes(self, resolved: Mapping[str, Resolved]) -> list[str]:
        """Return a line for each setting that somebody gave and that changes nothing.

        A variable may be for another command than this one, so of what is idle only beside other
        settings it is not told.
        """
        lines = [
            _note(setting.flag, resolved[setting.flag], setting.note)
            for setting in self.settings
            if setting.note and resolved[setting.flag].source is not Source.DEFAULT
        ]
        for row in self.idle:
            given = [
                (flag, resolved[flag])
                for flag in row.flags
                if resolved[flag].source in (Source.COMMAND_LINE, Source.FILE)
            ]
            if given and row.is_idle(*(resolved[flag].value for flag in row.beside)):
                lines += [_note(flag, item, row.why) for flag, item in given]
        return lines


def _note(flag: str, item: Resolved, why: str) -> str:
    where = f"{flag} in " if item.source is Source.FILE else ""
    return f"{where}{item.origin} changes nothing: {why}"


def variable(flag: str) -> str:
    """The environment variable that stands for a flag."""
    return ENVIRONMENT_PREFIX + re.sub(r"[-.]", "_", flag).upper()


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
        environ: The process's environment; of names outside `PDSERVE_` only the table's others
            are looked at.

    Returns:
        A value per flag, in the table's order.

    Raises:
        ConfigError: A value does not fit its setting (says which source gave it), a key of
            the file is unknown (names the nearest flag), or a required value is missing.
    """
    given = _expand(table, command_line, lambda flag: f"--{flag}")
    in_file: dict[str, object] = {}
    if file is not None:
        read = read_yaml(file)
        in_file = _expand(table, read.values, read.place)
    names = table.variables
    variables = {
        flag: text
        for flag, name in names.items()
        if (text := _in_environment(name, environ)) is not None
    }
    in_environ = _expand(table, variables, lambda flag: names.get(flag, flag))
    others, other_names = _other_variables(table, environ)

    resolved = {}
    for setting in table.settings:
        flag = setting.flag
        for source, values, origin in (
            (Source.COMMAND_LINE, given, f"--{flag}"),
            (Source.FILE, in_file, file.name if file else ""),
            (Source.ENVIRONMENT, in_environ, names[flag]),
            (Source.ENVIRONMENT, others, other_names.get(flag, "")),
        ):
            if flag in values:
                resolved[flag] = Resolved(values[flag], source, origin)
                break
        else:
            default = table.default(setting)
            if default is Required.REQUIRED:
                raise ConfigError(f"--{flag} is missing: give it a value", param=flag)
            resolved[flag] = Resolved(default, Source.DEFAULT, "default")
    return resolved


def _other_variables(
    table: Table, environ: Mapping[str, str]
) -> tuple[dict[str, object], dict[str, str]]:
    """Return the values that other programs' variables give, by flag, and which one gives each."""
    values: dict[str, object] = {}
    names: dict[str, str] = {}
    for name, read in table.other_variables.items():
        if name in environ:
            for flag, value in _expand(table, read(environ[name]), _always(name)).items():
                if flag not in values:
                    values[flag], names[flag] = value, name
    return values, names


def _always(text: str) -> Callable[[str], str]:
    return lambda _: text


def _in_environment(name: str, environ: Mapping[str, str]) -> str | None:
    """Return a variable's value; None if it is not set.

    Raises:
        ConfigError: It stands in a file that cannot be read.
    """
    path = environ.get(name + _FILE)
    if path is None or name in environ:
        return environ.get(name)
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"{name}{_FILE} is {path}, which cannot be read: {why}") from error


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
                raise ConfigError(
                    f"{where(name)} and {names[canonical(name)]!r} are the same setting: give "
                    "only one of them"
                )
        for flag in sorted(names, key=lambda flag: flag not in shorthands):
            value = items[names[flag]]
            try:
                if flag in shorthands:
                    take(shorthands[flag].expand(value))
                elif flag in settings:
                    values[flag] = parse(settings[flag], value)
                else:
                    raise ConfigError(
                        f"{where(names[flag])} is not a setting; {table.hint(flag)}",
                        param=flag,
                    )
            except ValueError as error:
                raise ConfigError(f"{where(flag)}: {error}", param=flag) from None

    take(raw)
    return values


def unknown_variables(
    table: Table, others: Iterable[Table], environ: Mapping[str, str]
) -> list[str]:
    """A sentence for each `PDSERVE_` variable in `environ` that no command reads.

    Args:
        table: Of the command that runs: what a name is like is looked for there first.
    """
    own = set(table.variables.values())
    known = own.union(*(other.variables.values() for other in others))
    return [
        f"{name} is not a setting{did_you_mean(name, own, least=0.85) or did_you_mean(name, known)}"
        for name in sorted(environ)
        if name.startswith(ENVIRONMENT_PREFIX) and not {name, name.removesuffix(_FILE)} & known
    ]


def did_you_mean(name: str, known: Iterable[str], *, least: float = _LIKE) -> str:
    """Return a question for the one of `known` that `name` is like; empty if there is none.

    Args:
        least: How much alike they are, from 0 to 1.
    """
    near = nearest(name, sorted(known), least=least)
    return "" if near is None else f": did you mean {near}?"


def nearest(name: str, known: Sequence[str], *, least: float = _LIKE) -> str | None:
    """Return the one of `known` that `name` is most like; None if none is `least` alike."""
    import difflib

    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=least)), None)


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
