"""The address where the ranks of one world meet. No torch: executors pass it on early."""

from __future__ import annotations

import socket

import msgspec

from pdserve.errors import ConfigError


class Rendezvous(msgspec.Struct, frozen=True, kw_only=True):
    """The address of the world's key-value store, which rank 0 serves.

    Attributes:
        listen_fd: For rank 0, if its parent has bound the port: a listening socket that it
            inherits, so that no other process can take the port in between.
    """

    host: str
    port: int
    listen_fd: int | None = None


def listen(host: str) -> tuple[socket.socket, Rendezvous]:
    """Bind a free port for a world to meet at.

    The socket stays the caller's: pass `listen_fd` on to rank 0, then close it.

    Raises:
        ConfigError: `host` is not an address of this machine.
    """
    try:
        listener = socket.create_server((host, 0))
    except OSError as error:
        raise ConfigError(f"ranks cannot meet at {host!r}: {error}", param="host") from None
    listener.set_inheritable(True)
    port = listener.getsockname()[1]
    return listener, Rendezvous(host=host, port=port, listen_fd=listener.fileno())
