"""The interface between an executor and the transport of its frames.

A `Hub` is the engine core's end, a `Link` is one rank's. Both carry bytes and know nothing of
what they say. Who starts a rank, and who notices that it has ended, is another seam:
`pdserve.executor.ranked.Ranks`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.executor.channel import Waiter


class Hub(Protocol):
    """The core's end of the links to all ranks of an engine."""

    def wake_on(self, waiter: Waiter) -> None:
        """Let `waiter` wake when `receive` or `lost` has something."""
        ...

    def broadcast(self, frame: bytes, *, on_full: Callable[[], None]) -> None:
        """Send a frame to every rank.

        Args:
            on_full: Called again and again while a rank has no room; it must `receive`, and
                may raise to give up.
        """
        ...

    def receive(self) -> tuple[int, bytes] | None:
        """The next frame of any rank, and whose it is. Never blocks."""
        ...

    def lost(self) -> dict[int, str]:
        """Ranks that can no longer be reached, as far as the transport knows, and why."""
        ...

    def has_heard_out(self, rank: int) -> bool:
        """Whether everything that a rank sent before it ended can be received by now."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...


class Link(Protocol):
    """A rank's end. One thread calls it, but for `interrupt`."""

    def recv(self) -> bytes | None:
        """Wait for the next frame. None = `interrupt` was called, and no frame was there.

        Raises:
            ChannelClosedError: The core cannot be reached any more.
        """
        ...

    def send(self, frame: bytes) -> None:
        """Send a frame to the core."""
        ...

    def interrupt(self) -> None:
        """Let `recv` return. From any thread, also after `close`."""
        ...

    def close(self) -> None:
        """Let go of everything once what was sent is on its way."""
        ...
