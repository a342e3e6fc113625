"""The event loop of a transfer thread: waits for sockets and wake-ups, and calls back.

It knows neither the purpose of a socket nor what is sent over it. All methods but `wake` belong to
one thread.
"""

from __future__ import annotations

import os
import selectors
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

# Time after which a resting socket is watched again.
_REST_S = 0.1
# epoll accepts a time-out of about 24 days at most; a lease may be longer.
_LONGEST_S = 3600.0


class Selectable(Protocol):
    """A socket, or an object that stands for one."""

    def fileno(self) -> int:
        """Its descriptor; -1 once closed."""
        ...

    def close(self) -> None:
        """Close it."""


def _come_back(mask: int) -> None:
    """Do nothing: there is no callback."""


class Reactor:
    """Readiness in, callbacks out."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.watch(self._wake_fd, lambda mask: os.eventfd_read(self._wake_fd))
        self._resting: list[tuple[Selectable, Callable[[int], object]]] = []

    def wake(self) -> None:
        """Make the current or next `wait` return at once. Any thread may call it."""
        os.eventfd_write(self._wake_fd, 1)

    def watch(
        self,
        source: Selectable | int,
        on_ready: Callable[[int], object] = _come_back,
        events: int = selectors.EVENT_READ,
    ) -> None:
        """Have `wait` return when any of `events` occurs, and call `on_ready` with those."""
        self._selector.register(source, events, on_ready)

    def change(self, source: Selectable, events: int) -> None:
        """Change the events that a watched source waits for."""
        key = self._selector.get_key(source)
        if key.events != events:
            self._selector.modify(source, events, key.data)

    def rest(self, source: Selectable, on_ready: Callable[[int], object]) -> None:
        """Pause watching a source that would be ready at once but cannot be served."""
        self._selector.unregister(source)
        self._resting.append((source, on_ready))

    def forget(self, source: Selectable) -> None:
        """Stop watching a source."""
        self._selector.unregister(source)

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for readiness, a wake-up or the time-out (None: for ever), and call back.

        It may return without any of them, after an hour.

        Returns:
            Whether anything was ready.
        """
        resting, self._resting = self._resting, []
        if resting:
            timeout_s = _REST_S if timeout_s is None else min(timeout_s, _REST_S)
        ready = self._selector.select(None if timeout_s is None else min(timeout_s, _LONGEST_S))
        for source, on_ready in resting:
            self.watch(source, on_ready)
        for key, mask in ready:
            # An earlier callback of this round may have closed it.
            if isinstance(key.fileobj, int) or key.fileobj.fileno() == key.fd:
                key.data(mask)
        return bool(ready)

    def close(self) -> None:
        """Close the loop and all watched sources except bare descriptors."""
        for key in list(self._selector.get_map().values()):
            if not isinstance(key.fileobj, int):
                key.fileobj.close()  # type: ignore[attr-defined]
        self._selector.close()
        os.close(self._wake_fd)
