"""The messages between a server and its engine core, which travel as msgpack.

To add a field, give it a default, put it last, raise `MINOR` and extend the recorded-bytes
test. A peer with a different `MAJOR` is refused when the processes connect.
"""

from __future__ import annotations

import contextlib

import msgspec

from pdserve.wire.ids import RequestId
from pdserve.wire.request import EngineInfo, EngineOutput, EngineStats, GenerateRequest, Sibling
from pdserve.wire.seal import UNREADABLE
from pdserve.wire.trace import TracedProcess

MAJOR = 2
MINOR = 3


class Add(msgspec.Struct, frozen=True, tag="add"):
    """Take a request, and the requests for further choices of its prompt."""

    request: GenerateRequest
    siblings: list[Sibling] = []


class AbortRequests(msgspec.Struct, frozen=True, tag="abort"):
    """Forget requests; unknown ids are ignored."""

    request_ids: list[RequestId]


class ReleaseLease(msgspec.Struct, frozen=True, tag="release"):
    """Release a lease that will not be read; unknown nonces are ignored."""

    nonce: str


class KeepLeases(msgspec.Struct, frozen=True, tag="keep"):
    """Keep leases alive while their reader is not known yet; unknown nonces are ignored."""

    nonces: list[str]


class HandOver(msgspec.Struct, frozen=True, tag="hand_over"):
    """Lease out running requests in their current state; ids of others are ignored."""

    request_ids: list[RequestId]


class ResetPrefixCache(msgspec.Struct, frozen=True, tag="reset_prefix_cache"):
    """Forget cached prefixes (benchmarks); held blocks keep their contents."""


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Finish running requests within `timeout_s`, then exit."""

    timeout_s: float


class DumpTrace(msgspec.Struct, frozen=True, tag="dump_trace"):
    """Send the trace of the last `seconds` as `TracePiece`s with this number."""

    dump: int
    seconds: float


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Answer with a `Pong` of the same number: sent at an interval, answered by the loop."""

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
    """Progress of a start-up, in human-readable form."""

    text: str


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    """One step's outputs and a snapshot of the engine."""

    outputs: list[EngineOutput]
    stats: EngineStats


class Died(msgspec.Struct, frozen=True, tag="died"):
    """The engine has ended; `reason` is for the log and the error message.

    `is_config` distinguishes an unusable setting or file from a failure.
    """

    reason: str
    is_config: bool = False


class TracePiece(msgspec.Struct, frozen=True, tag="trace_piece"):
    """Part of a dump, sent between the outputs of steps so that it delays none of them.

    Attributes:
        events: Some of the dump's events, as a JSON array without its brackets.
        process: The process that recorded the events; only in the last piece.
    """

    dump: int
    events: bytes
    process: TracedProcess | None = None


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """The core's loop is running."""

    number: int


FromEngine = CoreReady | CoreProgress | Outputs | Died | TracePiece | Pong


class _Named(msgspec.Struct):
    request_id: RequestId


class _NamedSibling(msgspec.Struct, array_like=True):
    request_id: RequestId


class _First(msgspec.Struct):
    request: _Named


class _Envelope(_First):
    siblings: list[_NamedSibling] = []


_first, _envelope = msgspec.msgpack.Decoder(_First), msgspec.msgpack.Decoder(_Envelope)


def ids_in_unreadable(data: bytes | memoryview) -> list[RequestId]:
    """Return the ids of the requests in an `Add` that does not decode, as far as they can be read.

    Whoever sent it waits for the end of each.
    """
    with contextlib.suppress(*UNREADABLE):
        envelope = _envelope.decode(data)
        return [envelope.request.request_id, *(each.request_id for each in envelope.siblings)]
    with contextlib.suppress(*UNREADABLE):
        return [_first.decode(data).request.request_id]
    return []
