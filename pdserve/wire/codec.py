"""msgpack encoders and decoders for the messages between a server and its engine core.

Adding a field: give it a default, put it last, raise `MINOR`, extend the recorded-bytes
test. A different `MAJOR` is refused when the processes meet.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from pdserve.wire.ids import RequestId
from pdserve.wire.request import EngineInfo, EngineOutput, EngineStats, GenerateRequest, Sibling
from pdserve.wire.seal import UNREADABLE
from pdserve.wire.trace import TracedProcess

MAJOR = 2
MINOR = 3

T = TypeVar("T")


class Add(msgspec.Struct, frozen=True, tag="add"):
    """Take a request, and those for further choices of its prompt."""

    request: GenerateRequest
    siblings: list[Sibling] = []


class AbortRequests(msgspec.Struct, frozen=True, tag="abort"):
    """Forget requests; unknown ids are ignored."""

    request_ids: list[RequestId]


class ReleaseLease(msgspec.Struct, frozen=True, tag="release"):
    """Nobody will read this lease; unknown nonces are ignored."""

    nonce: str


class KeepLeases(msgspec.Struct, frozen=True, tag="keep"):
    """Their reader is not known yet: they do not end for want of it; unknown nonces are ignored."""

    nonces: list[str]


class HandOver(msgspec.Struct, frozen=True, tag="hand_over"):
    """Lease requests that run out, as they stand; ids of others are ignored."""

    request_ids: list[RequestId]


class ResetPrefixCache(msgspec.Struct, frozen=True, tag="reset_prefix_cache"):
    """Forget cached prefixes (benchmarks); held blocks keep their contents."""


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Finish what runs within `timeout_s`, then end."""

    timeout_s: float


class DumpTrace(msgspec.Struct, frozen=True, tag="dump_trace"):
    """Send the last `seconds` as `TracePiece`s, under this number."""

    dump: int
    seconds: float


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Answer with a `Pong` of the same number: asked at an interval, answered by the loop."""

    number: int


ToEngine = (
    Add
    | AbortRequests
    | ReleaseLease
    | KeepLeases
    | HandOver
    | ResetPrefixCache
    | Shutdown
    | DumpTrace
    | Ping
)


class CoreReady(msgspec.Struct, frozen=True, tag="ready"):
    """The engine's weights are loaded and its KV memory is registered."""

    info: EngineInfo
    major: int = MAJOR
    minor: int = MINOR


class CoreProgress(msgspec.Struct, frozen=True, tag="progress"):
    """Where a start-up stands, for people to read."""

    text: str


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    """One step's outputs and a snapshot of the engine."""

    outputs: list[EngineOutput]
    stats: EngineStats


class Died(msgspec.Struct, frozen=True, tag="died"):
    """The engine has ended; `reason` is for the log and the error message.

    `is_config` tells a setting or file that cannot be used from a failure.
    """

    reason: str
    is_config: bool = False


class TracePiece(msgspec.Struct, frozen=True, tag="trace_piece"):
    """Part of a dump, between the outputs of steps, so that it holds up none of them.

    Attributes:
        events: Some of its events, as JSON without the brackets around all of them.
        process: With the last piece: whose events they are.
    """

    dump: int
    events: bytes
    process: TracedProcess | None = None


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """The core's loop goes on."""

    number: int


FromEngine = CoreReady | CoreProgress | Outputs | Died | TracePiece | Pong


class _Named(msgspec.Struct):
    request_id: RequestId


class _Envelope(msgspec.Struct):
    request: _Named


_envelope = msgspec.msgpack.Decoder(_Envelope)


class Codec(Generic[T]):
    """Encodes and decodes one union of messages. One instance per thread."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[T]) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = decoder

    def encode(self, value: T) -> bytes:
        """Return `value` as msgpack."""
        return self._encoder.encode(value)

    def decode(self, data: bytes | memoryview) -> T:
        """Return the message in `data`.

        Raises:
            UNREADABLE: The bytes are not such a message.
        """
        return self._decoder.decode(data)


def to_engine() -> Codec[ToEngine]:
    """Codec of the messages from a server to its engine core."""
    return Codec(msgspec.msgpack.Decoder(ToEngine))


def from_engine() -> Codec[FromEngine]:
    """Codec of the messages from an engine core to its server."""
    return Codec(msgspec.msgpack.Decoder(FromEngine))


def id_in_unreadable(data: bytes | memoryview) -> RequestId | None:
    """The id of the request in an `Add` that does not decode, if that much can be read."""
    try:
        return _envelope.decode(data).request.request_id
    except UNREADABLE:
        return None
