"""UCX's TCP connections in this process: how they are closed, and how their number is limited.

UCX emulates a READ over TCP: one side asks, the other answers. UCX aborts the whole answering
process ("unexpected error: Endpoint timeout") if it finds the connection for an answer lost before
it has seen the question. A peer that is stopped (SIGSTOP) when its reader gives up would find
exactly that when it continues. If the connections end after the last answer, only they are lost. So
those of an agent that is destroyed while it reads outlive it for a while (`close_gently`), and
their data is discarded. Each is half closed once its peer has woken and sent all its answers (or
has slept for very long), and closed once the peer has closed its side or has died. None of this
touches the agent's memory.

UCX accepts every connection in its own thread, but notices the end of one only while its agent is
driven, and idle agents are not; and it keeps silent connections for good. If descriptors run out,
it stops listening forever. So their number is checked once a second: when it has grown, the agents
are driven a little, and when silent connections alone exceed a share of the limit, the agents are
replaced.

It knows neither NIXL nor the threads that own the agents.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import select
import socket
import stat
import struct
import threading
import time
from typing import TYPE_CHECKING

from pdserve.observe.log import log_event

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Collection

    from pdserve.observe.clock import Clock

_log = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 16
_MAX_QUIET = 300
# Two at once would take each other's copies for connections that are still in use.
_one_at_a_time = threading.Lock()

_EVERY_S = 1.0
# Whoever is connected has to meet this rank again.
_RENEWED_EVERY_S = 30.0
_SHARE_OF_LIMIT = 0.5
_DESCRIPTORS = "/proc/self/fd"
_TAINTED_AT_ONCE, _MAX_TAINTED = 16, 64
# tcpi_bytes_received of struct tcp_info (linux/tcp.h); the end of a stream counts as one.
_BYTES_RECEIVED_AT = 128
_TCP_INFO_BYTES = 136


def close_gently(destroy: Callable[[], None], *, quiet_s: float = 1.0) -> None:
    """Call `destroy`, but close its TCP connections later and without a reset.

    An agent's connections are those that disappear while it is destroyed. One that another thread
    closes at that moment ends in the same way.

    Args:
        quiet_s: Time without an answer after which a peer is asleep, or has nothing more to send.
    """
    with _one_at_a_time:
        copies: dict[int, socket.socket] = {}
        with contextlib.suppress(OSError):  # no descriptor is left to look with
            copies = _copies_of_connections()
        try:
            destroy()
        finally:
            others = set(copies)  # if it cannot be seen which are still in use, none is kept
            with contextlib.suppress(OSError):
                others &= open_sockets(besides={copy.fileno() for copy in copies.values()}).keys()
            for inode in others:
                copies.pop(inode).close()
    if copies:
        threading.Thread(
            target=_see_off, args=(list(copies.values()), quiet_s), name="kv-closing", daemon=True
        ).start()


def _copies_of_connections() -> dict[int, socket.socket]:
    """Duplicate the descriptors of every TCP connection of this process, by inode."""
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
    """Discard incoming data until the peers have closed their sides."""
    scratch = bytearray(_CHUNK_BYTES)
    left = {connection.fileno(): _Leaving(connection, quiet_s) for connection in connections}
    poller = select.poll()
    for descriptor in left:
        poller.register(descriptor, select.POLLIN)
    while left:
        for descriptor, _ in poller.poll(quiet_s * 1000):
            if not left[descriptor].discard(scratch):
                poller.unregister(descriptor)
                left.pop(descriptor).connection.close()
        for leaving in left.values():
            leaving.half_close_if_due()


class _Leaving:
    """A connection that is closed once its peer has said all it had to say."""

    def __init__(self, connection: socket.socket, quiet_s: float) -> None:
        self.connection = connection
        self._heard_s = time.monotonic()
        self._has_slept = False
        self._quiet_s = quiet_s

    def discard(self, scratch: bytearray) -> bool:
        """Receive into `scratch`; return whether the peer's side is open."""
        try:
            is_open = self.connection.recv_into(scratch, flags=socket.MSG_DONTWAIT) > 0
        except BlockingIOError:
            return True
        except OSError:
            return False
        now_s = time.monotonic()
        self._has_slept |= now_s - self._heard_s >= self._quiet_s
        self._heard_s = now_s
        return is_open

    def half_close_if_due(self) -> None:
        """End this side if the peer has slept and then said its last, or sleeps for very long."""
        num_quiet = (time.monotonic() - self._heard_s) / self._quiet_s
        if num_quiet >= (1 if self._has_slept else _MAX_QUIET):
            with contextlib.suppress(OSError):  # the peer has died
                self.connection.shutdown(socket.SHUT_WR)


