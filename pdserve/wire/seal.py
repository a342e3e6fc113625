"""Keys derived from the deployment's secret, and values that travel under a MAC.

Each purpose has its own key, so that a value sealed for one is worthless for another. The MAC
covers the bytes that travel, never a value decoded and encoded again, so a peer whose struct has
one more field is still trusted. Knows neither a transport nor the meaning of a value.

A sealed value is text, the base64 (RFC 4648, section 4) of

    protocol (1 byte) | HMAC-SHA256 (32 bytes, RFC 2104) of protocol and payload | payload (msgpack)
"""

from __future__ import annotations

import base64
import enum
import hashlib
import hmac
from typing import Final, Generic, TypeVar

import msgspec

from pdserve.errors import BadRequestError, HandoffRefusedError

PROTOCOL: Final = 2
"""Version of the protocol between engines and proxies. Raise it for a change that a peer cannot
read, but not for a new field with a default. Engines of different versions exchange no KV."""

_MAC_BYTES: Final = hashlib.sha256().digest_size
_HEADER_BYTES: Final = 1 + _MAC_BYTES
_FIRST_OF_A_MAP: Final = 0x80
"""Protocol 1 sent the bare msgpack map, with its signature inside."""

UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec raises on foreign bytes. The last two: invalid UTF-8, endless nesting."""

T = TypeVar("T")


class Purpose(enum.Enum):
    """The purpose of a key."""

    HANDOFF = "handoff"
    TICKET = "ticket"
    SIDE_CHANNEL = "side channel"
    CONTROL = "control"
    EVENTS = "KV events"
    PREFILL_ORDER = "prefill order"


def key_for(secret: str | bytes, purpose: Purpose) -> bytes:
    """Return the 32-byte key derived from the deployment's secret for one purpose.

    HKDF-Expand (RFC 5869) of one block. A deployment without a secret has keys, too, which
    anyone can derive.
    """
    key = secret.encode() if isinstance(secret, str) else secret
    return hmac.digest(key, b"pdserve " + purpose.value.encode() + b"\x01", "sha256")


class Seal(Generic[T]):
    """Seals and opens values of one type for one purpose.

    Args:
        what: The value's name in errors.
    """

    def __init__(self, type_: type[T], purpose: Purpose, *, what: str) -> None:
        self._purpose = purpose
        self._what = what
        self._decoder = msgspec.msgpack.Decoder(type_)

    def seal(self, value: T, secret: str | bytes) -> str:
        """Return `value` as text that `open` accepts if given the same secret."""
        signed = bytes([PROTOCOL]) + msgspec.msgpack.encode(value)
        mac = self._mac(signed, secret)
        return base64.b64encode(signed[:1] + mac + signed[1:]).decode("ascii")

    def open(self, text: str, secret: str | bytes) -> T:
        """Return the value in `text`.

        Raises:
            BadRequestError: The text is not a sealed value.
            HandoffRefusedError: The value is of another protocol, was sealed with another
                secret, or was edited.
        """
        data = self._bytes(text)
        if data[0] != PROTOCOL:
            theirs = 1 if data[0] >= _FIRST_OF_A_MAP else data[0]
            raise HandoffRefusedError(
                f"the {self._what} uses protocol {theirs} and this engine uses protocol "
                f"{PROTOCOL}: run versions of pdserve with the same protocol on all engines and "
                "proxies that share requests"
            )
        mac = data[1:_HEADER_BYTES]
        if not hmac.compare_digest(mac, self._mac(data[:1] + data[_HEADER_BYTES:], secret)):
            raise HandoffRefusedError(
                f"the {self._what}'s signature does not match: give every engine and proxy the "
                "same secret as PDSERVE_SECRET"
            )
        return self._decode(data[_HEADER_BYTES:])

    def peek(self, text: str) -> T:
        """Return the value in `text`, unverified and of any protocol, for its carriers.

        Raises:
            BadRequestError: The text is not such a value.
        """
        data = self._bytes(text)
        return self._decode(data if data[0] >= _FIRST_OF_A_MAP else data[_HEADER_BYTES:])

    def _bytes(self, text: str) -> bytes:
        try:
            data = base64.b64decode(text, validate=True)
        except ValueError as error:
            raise BadRequestError(f"the {self._what} is not valid base64: {error}") from error
        if len(data) <= _HEADER_BYTES:
            raise BadRequestError(
                f"the {self._what} has {len(data)} bytes, but needs at least {_HEADER_BYTES + 1}"
            )
        return data

    def _decode(self, payload: bytes) -> T:
        try:
            return self._decoder.decode(payload)
        except UNREADABLE as error:
            raise BadRequestError(f"the {self._what} cannot be read: {error}") from error

    def _mac(self, signed: bytes, secret: str | bytes) -> bytes:
        return hmac.digest(key_for(secret, self._purpose), signed, "sha256")
