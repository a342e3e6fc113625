"""Links over TCP: one rank's connections to others, and theirs to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from pdserve.connectors.side_channel.channel import Connection, start_connect
from pdserve.connectors.transfer.protocol import ToClient, ToServer

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from pdserve.connectors.side_channel.channel import Listener
    from pdserve.connectors.side_channel.reactor import Reactor
    from pdserve.connectors.transfer.link import PeerLink
    from pdserve.errors import PeerError
    from pdserve.wire.transfer import Endpoint


class SideChannel:
    """See `Dialer`; all methods belong to the thread of the event loop.

    Args:
        reactor: Calls back.
        secret: The deployment's.
    """

    def __init__(self, reactor: Reactor, secret: bytes) -> None:
        self._reactor = reactor
        self._secret = secret
        self._to_client = msgspec.msgpack.Decoder(ToClient)
        self._to_server = msgspec.msgpack.Decoder(ToServer)

    def connect(self, endpoint: Endpoint, peer: str) -> PeerLink:
        """See `Dialer`."""
        sock = start_connect(endpoint)
        return _TcpLink(
            self._reactor,
            Connection(sock, self._secret, self._to_client, is_client=True, peer=peer),
        )

    def listen(self, listener: Listener, on_accept: Callable[[PeerLink], None]) -> None:
        """Call `on_accept` for each connection that comes in, from whomever."""

        def accept(sock: socket.socket, peer: str) -> None:
            connection = Connection(sock, self._secret, self._to_server, is_client=False, peer=peer)
            on_accept(_TcpLink(self._reactor, connection))

        self._reactor.listen(listener, accept)


class _TcpLink:
    """See `PeerLink`."""

    def __init__(self, reactor: Reactor, connection: Connection[Any]) -> None:
        self._reactor = reactor
        self._connection = connection

    @property
    def peer(self) -> str:
        return self._connection.peer

    @property
    def is_authenticated(self) -> bool:
        return self._connection.is_authenticated

    def attach(
        self, on_message: Callable[[Any], None], on_lost: Callable[[PeerError], None]
    ) -> None:
        self._reactor.attach(self._connection, on_message, on_lost)

    def send(self, message: msgspec.Struct) -> None:
        self._reactor.send(self._connection, message)

    def close(self) -> None:
        self._reactor.detach(self._connection)
