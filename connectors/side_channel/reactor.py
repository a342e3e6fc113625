"""The event loop under a transfer thread: waits for sockets and wake-ups, calls back.

It knows connections and listeners, not what is said over them. All methods but `wake`
belong to one thread.
"""

from __future__ import annotations

import logging
import os
import selectors
from typing import TYPE_CHECKING, TypeVar

from pdserve.connectors.side_channel.channel import Connection, Listener
from pdserve.errors import PeerError
from pdserve.observe.log import log_event

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    import msgspec

R = TypeVar("R")

_log = logging.getLogger(__name__)

# A listener that cannot accept stays ready: it is looked at again after so long.
_REST_S = 0.1
# epoll takes some 24 days at most; a lease may be longer.
_LONGEST_S = 3600.0


class Reactor:
    """Readiness in, callbacks out."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake_fd, selectors.EVENT_READ, self._on_wake)
        self._resting: list[tuple[Listener, Callable[[int], None]]] = []

    def wake(self) -> None:
        """Make the current or next `wait` return at once. Any thread may call it."""
        os.eventfd_write(self._wake_fd, 1)

    def listen(self, listener: Listener, on_accept: Callable[[socket.socket, str], None]) -> None:
        """Call `on_accept(socket, peer)` for each connection that comes in.

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
                self._selector.unregister(listener)
                self._resting.append((listener, on_ready))
                return
            was_refused = False
            if accepted is not None:
                on_accept(*accepted)

        self._selector.register(listener, selectors.EVENT_READ, on_ready)

    def watch(self, descriptor: int) -> None:
        """Come back from `wait` when a descriptor is readable."""
        self._selector.register(descriptor, selectors.EVENT_READ, lambda mask: None)

    def attach(
        self,
        connection: Connection[R],
        on_message: Callable[[R], None],
        on_lost: Callable[[PeerError], None],
    ) -> None:
        """Call `on_message` for each message, and `on_lost` once if the connection breaks.

        By the time of `on_lost` the connection is detached and closed.
        """

        def on_ready(mask: int) -> None:
            try:
                if mask & selectors.EVENT_WRITE:
                    connection.on_writable()
                if mask & selectors.EVENT_READ:
                    for message in connection.on_readable():
                        on_message(message)
                        if connection.fileno() < 0:
                            return
            except PeerError as error:
                self.detach(connection)
                on_lost(error)
            else:
                self._update(connection)

        self._selector.register(connection, _interest(connection), on_ready)

    def send(self, connection: Connection[R], message: msgspec.Struct) -> None:
        """Send over an attached connection; it never raises (see `Connection.send`)."""
        connection.send(message)
        self._update(connection)

    def detach(self, connection: Connection[R]) -> None:
        """Forget and close a connection, without a call of `on_lost`."""
        if connection.fileno() >= 0:
            self._selector.unregister(connection)
            connection.close()

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for readiness, a wake-up or the time-out (None: for ever), call back.

        It may come back without any of them, after an hour.

        Returns:
            Whether anything was ready.
        """
        resting, self._resting = self._resting, []
        if resting:
            timeout_s = _REST_S if timeout_s is None else min(timeout_s, _REST_S)
        ready = self._selector.select(None if timeout_s is None else min(timeout_s, _LONGEST_S))
        for listener, on_ready in resting:
            self._selector.register(listener, selectors.EVENT_READ, on_ready)
        for key, mask in ready:
            # An earlier callback of this round may have closed it.
            if isinstance(key.fileobj, int) or key.fileobj.fileno() == key.fd:
                key.data(mask)
        return bool(ready)

    def close(self) -> None:
        """Close what `attach` and `listen` were given, and the loop itself."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, Connection | Listener):
                self._selector.unregister(key.fileobj)
                key.fileobj.close()
        self._selector.close()
        os.close(self._wake_fd)

    def _on_wake(self, mask: int) -> None:
        os.eventfd_read(self._wake_fd)

    def _update(self, connection: Connection[R]) -> None:
        interest = _interest(connection)
        if self._selector.get_key(connection).events != interest:
            self._selector.modify(connection, interest, self._selector.get_key(connection).data)


def _interest(connection: Connection[R]) -> int:
    return selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.wants_write else 0)
