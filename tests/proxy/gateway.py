"""A gateway as the endpoint picker sees it: a gRPC stream for a request, with a test's events."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc.aio

from pdserve.proxy.epp.listener import PROCESSOR
from pdserve.proxy.epp.messages import BodyMode, MessagePart
from pdserve.proxy.epp.protobuf import bytes_field, fields_of, varint_field

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Held to the end: where the last user of a test ends it, gRPC waits for its thread, in whatever
# test frees that one, which must not block.
grpc.aio.init_grpc_aio()

IMMEDIATE, METADATA = 7, 8
DUPLEX = BodyMode.FULL_DUPLEX_STREAMED


def headers_event(
    headers: Mapping[str, str],
    *,
    part: MessagePart = MessagePart.REQUEST_HEADERS,
    is_end: bool = False,
    subset: Sequence[str] | None = None,
    mode: BodyMode | None = DUPLEX,
) -> bytes:
    """A `ProcessingRequest` with headers, as Envoy writes it."""
    entries = [
        bytes_field(1, bytes_field(1, name.encode()), bytes_field(3, value.encode()))
        for name, value in headers.items()
    ]
    event = bytes_field(part.value, bytes_field(1, *entries), varint_field(3, is_end))
    if subset is not None:
        values = [bytes_field(1, bytes_field(3, each.encode())) for each in subset]
        key = b"x-gateway-destination-endpoint-subset"
        listed = bytes_field(1, bytes_field(1, key), bytes_field(2, bytes_field(6, *values)))
        hint = bytes_field(1, b"envoy.lb.subset_hint"), bytes_field(2, listed)
        event += bytes_field(8, bytes_field(1, *hint))
    if mode is not None:
        event += bytes_field(11, varint_field(1, mode.value), varint_field(2, mode.value))
    return event


def body_event(
    body: bytes, *, part: MessagePart = MessagePart.REQUEST_BODY, is_end: bool = True
) -> bytes:
    """A `ProcessingRequest` with a piece of a body."""
    return bytes_field(part.value, bytes_field(1, body), varint_field(2, is_end))


def trailers_event(part: MessagePart = MessagePart.REQUEST_TRAILERS) -> bytes:
    """A `ProcessingRequest` with trailers."""
    return bytes_field(part.value)


@dataclass
class Answer:
    """A `ProcessingResponse`.

    Attributes:
        number: Of the field that says what it answers.
        headers: To be set.
        removed: Headers to be taken away.
        body: The chunk, or the body of an immediate answer.
        is_end: It is the last chunk.
        status: Of an immediate answer.
        metadata: Undecoded.
    """

    number: int
    headers: dict[str, str] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    body: bytes = b""
    is_end: bool = False
    status: int = 0
    metadata: bytes = b""


def answer_of(data: bytes) -> Answer:
    """Decode a `ProcessingResponse`."""
    by_number: dict[int, Any] = dict(fields_of(data))
    metadata = by_number.pop(METADATA, b"")
    [(number, content)] = by_number.items()
    answer = Answer(number, metadata=metadata)
    if number == IMMEDIATE:
        for inner, value in fields_of(content):
            if inner == 1:
                answer.status = dict(fields_of(value))[1]
            elif inner == 2:
                _mutate(answer, value)
            elif inner == 3:
                answer.body = value
        return answer
    for inner, value in fields_of(dict(fields_of(content)).get(1, b"")):
        if inner == 2:
            _mutate(answer, value)
        elif inner == 3:
            streamed: dict[int, Any] = dict(fields_of(dict(fields_of(value))[3]))
            answer.body, answer.is_end = streamed[1], bool(streamed.get(2))
    return answer


def _mutate(answer: Answer, mutation: bytes) -> None:
    for number, value in fields_of(mutation):
        if number == 1:
            header: dict[int, bytes] = dict(fields_of(dict(fields_of(value))[1]))
            answer.headers[header[1].decode()] = header[3].decode()
        else:
            answer.removed.append(value.decode())


class Gateway:
    """Asks one endpoint picker; to be closed."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        self._process = self._channel.stream_stream(f"/{PROCESSOR}/Process")
        self._check = self._channel.unary_unary("/grpc.health.v1.Health/Check")

    async def close(self) -> None:
        await self._channel.close()

    def stream(self) -> Any:
        """Begin a request."""
        return self._process()

    async def ask(self, *events: bytes, num_answers: int = 1) -> list[Answer]:
        """Send events, and nothing more until so many answers are there; then end the stream."""
        stream = self.stream()
        for event in events:
            await stream.write(event)
        answers = [answer_of(await stream.read()) for _ in range(num_answers)]
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
        return answers

    async def health(self, service: str) -> int:
        """What `Health.Check` says of a service."""
        answer = await self._check(bytes_field(1, service.encode()) if service else b"")
        return dict(fields_of(answer))[1]
