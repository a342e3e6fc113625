"""Links over TCP: one rank's connections to and from others, all non-blocking.

They carry authenticated frames of msgpack messages, and close themselves on the first thing that is
wrong. They know neither leases nor loads, and never wait: the event loop calls them when a socket
is ready. All of it belongs to the thread of that loop.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import secrets
import selectors
import socket
from typing import TYPE_CHECKING, Any

import msgspec

from pdserve.connectors.side_channel.frames import MAX_PAYLOAD_BYTES, FrameSession
from pdserve.connectors.transfer.protocol import ToClient, ToServer
from pdserve.connectors.transfer.seams import ClosedError, Fault, FrameError, UnreachableError
from pdserve.errors import ConfigError, PeerError
from pdserve.observe.log import log_event
from pdserve.wire.seal import UNREADABLE
from pdserve.wire.transfer import Endpoint

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.connectors.side_channel.reactor import Reactor

_log = logging.getLogger(__name__)

_READ_BYTES = 1 << 16
_MAX_UNSENT_BYTES = 4 << 20
_BACKLOG = 128
# A network partition, with no FIN, is noticed after about 5 s: 2 s of silence, then 3 probes.
_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 5000),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)


class SideChannel:
    """Makes links to other ranks, and takes those that others make."""

    def __init__(self, reactor: Reactor, secret: bytes) -> None:
        self._reactor = reactor
        self._secret = secret
        self._to_client = msgspec.msgpack.Decoder(ToClient)
        self._to_server = msgspec.msgpack.Decoder(ToServer)

    def connect(self, endpoint: Endpoint, peer: str) -> TcpLink:
        """See `Seams.connect`."""
        sock = _start_connect(endpoint)
        session = FrameSession(self._secret, is_client=True, nonce=secrets.token_bytes(32))
        return TcpLink(self._reactor, sock, session, self._to_client, peer=peer)

    def listen(self, listener: Listener, on_accept: Callable[[TcpLink], None]) -> None:
        """Call `on_accept` for each incoming connection, whoever made it.

        While none can be accepted (no descriptor is free) the listener rests, so that the
        loop does not spin on it; callers wait in its backlog.
        """
        was_refused = False

        def on_ready(mask: int) -> None:
            nonlocal was_refused
            try:
                accepted = listener.accept()
            except OSError as error:
                if not was_refused:
                    was_refused = True
                    log_event(
                        _log, "kv side channel cannot accept", level=logging.ERROR, error=error
                    )
                self._reactor.rest(listener, on_ready)
                return
            was_refused = False
            if accepted is not None:
                sock, peer = accepted
                nonce = secrets.token_bytes(32)
                session = FrameSession(self._secret, is_client=False, nonce=nonce)
                on_accept(TcpLink(self._reactor, sock, session, self._to_server, peer=peer))

        self._reactor.watch(listener, on_ready)


class TcpLink:
    """See `PeerLink`: one TCP connection.

    Args:
        sock: Connected, or connecting if this side is the client; owned from here on.
        receives: Decodes what the peer may send; one per thread can serve all connections.
        peer: The peer's address, for messages.
    """

    def __init__(
        self,
        reactor: Reactor,
        sock: socket.socket,
        session: FrameSession,
        receives: msgspec.msgpack.Decoder[Any],
        *,
        peer: str,
    ) -> None:
        sock.setblocking(False)
        for level, option, value in _OPTIONS:
            sock.setsockopt(level, option, value)
        self.peer = peer
        self._reactor = reactor
        self._sock = sock
        self._session = session
        self._decoder = receives
        self._unsent = bytearray()
        self._is_connecting = session.is_client
        self._broken: PeerError | None = None
        if not session.is_client:
            self._flush()  # a server's preamble does not wait for the client's

    def fileno(self) -> int:
        """The socket's descriptor; -1 once closed."""
        return self._sock.fileno()

    @property
    def is_authenticated(self) -> bool:
        """See `PeerLink`."""
        return self._session.is_authenticated

    def attach(
        self, on_message: Callable[[Any], None], on_lost: Callable[[PeerError], None]
    ) -> None:
        """See `PeerLink`: when `on_lost` is called, the link is closed already."""

        def on_ready(mask: int) -> None:
            try:
                if mask & selectors.EVENT_WRITE:
                    self._on_writable()
                if mask & selectors.EVENT_READ:
                    for message in self._receive():
                        on_message(message)
                        if self.fileno() < 0:
                            return
            except PeerError as error:
                self.close()
                on_lost(error)
            else:
                self._reactor.change(self, self._interest)

        self._reactor.watch(self, on_ready, self._interest)

    def send(self, message: msgspec.Struct) -> None:
        """See `PeerLink`: sends as much as fits now, the rest once the socket is writable.

        A connection that breaks here becomes readable, and `on_lost` gets the reason. A message too
        large for a frame breaks it, too.
        """
        payload = msgspec.msgpack.encode(message)
        if len(payload) > MAX_PAYLOAD_BYTES:
            what = f"{type(message).__name__} of {len(payload)} bytes, at most {MAX_PAYLOAD_BYTES}"
            self._break(FrameError(Fault.OVERSIZE, f"{self.peer}: {what}"))
        else:
            self._session.send(payload)
            self._flush()
        self._reactor.change(self, self._interest)

    def close(self) -> None:
        """See `PeerLink`."""
        if self.fileno() >= 0:
            self._reactor.forget(self)
            self._sock.close()

    @property
    def _interest(self) -> int:
        wants_write = self._is_connecting or self._unsent
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if wants_write else 0)

    def _on_writable(self) -> None:
        """Handle a socket that is writable or whose connect has ended."""
        if self._is_connecting:
            error = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                self._break(UnreachableError(f"{self.peer}: {os.strerror(error)}"))
                return
            self._is_connecting = False
        self._flush()

    def _receive(self) -> list[Any]:
        """Return the messages that arrived.

        Raises:
            ClosedError: The connection is gone.
            FrameError: The peer sent invalid data, or does not read.
        """
        if self._broken is not None:
            raise self._broken
        try:
            data = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise ClosedError(f"{self.peer}: {error.strerror}") from error
        if not data:
            raise ClosedError(f"{self.peer}: closed the connection")
        payloads = self._session.receive(data)
        self._flush()
        try:
            return [self._decoder.decode(payload) for payload in payloads]
        except UNREADABLE as error:
            raise FrameError(Fault.MALFORMED, f"{self.peer}: {error}") from error

    def _flush(self) -> None:
        self._unsent += self._session.take_unsent()
        if self._is_connecting or self._broken is not None:
            return
        try:
            while self._unsent:
                del self._unsent[: self._sock.send(self._unsent)]
        except BlockingIOError:
            if len(self._unsent) > _MAX_UNSENT_BYTES:
                unread = len(self._unsent)
                self._break(
                    FrameError(Fault.SLOW, f"{self.peer}: {unread} bytes were sent and not read")
                )
        except OSError as error:
            self._break(ClosedError(f"{self.peer}: {error.strerror}"))

    def _break(self, error: PeerError) -> None:
        self._broken = error
        self._is_connecting = False
        self._unsent.clear()
        with contextlib.suppress(OSError):  # it may not be connected
            self._sock.shutdown(socket.SHUT_RDWR)


