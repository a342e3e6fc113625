"""A setting: a flag tied to one field of a frozen struct, and how text becomes its value.

Its type and its default are the field's own. Knows no particular setting (`settings` lists them),
and not where a value comes from (`load` does).
"""

from __future__ import annotations

import enum
import json
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec


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
            tuple[int, ...], an enum, or one of them or None; object, if any value will do.
        default: The field's default, or `Required.REQUIRED`.
        metavar: What stands for the value in the help.
        group: Heading in the help.
        hidden: Left out of the help.
        note: Said at the start if somebody gives the flag: why it changes nothing.
        read: Turns another program's words for a value into ours, before it is parsed. Raises
            ValueError.
    """

    flag: str
    path: str
    annotation: Any
    default: object
    help: str = ""
    metavar: str = ""
    group: str = ""
    hidden: bool = False
    note: str = ""
    read: Callable[[object], object] | None = None

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
        is_switch: It is on or off, and has no value behind it.
    """

    flag: str
    expand: Callable[[object], Mapping[str, object]]
    help: str = ""
    metavar: str = ""
    group: str = ""
    hidden: bool = False
    is_switch: bool = False


@dataclass(frozen=True, slots=True)
class IdleRow:
    """Settings that change nothing beside certain values of others.

    Attributes:
        flags: Of these settings.
        beside: Flags of the others.
        is_idle: Whether it is so, given their values.
        why: Said at the start if somebody gives such a setting.
    """

    flags: tuple[str, ...]
    beside: tuple[str, ...]
    is_idle: Callable[..., object]
    why: str


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
        raise ValueError(f"{text!r} is not a whole number such as 512, 2k, 4M or 1GiB")
    digits, suffix = match.groups()
    whole, _, decimals = digits.partition(".")
    scale: int = 10 ** len(decimals)
    multiplier = _MULTIPLIER[suffix] if suffix else 1
    value, rest = divmod(int(whole + decimals) * multiplier, scale)
    if rest:
        raise ValueError(f"{text!r} is not a whole number")
    return _sendable(value)


def _sendable(value: int) -> int:
    """Refuse a whole number that no message between processes can carry.

    Raises:
        ValueError: It is one.
    """
    if not -(1 << 63) <= value < 1 << 64:
        raise ValueError(f"{value} has more than 64 bits")
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
    if setting.read is not None:
        raw = setting.read(raw)
    if setting.optional and raw in (None, "auto", "none"):
        return None
    kind = setting.kind
    if kind is bool:
        return parse_bool(raw)
    if kind is int:
        if isinstance(raw, str):
            return parse_int(raw)
        if isinstance(raw, int) and not isinstance(raw, bool):
            return _sendable(raw)
        raise ValueError(f"{raw!r} is not a whole number")
    if kind is float:
        if isinstance(raw, (str, int, float)) and not isinstance(raw, bool):
            try:
                return float(raw)
            except (ValueError, OverflowError):
                pass
        raise ValueError(f"{raw!r} is not a number")
    if kind is tuple:
        items = _parse_list(raw)
        if int in typing.get_args(setting.annotation):
            parts = [p for i in items for p in (_parse_list(i) if isinstance(i, str) else [i])]
            return tuple(parse_int(str(part)) for part in parts)
        is_json = len(items) == 1 and isinstance(items[0], str) and items[0].startswith("[")
        return tuple(_text_of(item) for item in (_parse_list(items[0]) if is_json else items))
    if isinstance(raw, kind):
        return raw
    if not isinstance(raw, str):
        raise ValueError(f"{raw!r} is not a string: put it in quotes")
    if issubclass(kind, enum.Enum):
        try:
            return kind(raw)
        except ValueError:
            known = " or ".join(member.value for member in kind)
            raise ValueError(f"{raw!r} is not known: use {known}") from None
    return raw


def parse_bool(raw: object) -> bool:
    """Read a switch.

    Raises:
        ValueError: It is neither on nor off.
    """
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
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{raw!r} is not JSON: {error}") from None
    if isinstance(raw, str):
        return [part.strip() for part in raw.split(",") if part.strip()]
    if isinstance(raw, (list, tuple)):
        return list(raw)
    raise ValueError(f"{raw!r} is not a list")


def _text_of(item: object) -> str:
    if isinstance(item, str):
        return item
    raise ValueError(f"{item!r} is not a string: put it in quotes")


def parse_object(raw: object) -> Mapping[str, object]:
    """Read a JSON object, or take a YAML mapping as it is.

    Raises:
        ValueError: It is neither.
    """
    if isinstance(raw, str):
        try:
            raw = json.loads(raw, object_pairs_hook=_no_key_twice, parse_constant=_refuse_constant)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{raw!r} is not JSON: {error}") from None
    if not isinstance(raw, Mapping):
        raise ValueError(f'{raw!r} is not an object such as {{"name": value}}')
    return _no_key_twice([(str(key), value) for key, value in raw.items()])


def _refuse_constant(word: str) -> object:
    """Refuse NaN and the infinities, which Python reads and no other reader of JSON does."""
    raise ValueError(f"{word} is not JSON")


def _no_key_twice(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    names = [canonical(name) for name, _ in pairs]
    for (name, _), spelled in zip(pairs, names, strict=True):
        if names.count(spelled) > 1:
            raise ValueError(f"the key {name!r} is given twice")
    return dict(pairs)
