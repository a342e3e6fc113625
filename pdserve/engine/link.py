"""An engine core's two sockets to its coordinator."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import zmq

from pdserve.engine.coordinator import Counts, Drained, FromCore, ToCores, Wish
from pdserve.engine.local_socket import connect_local

if TYPE_CHECKING:
    from pdserve.engine.coordinator import Addresses
    from pdserve.wire.request import EngineStats


class CoordinatorLink:
    """The link of the core numbered `core`. One thread.

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
