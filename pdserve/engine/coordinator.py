"""The coordinator of the data-parallel engine cores of one server.

It reports the load of each core to the API server, which chooses cores by it; and only it starts
waves, so that all cores see the same waves in the same order. The server starts it as
`python -m pdserve.engine.coordinator` with a `CoordinatorLaunch` on standard input; it ends with
the server. It knows no requests and no tokens: `Coordinator` decides, `run` moves messages. A
core connects to it by a `CoordinatorLink`.

    cores --PUSH--> messages
    cores <--SUB--- orders     held back until every core listens, so that none misses one
    server <--SUB-- counts     at most one per `_COUNTS_INTERVAL_S`
"""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import TYPE_CHECKING, assert_never

import msgspec
import zmq

from pdserve.config.log import LogConfig
from pdserve.engine.local_socket import LocalKeys, bind_local, connect_local
from pdserve.lifeline import end_with_parent, ignore_stop_signals
from pdserve.observe.log import configure_logging

if TYPE_CHECKING:
    from pdserve.wire.request import EngineStats

_log = logging.getLogger(__name__)

_COUNTS_INTERVAL_S = 0.01
_SUBSCRIBED = b"\x01"


class Addresses(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses of the coordinator.

    Attributes:
        server_key: Public key of all three; a secret of the engine.
    """

    messages: str
    orders: str
    counts: str
    server_key: bytes

    @classmethod
    def beginning_with(cls, name: str, server_key: bytes) -> Addresses:
        """Return addresses that begin with `name`."""
        return cls(
            messages=f"{name}-messages",
            orders=f"{name}-orders",
            counts=f"{name}-counts",
            server_key=server_key,
        )


class CoordinatorLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """The start message of the process.

    Attributes:
        log: Settings of its log, which goes to standard error.
    """

    parent_pid: int
    log: LogConfig = LogConfig()
    num_cores: int
    addresses: Addresses
    keys: LocalKeys


class Counts(msgspec.Struct, frozen=True, tag="counts"):
    """Load of a core.

    Attributes:
        num_waiting: Requests without a place in the batch.
        num_running: Requests with one: their KV is here or on its way.
        num_taken: Requests received since the start; the server may have sent more.
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
    """A core that shuts down has no work left, and will ask for no more waves."""

    core: int


FromCore = Counts | Wish | Drained


class StartWave(msgspec.Struct, frozen=True, tag="start"):
    """Begin this wave as soon as the previous one is over."""

    wave: int


class EndCores(msgspec.Struct, frozen=True, tag="end"):
    """Every core has drained: end after the waves already started."""


ToCores = StartWave | EndCores


class Coordinator:
    """Decides, without sockets.

    Attributes:
        counts: The newest counts of each core.
    """

    def __init__(self, num_cores: int) -> None:
        self.counts = [Counts(core) for core in range(num_cores)]
        self._num_listening = 0
        self._last_wave = 0
        self._drained: set[int] = set()
        self._orders: list[ToCores] = []

    def listening(self) -> None:
        """Note that one more core listens to orders."""
        self._num_listening += 1

    def take(self, message: FromCore) -> None:
        """Take a core's message."""
        match message:
            case Counts(core):
                self.counts[core] = message
            case Wish(wave=wave):
                # Other cores may have wished for it before they heard that it began.
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
        """Return the orders for all cores, in order; none before all of them listen."""
        if self._num_listening < len(self.counts):
            return []
        orders, self._orders = self._orders, []
        return orders


class CoordinatorLink:
    """The two sockets from core number `core` to the coordinator. For one thread.

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
        """Return the coordinator's orders since the last call."""
        found: list[ToCores] = []
        while True:
            try:
                found.append(self._decoder.decode(self.socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return found

    def tell(self, stats: EngineStats, num_taken: int) -> None:
        """Report this core's load, if it has changed."""
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
        """Report that this core shuts down and has no work left."""
        self._send(Drained(self._core))

    def close(self) -> None:
        """Close the sockets."""
        self._messages.close()
        self.socket.close()

    def _send(self, message: FromCore) -> None:
        self._messages.send(self._encoder.encode(message))


def run(launch: CoordinatorLaunch) -> None:
    """Serve forever."""
    context = zmq.Context()
    messages = context.socket(zmq.PULL)
    orders, counts = context.socket(zmq.XPUB), context.socket(zmq.XPUB)
    for publisher in (orders, counts):
        publisher.set(zmq.XPUB_VERBOSE, 1)  # else only the first subscription is reported
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
            published = []  # a new subscriber needs the current counts
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
    ignore_stop_signals()  # the server ends its coordinator after the cores
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