class Listener:
    """A listening TCP socket.

    Args:
        host: A name or address of this machine that peers can reach.
        port: 0 takes a free one.

    Raises:
        ConfigError: It cannot be bound, or is a wildcard, which cannot be announced.
    """

    def __init__(self, host: str, port: int) -> None:
        flag = "kv-transfer-config.host"
        try:
            family, _, _, _, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            numeric = str(address[0])
            if ipaddress.ip_address(numeric).is_unspecified:
                raise ConfigError(
                    f"--{flag} is {host!r}: peers cannot connect to a wildcard address; use an "
                    "address of this machine",
                    param=flag,
                )
            self._sock = socket.create_server((numeric, port), family=family, backlog=_BACKLOG)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"--{flag} is {host!r} and the port is {port}: {error}; use a free port and an "
                "address of this machine",
                param=flag,
            ) from error
        self._sock.setblocking(False)
        self.endpoint = Endpoint(host=numeric, port=int(self._sock.getsockname()[1]))

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._sock.fileno()

    def accept(self) -> tuple[socket.socket, str] | None:
        """Return a waiting connection and its peer's address; None if it is gone again.

        Raises:
            OSError: It cannot be accepted now, for lack of a descriptor or memory.
        """
        try:
            sock, address = self._sock.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return None
        return sock, f"{address[0]}:{address[1]}"

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()


def _start_connect(endpoint: Endpoint) -> socket.socket:
    """Begin to connect, without waiting for the network or a name server.

    Raises:
        UnreachableError: The address is not numeric or has no such port, it was refused
            at once, or no descriptor is free.
    """
    try:
        version = ipaddress.ip_address(endpoint.host).version
    except ValueError as error:
        raise UnreachableError(f"the host of an endpoint must be an IP address: {error}") from error
    try:
        sock = socket.socket(socket.AF_INET if version == 4 else socket.AF_INET6)
    except OSError as error:
        raise UnreachableError(f"cannot open a socket for {endpoint.host}: {error}") from error
    sock.setblocking(False)
    try:
        sock.connect((endpoint.host, endpoint.port))
    except BlockingIOError:
        pass
    except (OSError, OverflowError) as error:
        sock.close()
        raise UnreachableError(f"{endpoint.host}:{endpoint.port}: {error}") from error
    return sock
