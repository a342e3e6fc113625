"""The sockets on which one engine core tells of its KV, and the reader behind them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
import zmq

from pdserve.wire.event_reader import EventReader
from pdserve.wire.events import Answer, Batch, curve_secret
from pdserve.wire.seal import UNREADABLE

if TYPE_CHECKING:
    from pdserve.wire.event_reader import GrainIndex
    from pdserve.wire.events import EventEndpoint

_MAX_AT_ONCE: Final = 256
"""Messages that are read in a row; others have a turn between."""


class CoreSubscription:
    """Keeps an index in step with one engine core.

    Args:
        secret: The deployment's.
        now_s: Monotonic seconds, here and wherever they are asked for.

    Attributes:
        reader: Knows whether the index is in step.
        num_unreadable: Messages that were none.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: EventEndpoint,
        secret: str,
        index: GrainIndex,
        *,
        now_s: float,
    ) -> None:
        self.reader = EventReader(index, now_s=now_s)
        self.num_unreadable = 0
        self._batches = msgspec.msgpack.Decoder(Batch)
        self._answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
        self._sub, self._asks = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        self._sub.subscribe(b"")
        for each, port in ((self._sub, endpoint.port), (self._asks, endpoint.snapshot_port)):
            each.linger = 0
            each.curve_serverkey = zmq.curve_public(curve_secret(secret))
            each.curve_publickey, each.curve_secretkey = zmq.curve_keypair()
            each.ipv6 = ":" in endpoint.host
            host = f"[{endpoint.host}]" if each.ipv6 else endpoint.host
            try:
                each.connect(f"tcp://{host}:{port}")
            except zmq.ZMQError:
                self.close()
                raise

    @property
    def file_descriptors(self) -> tuple[int, int]:
        """Readable when there may be something to `pump`; say so once only (see ZMQ_FD)."""
        return self._sub.FD, self._asks.FD

    def wait(self, timeout_ms: int) -> None:
        """Wait until something of the stream has come."""
        self._sub.poll(timeout_ms)

    def pump(self, now_s: float) -> bool:
        """Ask for what is missing, and take what has come; whether there is more of it."""
        ask = self.reader.due(now_s)
        if ask is not None:
            try:
                self._asks.send(msgspec.msgpack.encode(ask), zmq.NOBLOCK)
            except zmq.Again:
                return False  # it is not connected yet; the reader asks again
        for _ in range(_MAX_AT_ONCE):
            try:
                if (said := _receive(self._sub)) is not None:
                    self.reader.heard(self._batches.decode(said), now_s)
                elif (said := _receive(self._asks)) is not None:
                    self.reader.answered(self._answers.decode(said), now_s)
                else:
                    return False
            except UNREADABLE:
                self.num_unreadable += 1
        return True

    def close(self) -> None:
        """Leave."""
        self._sub.close()
        self._asks.close()


def _receive(socket: zmq.Socket[bytes]) -> bytes | None:
    try:
        return socket.recv(zmq.NOBLOCK)
    except zmq.Again:
        return None
