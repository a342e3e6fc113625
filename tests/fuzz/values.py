"""Values of the right type and of any size, for structs as they travel."""

from __future__ import annotations

import enum
import functools
import types
import typing
from typing import Any

import msgspec
from hypothesis import strategies as st

INTS = (-(1 << 63), -1, 0, 1, 2, 7, 8, 255, 1 << 16, 1 << 31, 1 << 53, (1 << 63) - 1, (1 << 64) - 1)
FLOATS = (
    float("nan"),
    float("inf"),
    float("-inf"),
    -1.0,
    -0.0,
    1e-308,
    1e-9,
    0.5,
    1.0,
    30.0,
    1e9,
    1e308,
)
TEXTS = ("", "p", "d", "é", "\x00", "\u202e", "𝕏" * 9, "x" * 5000, "127.0.0.1", "0" * 64)
BYTES = (b"", b"\x00", b"\xff" * 7, b"x" * 5000)
_LONG = 300


@functools.cache
def of(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of a type that a struct may have as a field."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin is typing.Annotated:
        return of(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return st.one_of([of(each) for each in arguments])
    if isinstance(kind, typing.NewType):
        return of(kind.__supertype__)
    if origin is dict:
        return st.dictionaries(of(arguments[0]), of(arguments[1]), max_size=4)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return st.tuples(*[of(each) for each in arguments])
    if origin in (list, tuple):
        short = st.lists(of(arguments[0]), max_size=4)
        long = of(arguments[0]).map(lambda value: [value] * _LONG)
        return (short | long).map(origin)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return st.sampled_from(list(kind))
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        fields = {name: of(each) for name, each in fields_of(kind).items()}
        # One that refuses some values could not be made of them: they come as they travel.
        if hasattr(kind, "__post_init__"):
            return st.fixed_dictionaries({}, optional=fields)
        return st.builds(kind, **fields)
    simple: dict[Any, st.SearchStrategy[Any]] = {
        int: st.sampled_from(INTS) | st.integers(-(1 << 63), (1 << 64) - 1),
        float: st.sampled_from(FLOATS) | st.floats(),
        str: st.sampled_from(TEXTS) | st.text(max_size=9),
        bytes: st.sampled_from(BYTES) | st.binary(max_size=9),
        bool: st.booleans(),
        type(None): st.none(),
        Any: st.none(),
    }
    return simple[kind]


@functools.cache
def fields_of(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Types of a struct's fields, by name."""
    return {field.name: field.type for field in msgspec.structs.fields(kind)}


@functools.cache
def _some_names(kind: type[msgspec.Struct], keep: frozenset[str]) -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from(sorted(fields_of(kind).keys() - keep)), max_size=3, unique=True)


@st.composite
def like(draw: st.DrawFn, value: Any, *, keep: frozenset[str] = frozenset()) -> Any:
    """A struct with up to three of its fields replaced, or fields of its structs in their turn.

    Args:
        keep: Names of fields that stay as they are.
    """
    kinds = fields_of(type(value))
    names = draw(_some_names(type(value), keep))
    changed = {}
    for name in names:
        inner = getattr(value, name)
        is_deep = isinstance(inner, msgspec.Struct) and draw(st.booleans())
        changed[name] = draw(like(inner) if is_deep else of(kinds[name]))
    return msgspec.structs.replace(value, **changed)


@st.composite
def bent(draw: st.DrawFn, data: bytes) -> bytes:
    """The bytes with a few of them changed, cut off or doubled."""
    edited = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        # What is drawn must not depend on the bytes, which may be of a state that goes on.
        at = draw(st.integers(0, 1 << 16)) % max(1, len(edited))
        match draw(st.integers(0, 2)):
            case 0:
                edited[at : at + 1] = draw(st.binary(max_size=3))
            case 1:
                del edited[at:]
            case _:
                edited[at:at] = edited[at : at + 8]
    return bytes(edited)