class DescriptorWatch:
    """Watches the number of open descriptors, and acts on it.

    Args:
        tidy: Makes each agent close the connections whose other sides have ended.
        renew: Replaces each agent, which closes all its connections; its argument is the reason.
        faults: Counts `descriptors_over_budget`.
        num_open: Returns the number of open descriptors of this process.
        num_silent: Returns how many of those are connections that have received nothing.
        limit: Maximum open descriptors.

    Attributes:
        due_s: When `tick` must be called next.
    """

    def __init__(
        self,
        *,
        tidy: Callable[[], None],
        renew: Callable[[str], None],
        faults: Counter[str],
        clock: Clock,
        num_open: Callable[[], int],
        num_silent: Callable[[], int],
        limit: Callable[[], int],
    ) -> None:
        self._tidy = tidy
        self._renew = renew
        self._faults = faults
        self._clock = clock
        self._num_open = num_open
        self._num_silent = num_silent
        self._limit = limit
        self._num_before = self._num_open()
        self._excess_due_s = 0.0
        self.due_s = clock.monotonic_s() + _EVERY_S

    def tick(self) -> None:
        """Check if it is time to. O(1), unless there are too many."""
        now_s = self._clock.monotonic_s()
        if now_s < self.due_s:
            return
        self.due_s = now_s + _EVERY_S
        num_open, budget = self._num_open(), int(self._limit() * _SHARE_OF_LIMIT)
        is_excess = num_open > budget and now_s >= self._excess_due_s
        if num_open > self._num_before or is_excess:
            self._tidy()
        self._num_before = self._num_open()
        if is_excess:
            self._excess_due_s = now_s + _RENEWED_EVERY_S
            # UCX may have run into the limit, even if all of them have ended by now.
            num_unused = num_open - self._num_before + self._num_silent()
            self._on_excess(num_open, num_unused, budget)
            self._num_before = self._num_open()

    def _on_excess(self, num_open: int, num_unused: int, budget: int) -> None:
        is_renewed = num_open - num_unused <= budget
        self._faults["descriptors_over_budget"] += 1
        log_event(
            _log,
            "kv descriptors over budget",
            level=logging.ERROR,
            num_open=num_open,
            num_unused=num_unused,
            budget=budget,
            limit=self._limit(),
            remedy="NIXL agents are made again" if is_renewed else "raise ulimit -n",
        )
        if is_renewed:
            self._renew(f"{num_unused} connections that say nothing")


class TaintedNumbers:
    """Descriptors that are kept open so that UCX does not get their numbers.

    UCX keeps the number of a listener that it lost because descriptors had run out, and the next
    socket with that number cannot become a listener. UCX does not say which number it is.
    """

    def __init__(self) -> None:
        self._num_left = _MAX_TAINTED

    def take_out(self) -> None:
        """Take the lowest free numbers after an agent could not be created; from any thread.

        It takes only a limited number, because the failure may have other reasons.
        """
        for _ in range(min(_TAINTED_AT_ONCE, self._num_left)):
            with contextlib.suppress(OSError):
                os.open(os.devnull, os.O_RDONLY)
                self._num_left -= 1


def num_open_descriptors() -> int:
    """Return the number of open descriptors of this process."""
    size = os.stat(_DESCRIPTORS).st_size  # since Linux 6.2
    if size:
        return size
    try:
        return len(os.listdir(_DESCRIPTORS))
    except OSError:  # none is left to look with
        return max_descriptors()


def num_silent_connections() -> int:
    """Count the TCP connections of this process that have received nothing yet. O(descriptors).

    If no descriptor is left for the check, all are assumed to be such.
    """
    try:
        return sum(map(_is_silent, open_sockets().values()))
    except OSError:
        return max_descriptors()


def open_sockets(besides: Collection[int] = ()) -> dict[int, int]:
    """The descriptors of this process's sockets by their inodes.

    Raises:
        OSError: No descriptor is left for the check.
    """
    found = {}
    for descriptor in map(int, os.listdir(_DESCRIPTORS)):
        if descriptor in besides:
            continue
        with contextlib.suppress(OSError):  # it was closed meanwhile
            status = os.fstat(descriptor)
            if stat.S_ISSOCK(status.st_mode):
                found[status.st_ino] = descriptor
    return found


def is_connection(sock: socket.socket) -> bool:
    """Whether it is a TCP connection."""
    if sock.type != socket.SOCK_STREAM or sock.family == socket.AF_UNIX:
        return False
    try:
        sock.getpeername()
    except OSError:
        return False
    return True


def _is_silent(descriptor: int) -> bool:
    try:
        sock = socket.socket(fileno=descriptor)
    except OSError:  # it was closed meanwhile
        return False
    try:
        if not is_connection(sock):
            return False
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except OSError:
        return False
    finally:
        sock.detach()  # it is not ours to close
    (num_bytes,) = struct.unpack_from("=Q", info, _BYTES_RECEIVED_AT)
    return bool(num_bytes <= 1)


def max_descriptors() -> int:
    """Return the maximum of open descriptors of this process."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
