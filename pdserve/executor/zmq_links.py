"""Links over TCP, for ranks that may be on other machines.

One socket at the core, one connection per rank. Connections are encrypted and authenticated
(CurveZMQ, rfc.zeromq.org/spec/26): the core's public key never travels over them, so only a
holder of a `ZmqEnds` can finish the handshake, and its token identifies the rank. Messages of
others never arrive.

A connection that ends is not made again, because a step or an answer may have been lost with
it: the rank counts as lost at the core, and the rank ends. That takes a millisecond when a
process dies, and `_SILENCE_MS` when it is stopped, or a machine or the network dies.
"""

from __future__ import annotations

import secrets
import struct
from typing import TYPE_CHECKING

import msgspec
import zmq

from pdserve.errors import ConfigError
from pdserve.executor.channel import ChannelClosedError, Waiter, WakeEvent

if TYPE_CHECKING:
    from collections.abc import Callable

_HEARTBEAT_MS = 1_000
_SILENCE_MS = 5_000
_CONNECT_TIMEOUT_S = 30.0
_LINGER_MS = 1_000
_LOST = "lost its connection"
_BROKEN = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class ZmqEnds(msgspec.Struct, frozen=True, kw_only=True, tag="zmq"):
    """Data with which a rank opens its `ZmqLink`. A secret: its holder counts as the rank.

    Attributes:
        server_key: The core's public key.
    """

    address: str
    server_key: bytes
    token: bytes


class ZmqHub:
    """See `Hub`.

    Args:
        host: An address of this machine that every rank can reach.

    Raises:
        ConfigError: `host` is not an address of this machine, or this ZMQ has no encryption.
    """

    def __init__(self, num_ranks: int, *, host: str) -> None:
        if not zmq.has("curve"):
            raise ConfigError(
                "ranks on other machines need a ZMQ with CURVE encryption: install pyzmq from "
                "its wheels",
                param="distributed-executor-backend",
            )
        self._tokens = [b"rank-" + secrets.token_hex(16).encode() for _ in range(num_ranks)]
        self._rank_of = {token: rank for rank, token in enumerate(self._tokens)}
        # File descriptors of live connections, and the ranks behind them, so that the end of a
        # connection identifies its rank; numbers are reused.
        self._live_fds: set[int] = set()
        self._rank_of_fd: dict[int, int] = {}
        self._seen: set[int] = set()
        self._lost: dict[int, str] = {}
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.router_mandatory = True
        self._server_key, secret_key = zmq.curve_keypair()
        self._socket.curve_server = True
        self._socket.curve_publickey, self._socket.curve_secretkey = self._server_key, secret_key
        _tune(self._socket)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._wake_event = WakeEvent()
        try:
            port = self._socket.bind_to_random_port(f"tcp://{host}")
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"ranks cannot reach this engine at {host!r}: {error}", param="host"
            ) from None
        self._address = f"tcp://{host}:{port}"

    def ends(self, rank: int) -> ZmqEnds:
        """Return the data with which `rank` opens its link."""
        return ZmqEnds(address=self._address, server_key=self._server_key, token=self._tokens[rank])

    def wake_on(self, waiter: Waiter) -> None:
        """See `Hub`."""
        waiter.hear(self._wake_event.fd)
        waiter.hear(self._socket.FD)
        waiter.watch(self._monitor.FD)

    def broadcast(self, frame: bytes, *, on_full: Callable[[], None]) -> None:
        """See `Hub`: there is always room. A rank that is lost gets nothing."""
        for token in self._tokens:
            try:
                self._socket.send_multipart([token, frame])
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
        # Sending may have consumed the signal of an answer (zmq_getsockopt(3), ZMQ_FD).
        if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._wake_event.set()

    def receive(self) -> tuple[int, bytes] | None:
        """See `Hub`."""
        while True:
            try:
                token, frame = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return None
            rank = self._rank_of.get(token.bytes)
            if rank is None:
                continue
            if rank not in self._seen:
                self._seen.add(rank)
                self._meet(rank, frame.get(zmq.SRCFD))
            return rank, frame.bytes

    def lost(self) -> dict[int, str]:
        """See `Hub`."""
        while (event := _next_event(self._monitor)) is not None:
            kind, fd = event
            if kind == zmq.EVENT_ACCEPTED:
                self._live_fds.add(fd)
                continue
            self._live_fds.discard(fd)
            rank = self._rank_of_fd.pop(fd, None)
            if rank is not None:
                self._lost[rank] = _LOST
        return self._lost

    def has_heard_out(self, rank: int) -> bool:
        """See `Hub`: a connection is read to its end before that end is noticed."""
        return rank in self.lost()

    def close(self) -> None:
        """See `Hub`."""
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)
        self._context.term()
        self._wake_event.close()

    def _meet(self, rank: int, fd: object) -> None:
        assert isinstance(fd, int)
        self.lost()
        if fd in self._live_fds:
            self._rank_of_fd[fd] = rank
        else:
            self._lost[rank] = _LOST


class ZmqLink:
    """See `Link`.

    Raises:
        ChannelClosedError: The core cannot be reached, or is not the one that `ends` names.
    """

    def __init__(self, ends: ZmqEnds) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.routing_id = ends.token
        self._socket.reconnect_ivl = -1
        self._socket.curve_serverkey = ends.server_key
        self._socket.curve_publickey, self._socket.curve_secretkey = zmq.curve_keypair()
        _tune(self._socket)
        self._monitor = self._socket.get_monitor_socket(_BROKEN | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._interrupt = WakeEvent()
        self._waiter = Waiter(spin_s=0.0)
        self._waiter.hear(self._socket.FD)
        self._waiter.hear(self._monitor.FD)
        self._waiter.watch(self._interrupt.fd)
        self._address = ends.address
        try:
            self._socket.connect(ends.address)
            if self._waiter.wait(self._take_connected, _CONNECT_TIMEOUT_S) is None:
                self._give_up("did not answer")
        except ChannelClosedError:
            self.close()
            raise

    def recv(self) -> bytes | None:
        """See `Link`."""
        frame = self._waiter.wait(self._take)
        if frame is None:
            self._interrupt.clear()
        return frame

    def send(self, frame: bytes) -> None:
        """See `Link`."""
        self._socket.send(frame)

    def interrupt(self) -> None:
        """See `Link`."""
        self._interrupt.set()

    def close(self) -> None:
        """See `Link`."""
        self._waiter.close()
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(_LINGER_MS)
        self._context.term()
        self._interrupt.close()

    def _take(self) -> bytes | None:
        try:
            return self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            self._take_connected()
            return None

    def _take_connected(self) -> bool | None:
        event = _next_event(self._monitor)
        if event is None:
            return None
        if event[0] & _BROKEN:
            self._give_up("ended the connection")
        return True

    def _give_up(self, what: str) -> None:
        raise ChannelClosedError(f"the engine core at {self._address} {what}")


def _tune(socket: zmq.Socket[bytes]) -> None:
    # Without limits: the steps in flight bound the queues.
    socket.set_hwm(0)
    socket.linger = 0
    socket.heartbeat_ivl = _HEARTBEAT_MS
    socket.heartbeat_timeout = _SILENCE_MS


def _next_event(monitor: zmq.Socket[bytes]) -> tuple[int, int] | None:
    """Return a monitor's next event and its value (usually a file descriptor)."""
    try:
        head, _address = monitor.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None
    kind, value = struct.unpack("=hi", head)  # zmq_socket_monitor(3)
    return kind, value
