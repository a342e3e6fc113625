"""Sockets between an engine's processes that no other user can open.

Their addresses are abstract (unix(7)), so that nothing is left behind. Such an address is listed
for everybody in the network namespace, other containers included, and has no permissions. So
connections are encrypted and authenticated (CurveZMQ, rfc.zeromq.org/spec/26): the listening
side's public key never travels over them, and whoever was not handed it, through the standard
input of a process that was started here, cannot finish the handshake; nor can whoever listens
without the secret one.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import msgspec
import zmq

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from typing import Any


class LocalKeys(msgspec.Struct, frozen=True, kw_only=True):
    """Keys of one listening process: those who know `public` may connect."""

    public: bytes
    secret: bytes

    @classmethod
    def make(cls) -> LocalKeys:
        """Draw a pair of keys.

        Raises:
            ConfigError: This ZMQ has no encryption.
        """
        if not zmq.has("curve"):
            raise ConfigError("pdserve needs a ZMQ with CURVE: install pyzmq from its wheels")
        public, secret = zmq.curve_keypair()
        return cls(public=public, secret=secret)


def local_name() -> str:
    """Return a unique prefix for the addresses of one engine."""
    return f"ipc://@pdserve-{secrets.token_hex(12)}"


def bind_local(socket: zmq.Socket[Any], address: str, keys: LocalKeys) -> None:
    """Listen at `ipc://@NAME`, to those who know the public key."""
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
    socket.bind(address)


def connect_local(socket: zmq.Socket[Any], address: str, server_key: bytes) -> None:
    """Connect to whoever listens at `address` and has the secret half of `server_key`."""
    socket.curve_serverkey = server_key
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.connect(address)
