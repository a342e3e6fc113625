"""Envoy's external processing messages (envoy.service.ext_proc.v3), as far as used.

Field numbers are those of `external_processor.proto` and of the messages it imports. Unused fields
are skipped, so additions in later versions of Envoy do no harm. Knows no gRPC.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from pdserve.proxy.epp.protobuf import WireFormatError, bytes_field, fields_of, varint_field

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DESTINATION: Final = "x-gateway-destination-endpoint"
"""Names the endpoints to send a request to, the best first: a header, and a key in METADATA."""
METADATA: Final = "envoy.lb"
_SUBSET: Final = "x-gateway-destination-endpoint-subset"
_SUBSET_METADATA: Final = "envoy.lb.subset_hint"
MAX_CHUNK_BYTES: Final = 62_000
"""Bytes of a body in one message: Envoy's documentation recommends at most 64 KiB."""
_OVERWRITE: Final = 2
_MAX_NESTING: Final = 8


class MessagePart(enum.Enum):
    """The part of a request or answer an event is about; the value is its field number."""

    REQUEST_HEADERS = 2
    RESPONSE_HEADERS = 3
    REQUEST_BODY = 4
    RESPONSE_BODY = 5
    REQUEST_TRAILERS = 6
    RESPONSE_TRAILERS = 7

    @property
    def reply(self) -> int:
        """Number of the field that answers this part."""
        return self.value - 1


class BodyMode(enum.Enum):
    """How a gateway passes bodies on."""

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX_STREAMED = 4


@dataclass(frozen=True, slots=True)
class ProcessingEvent:
    """A `ProcessingRequest`.

    Attributes:
        headers: Names in lower case; empty unless the part is headers.
        body: The chunk, if the part is a body.
        is_end: Whether nothing more of the request (or answer) follows, except perhaps trailers.
        subset: Endpoints (`ip:port`) to pick from; None means all.
        request_body_mode, response_body_mode: Given only in the first event of a stream.
    """

    part: MessagePart
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    is_end: bool = False
    subset: frozenset[str] | None = None
    request_body_mode: BodyMode | None = None
    response_body_mode: BodyMode | None = None


def event_of(data: bytes) -> ProcessingEvent:
    """Return the event in a `ProcessingRequest`.

    Raises:
        WireFormatError: The bytes are not such a message.
    """
    part: MessagePart | None = None
    content, metadata, config = b"", b"", None
    for number, value in fields_of(data):
        if 2 <= number <= 7:
            part, content = MessagePart(number), _bytes(value)
        elif number == 8:
            metadata = _bytes(value)
        elif number == 11:
            config = _bytes(value)
    if part is None:
        raise WireFormatError("it is of no part of a request")
    modes = (None, None) if config is None else _modes(config)
    subset = _subset(metadata)
    if part in (MessagePart.REQUEST_BODY, MessagePart.RESPONSE_BODY):
        body, is_end = _content(content, 2)
        return ProcessingEvent(part, {}, body, is_end, subset, *modes)
    headers, is_end = _content(content, 3)
    return ProcessingEvent(part, _headers(headers), b"", is_end, subset, *modes)


def _content(data: bytes, number_of_end: int) -> tuple[bytes, bool]:
    """Return the content of `HttpHeaders`, `HttpBody` or `HttpTrailers`, and whether it ends."""
    content, is_end = b"", False
    for number, value in fields_of(data):
        if number == 1:
            content = _bytes(value)
        elif number == number_of_end:
            is_end = bool(value)
    return content, is_end


def _headers(data: bytes) -> dict[str, str]:
    """Return a `HeaderMap`'s headers; the last one wins if a name occurs several times."""
    headers: dict[str, str] = {}
    for number, value in fields_of(data):
        if number == 1:
            given = dict(fields_of(_bytes(value)))
            content = given.get(3) or given.get(2, b"")
            headers[_text(given.get(1, b""))] = _text(content)
    return headers


def _modes(data: bytes) -> tuple[BodyMode, BodyMode]:
    given = dict(fields_of(data))
    try:
        return BodyMode(given.get(1, 0)), BodyMode(given.get(2, 0))
    except ValueError as error:
        raise WireFormatError(f"an unknown way to show bodies: {error}") from error


