"""The coordinator of the data-parallel engine cores of one server.

It learns how busy each core is and tells the API server, which chooses by it; and it is the
one that starts waves, so that all cores see the same ones in the same order. Started by the
server as `python -m pdserve.engine.coordinator` with a `CoordinatorLaunch` on standard input;
ends with it. It knows no requests and no tokens: `Coordinator` decides, `run` moves messages. A
core's end is its `CoordinatorLink`.

    cores --PUSH--> messages
    cores <--SUB--- orders     held back until every core listens, so that none misses one
    server <--SUB-- counts     at most one per `_COUNTS_INTERVAL_S`
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, assert_never

import msgspec
import zmq

from pdserve.config.log import LogConfig
from pdserve.engine.local_socket import LocalKeys, bind_local, connect_local
from pdserve.lifeline import end_with_parent
from pdserve.observe.log import configure_logging

if TYPE_CHECKING:
    from pdserve.wire.request import EngineStats

_log = logging.getLogger(__name__)

_COUNTS_INTERVAL_S = 0.01
_SUBSCRIBED = b"\x01"


class Addresses(msgspec.Struct, frozen=True, kw_only=True):
    """Where the coordinator listens.

    Attributes:
        server_key: Of all three; a secret of the engine.
    """

    messages: str
    orders: str
    counts: str
    server_key: bytes

    @classmethod
    def beginning_with(cls, name: str, server_key: bytes) -> Addresses:
        """Addresses that begin with `name`."""
        return cls(
            messages=f"{name}-messages",
            orders=f"{name}-orders",
            counts=f"{name}-counts",
            server_key=server_key,
        )


class CoordinatorLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """The start message of the process.

    Attributes:
        log: How it logs, to standard error.
    """

    parent_pid: int
    log: LogConfig = LogConfig()
    num_cores: int
    addresses: Addresses
    keys: LocalKeys


class Counts(msgspec.Struct, frozen=True, tag="counts"):
    """How busy a core is.

    Attributes:
        num_waiting: Requests without a place.
        num_running: Requests with one: their KV is here or on its way.
        num_taken: Requests it was ever given; what a server sent beyond is not counted yet.
    """

    core: int
    num_waiting: int = 0
    num_running: int = 0
    num_taken: int = 0


class Wish(msgspec.Struct, frozen=True, tag="wish"):
    """A core has work and needs this wave."""

    core: int
    wave: int


class Drained(msgspec.Struct, frozen=True, tag="drained"):
    """A core that shuts down has no work left, and will ask for no wave any more."""

    core: int


FromCore = Counts | Wish | Drained


class StartWave(msgspec.Struct, frozen=True, tag="start"):
    """Begin this wave as soon as the one before is over."""

    wave: int


class EndCores(msgspec.Struct, frozen=True, tag="end"):
    """Every core has drained: end after the waves that were started."""


ToCores = StartWave | EndCores


class Coordinator:
    """Decides, without sockets.

    Attributes:
        counts: The newest of each core.
    """

    def __init__(self, num_cores: int) -> None:
        self.counts = [Counts(core) for core in range(num_cores)]
        self._num_listening = 0
        self._last_wave = 0
        self._drained: set[int] = set()
        self._orders: list[ToCores] = []

    def listening(self) -> None:
        """Note that one more core hears orders."""
        self._num_listening += 1

    def take(self, message: FromCore) -> None:
        """Take what a core says."""
        match message:
            case Counts(core):
                self.counts[core] = message
            case Wish(wave=wave):
                # The others that wish for it may have said so before they heard that it began.
                if wave > self._last_wave:
                    self._last_wave = wave
                    self._orders.append(StartWave(wave))
            case Drained(core):
                self._drained.add(core)
                if len(self._drained) == len(self.counts):
                    self._orders.append(EndCores())
            case _:
                assert_never(message)

    def drain_orders(self) -> list[ToCores]:
        """Return what to tell all cores now, in order; nothing before all of them listen."""
        if self._num_listening < len(self.counts):
            return []
        orders, self._orders = self._orders, []
        return orders


class CoordinatorLink:
    """The two sockets to the coordinator of the core numbered `core`. One thread.

    Attributes:
        socket: Readable when `orders` has some.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], addresses: Addresses, core: int
    ) -> None:
        self._core = core
        self._last_counts = Counts(core)
        self._messages = context.socket(zmq.PUSH)
        self.socket = context.socket(zmq.SUB)
        for socket, address in (
            (self._messages, addresses.messages),
            (self.socket, addresses.orders),
        ):
            socket.set_hwm(0)
            socket.linger = 0
            connect_local(socket, address, addresses.server_key)
        self.socket.subscribe(b"")
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToCores] = msgspec.msgpack.Decoder(ToCores)

    def orders(self) -> list[ToCores]:
        """Return what the coordinator has ordered since the last call."""
        found: list[ToCores] = []
        while True:
            try:
                found.append(self._decoder.decode(self.socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return found

    def tell(self, stats: EngineStats, num_taken: int) -> None:
        """Say how busy this core is, if that has changed."""
        counts = Counts(
            self._core,
            num_waiting=stats.num_waiting,
            num_running=stats.num_running + stats.num_receiving,
            num_taken=num_taken,
        )
        if counts != self._last_counts:
            self._last_counts = counts
            self._send(counts)

    def wish(self, wave: int) -> None:
        """Ask for a wave."""
        self._send(Wish(self._core, wave))

    def drained(self) -> None:
        """Say that this core shuts down and has no work left."""
        self._send(Drained(self._core))

    def close(self) -> None:
        """Let go of the sockets."""
        self._messages.close()
        self.socket.close()

    def _send(self, message: FromCore) -> None:
        self._messages.send(self._encoder.encode(message))


def run(launch: CoordinatorLaunch) -> None:
    """Serve for ever."""
    context = zmq.Context()
    messages = context.socket(zmq.PULL)
    orders, counts = context.socket(zmq.XPUB), context.socket(zmq.XPUB)
    for publisher in (orders, counts):
        publisher.set(zmq.XPUB_VERBOSE, 1)  # else only the first subscriber is told of
    places = launch.addresses
    for socket, address in (
        (messages, places.messages),
        (orders, places.orders),
        (counts, places.counts),
    ):
        socket.set_hwm(0)
        bind_local(socket, address, launch.keys)
    poller = zmq.Poller()
    for socket in (messages, orders, counts):
        poller.register(socket, zmq.POLLIN)
    coordinator = Coordinator(launch.num_cores)
    decoder = msgspec.msgpack.Decoder(FromCore)
    encode = msgspec.msgpack.Encoder().encode
    published: list[Counts] = []
    next_counts_s = 0.0
    while True:
        due_in_s = None
        if coordinator.counts != published:
            due_in_s = max(0.0, next_counts_s - time.monotonic())
        poller.poll(None if due_in_s is None else 1 + int(due_in_s * 1000))
        for frame in _frames(messages):
            coordinator.take(decoder.decode(frame))
        for frame in _frames(orders):
            if frame[:1] == _SUBSCRIBED:
                coordinator.listening()
        for order in coordinator.drain_orders():
            orders.send(encode(order))
        if any(frame[:1] == _SUBSCRIBED for frame in _frames(counts)):
            published = []  # a subscriber begins with what there is
        now_s = time.monotonic()
        if coordinator.counts != published and now_s >= next_counts_s:
            published = list(coordinator.counts)
            counts.send(encode(published))
            next_counts_s = now_s + _COUNTS_INTERVAL_S


def _frames(socket: zmq.Socket[bytes]) -> list[bytes]:
    """Return all messages that have arrived."""
    frames: list[bytes] = []
    while True:
        try:
            frames.append(socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            return frames


def main() -> None:
    """Entry point of the coordinator's process."""
    # Signals reach the whole process group; the server ends its coordinator after the cores.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    launch = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=CoordinatorLaunch)
    end_with_parent(launch.parent_pid)
    configure_logging(sys.stderr, launch.log)
    try:
        run(launch)
    except Exception:  # noqa: BLE001 - the top of a process
        _log.exception("the coordinator has failed")
    sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    main()
