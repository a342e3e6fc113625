"""Messages between the benchmark's process and its client processes: frames of msgpack.

A frame is its length in four bytes, big endian, and one struct. Knows no process.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from pdserve.bench.bodies import Asking
from pdserve.bench.client import Sending
from pdserve.bench.priority import Priority
from pdserve.bench.records import Outcome, Planned

_LENGTH: Final = struct.Struct(">I")


class ClientJob(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One process's share of a run; its first message."""

    asking: Asking
    sending: Sending
    plan: list[Planned]
    warmups: list[Planned]


class BeginJob(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The start of the run (`time.monotonic`, which all processes of a machine share)."""

    start_s: float


class JobReady(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The client has warmed up.

    Attributes:
        warmup_errors: Errors of the warm-up.
    """

    warmup_errors: list[str]


class JobNews(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Requests that have ended since the last news."""

    outcomes: list[Outcome]
    num_in_flight: int


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The end of a client's job.

    Attributes:
        loop_lags_s: Delays of this process's own timer.
        cpu_share: CPU time over the run, as a share of one core.
        priority: How this process was scheduled.
    """

    loop_lags_s: list[float]
    cpu_share: float
    priority: Priority


class Broken(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The client cannot do its job; a `ConfigError` in words."""

    message: str
    param: str | None


Orders = ClientJob | BeginJob
Says = JobReady | JobNews | Ended | Broken

_encoder: Final = msgspec.msgpack.Encoder()
decode_orders: Final = msgspec.msgpack.Decoder(Orders).decode
decode_says: Final = msgspec.msgpack.Decoder(Says).decode

LENGTH_BYTES: Final = _LENGTH.size


def frame(message: Orders | Says) -> bytes:
    """Return a message with its length before it."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def length(head: bytes) -> int:
    """Return the length that stands before a frame, in bytes."""
    return int(_LENGTH.unpack(head)[0])
