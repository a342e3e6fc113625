"""Sockets between an engine's processes that no other user can open.

Their addresses are abstract (unix(7)), so that no file is left behind. Such an address is visible
to all processes in the network namespace, other containers included, and has no permissions. So
connections are encrypted and authenticated (CurveZMQ, rfc.zeromq.org/spec/26): the listening
side's public key never travels over them. A process that was not given it on its standard input
cannot finish the handshake; nor can one that listens without the secret key.
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
    """Keys of one listening process: processes that know `public` may connect."""

    public: bytes
    secret: bytes

    @classmethod
    def make(cls) -> LocalKeys:
        """Generate a pair of keys.

        Raises:
            ConfigError: This ZMQ has no encryption.
        """
        if not zmq.has("curve"):
            raise ConfigError(
                "this ZMQ has no CURVE encryption, which pdserve needs: install pyzmq from its "
                "wheels"
            )
        public, secret = zmq.curve_keypair()
        return cls(public=public, secret=secret)


def local_name() -> str:
    """Return a unique prefix for the addresses of one engine."""
    return f"ipc://@pdserve-{secrets.token_hex(12)}"


def bind_local(socket: zmq.Socket[Any], address: str, keys: LocalKeys) -> None:
    """Listen at `ipc://@NAME` to processes that know the public key."""
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
    socket.bind(address)


def connect_local(socket: zmq.Socket[Any], address: str, server_key: bytes) -> None:
    """Connect to the process that listens at `address` with the secret half of `server_key`."""
    socket.curve_serverkey = server_key
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.connect(address)