def _subset(metadata: bytes) -> frozenset[str] | None:
    """Return the endpoints in a `Metadata` to pick from; None if it names none."""
    for number, entry in fields_of(metadata):
        if number != 1:
            continue
        named = dict(fields_of(_bytes(entry)))
        if _text(named.get(1, b"")) != _SUBSET_METADATA:
            continue
        hints = _struct(_bytes(named.get(2, b"")))
        if _SUBSET in hints:
            return frozenset(_endpoints(hints[_SUBSET]))
    return None


def _struct(data: bytes) -> dict[str, bytes]:
    """Return the `Value`s of a `google.protobuf.Struct`, by name, undecoded."""
    entries = [dict(fields_of(_bytes(each))) for number, each in fields_of(data) if number == 1]
    return {_text(each.get(1, b"")): _bytes(each.get(2, b"")) for each in entries}


def _endpoints(value: bytes, depth: int = 0) -> list[str]:
    """Return the endpoints in a `Value`: a list of texts, or a text with commas."""
    if depth > _MAX_NESTING:
        raise WireFormatError("a list is nested too deeply")
    found: list[str] = []
    for number, given in fields_of(value):
        if number == 3:
            found += [each.strip() for each in _text(given).split(",")]
        elif number == 6:
            for inner, element in fields_of(_bytes(given)):
                if inner == 1:
                    found += _endpoints(_bytes(element), depth + 1)
    return [each for each in found if each]


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise WireFormatError("a number where a message should be")
    return value


def _text(value: int | bytes) -> str:
    return _bytes(value).decode("utf-8", "replace")


# --- answers


def go_to(
    endpoints: Sequence[str], headers: Mapping[str, str], without: Sequence[str] = ()
) -> bytes:
    """Return the answer to a request's headers that names its destinations.

    Args:
        endpoints: `ip:port`, the best first.
        headers: Headers to set on the request, replacing those of the same names.
        without: Headers to remove.
    """
    destination = ",".join(endpoints)
    mutation = [
        *(_header(*each) for each in {DESTINATION: destination, **headers}.items()),
        *(bytes_field(2, name.encode()) for name in without),
    ]
    common = bytes_field(2, *mutation), varint_field(5, 1)
    inner = _entry(DESTINATION, bytes_field(3, destination.encode()))
    metadata = _entry(METADATA, bytes_field(5, inner))
    reply = bytes_field(MessagePart.REQUEST_HEADERS.reply, bytes_field(1, *common))
    return reply + bytes_field(8, metadata)


def go_on(part: MessagePart) -> bytes:
    """Return the answer that changes nothing."""
    if part in (MessagePart.REQUEST_TRAILERS, MessagePart.RESPONSE_TRAILERS):
        return bytes_field(part.reply)
    return bytes_field(part.reply, bytes_field(1))


def body_chunks(part: MessagePart, body: bytes, *, is_end: bool) -> list[bytes]:
    """Return the answers that pass on a body, or a piece of it, in a full duplex stream."""
    starts = range(0, max(len(body), 1), MAX_CHUNK_BYTES)
    return [
        _chunk(part, body[at : at + MAX_CHUNK_BYTES], is_end=is_end and at == starts[-1])
        for at in starts
    ]


def _chunk(part: MessagePart, body: bytes, *, is_end: bool) -> bytes:
    streamed = bytes_field(1, body), varint_field(2, is_end)
    mutation = bytes_field(3, *streamed)
    return bytes_field(part.reply, bytes_field(1, bytes_field(3, mutation)))


def refuse(status: int, headers: Mapping[str, str], body: bytes, details: str) -> bytes:
    """Return the answer that ends a request at the gateway.

    Args:
        details: For the gateway's access log.
    """
    return bytes_field(
        7,
        bytes_field(1, varint_field(1, status)),
        bytes_field(2, *(_header(*each) for each in headers.items())),
        bytes_field(3, body),
        bytes_field(5, details.encode()),
    )


def _header(name: str, value: str) -> bytes:
    """Return a `set_headers` entry that replaces any header of that name."""
    header = bytes_field(1, name.encode()), bytes_field(3, value.encode())
    return bytes_field(1, bytes_field(1, *header), varint_field(3, _OVERWRITE))


def _entry(name: str, value: bytes) -> bytes:
    """Return an entry of a `Struct`, whose value is a `Value`."""
    return bytes_field(1, bytes_field(1, name.encode()), bytes_field(2, value))
