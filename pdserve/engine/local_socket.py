"""Sockets between an engine's processes, which all are one user's.

Their addresses are abstract (unix(7)), so that nothing is left behind. Such an address has no
permissions and is listed for everybody, so whoever connects is asked for its user.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import zmq

if TYPE_CHECKING:
    from typing import Any


def bind_local(socket: zmq.Socket[Any], address: str) -> None:
    """Listen at `ipc://@NAME`, to processes of this process's user alone."""
    socket.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())
    socket.bind(address)
