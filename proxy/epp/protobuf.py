"""Protocol Buffers' wire format, as far as the endpoint picker needs it.

Fields in, fields out (https://protobuf.dev/programming-guides/encoding): no schema, no groups, and
varints as the only numbers. Knows no particular message.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES: Final = {_FIXED64: 8, _FIXED32: 4}
_MAX_VARINT_BYTES: Final = 10


class WireFormatError(ValueError):
    """The bytes are not a valid message."""


def fields_of(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield a message's fields: their numbers, and an int for a varint, else bytes.

    Raises:
        WireFormatError: The data is not a valid message.
    """
    at, end = 0, len(data)
    while at < end:
        key, at = _varint(data, at)
        number, wire_type = key >> 3, key & 7
        if not number:
            raise WireFormatError("a field has the number 0")
        if wire_type == _VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        if wire_type == _LENGTH:
            num_bytes, at = _varint(data, at)
        elif wire_type in _FIXED_BYTES:
            num_bytes = _FIXED_BYTES[wire_type]
        else:
            raise WireFormatError(f"field {number} has the wire type {wire_type}")
        if num_bytes > end - at:
            raise WireFormatError(f"field {number} has {num_bytes} bytes of {end - at}")
        yield number, data[at : at + num_bytes]
        at += num_bytes


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return an integer of at most 64 bits, and where it ends."""
    value = 0
    for shift in range(_MAX_VARINT_BYTES):
        if at >= len(data):
            raise WireFormatError("it ends within a number")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            return value & (1 << 64) - 1, at
    raise WireFormatError("a number has more than ten bytes")


def varint_field(number: int, value: int) -> bytes:
    """Return a field of an unsigned integer, an enum or a bool; nothing for 0, the default."""
    return _encoded(number << 3 | _VARINT) + _encoded(value) if value else b""


def bytes_field(number: int, *parts: bytes) -> bytes:
    """Return a field of bytes, a text in UTF-8, or a message whose fields are `parts`."""
    data = b"".join(parts)
    return _encoded(number << 3 | _LENGTH) + _encoded(len(data)) + data


def _encoded(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
