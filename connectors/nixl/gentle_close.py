"""Destroys a NIXL agent in such a way that a peer it was reading from lives on.

Over TCP a READ is emulated by UCX: one side asks, the other answers. UCX aborts the whole
process of who answers ("unexpected error: Endpoint timeout") if the connection turns out to be
reset within an answer, or with more questions behind it. A peer that is stopped (SIGSTOP) when
its reader gives up would find just that when it goes on. Where the stream ends behind the last
question, only the connection is lost; but an end amid the answers can still crash UCX.

So the agent's TCP connections outlive it for a while, and what comes on them is thrown away.
They are half closed once the peer has woken and given all its answers (or has slept for very
long), and closed once it has closed its side, has died, or cannot be reached. None of that
touches the memory that the agent was given.

It knows nothing of NIXL: an agent's connections are those that go while it is destroyed. A
connection that another thread closes in that moment ends in the same way.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from typing import TYPE_CHECKING

from pdserve.connectors.nixl.descriptors import is_connection, open_sockets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_CHUNK_BYTES = 1 << 16
_MAX_QUIET = 60
# Two at once would take each other's copies for connections that are still in use.
_one_at_a_time = threading.Lock()


def close_gently(destroy: Callable[[], None], *, quiet_s: float = 1.0) -> None:
    """Call `destroy`, and end the TCP connections it closes later, and with no reset.

    Args:
        quiet_s: A peer that has answered nothing for so long sleeps, or has no more to say.
    """
    with _one_at_a_time:
        copies = _copies_of_connections()
        try:
            destroy()
        finally:
            in_use = open_sockets(besides={copy.fileno() for copy in copies.values()})
            for inode in copies.keys() & in_use:
                copies.pop(inode).close()
    if copies:
        threading.Thread(
            target=_see_off, args=(list(copies.values()), quiet_s), name="kv-closing", daemon=True
        ).start()


def _copies_of_connections() -> dict[int, socket.socket]:
    """Every TCP connection of this process by its inode, under another descriptor."""
    copies = {}
    for inode, descriptor in open_sockets().items():
        try:
            duplicate = os.dup(descriptor)
        except OSError:  # another thread has closed it, or there are too many
            continue
        try:
            copy = socket.socket(fileno=duplicate)
        except OSError:  # it is no socket any more
            os.close(duplicate)
            continue
        if is_connection(copy) and os.fstat(copy.fileno()).st_ino == inode:
            copies[inode] = copy
        else:
            copy.close()
    return copies


def _see_off(connections: list[socket.socket], quiet_s: float) -> None:
    """Throw away what comes, until the peers have closed their sides."""
    scratch = bytearray(_CHUNK_BYTES)
    left = {connection.fileno(): connection for connection in connections}
    poller = select.poll()
    for descriptor in left:
        poller.register(descriptor, select.POLLIN)
    num_quiet, has_woken = 0, False
    while left:
        ready = poller.poll(quiet_s * 1000)
        if ready:
            has_woken |= num_quiet > 0
        else:
            num_quiet += 1
            if has_woken or num_quiet == _MAX_QUIET:
                _half_close(left.values())
        for descriptor, _ in ready:
            try:
                is_open = left[descriptor].recv_into(scratch, flags=socket.MSG_DONTWAIT) > 0
            except BlockingIOError:
                continue
            except OSError:
                is_open = False
            if not is_open:
                poller.unregister(descriptor)
                left.pop(descriptor).close()


def _half_close(connections: Iterable[socket.socket]) -> None:
    for connection in connections:
        with contextlib.suppress(OSError):  # the peer has died
            connection.shutdown(socket.SHUT_WR)
