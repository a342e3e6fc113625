"""The connection between an API server and its engine core: frames over a pair of Unix sockets.

The pair has no address: nobody but these two processes can reach it. Nothing here waits. Frames
that the other side does not read yet are kept, however many they are, and sent once it does. Unlike
ZMQ, it has no threads: a frame wakes its reader, and nobody in between. Knows no messages.
"""

from __future__ import annotations

import contextlib
import socket
from typing import Final

_LENGTH_BYTES: Final = 4
_READ_BYTES: Final = 1 << 16


class CorePipe:
    """One end. An event loop or a poller watches it by `fileno`.

    Args:
        end: One of `socket.socketpair()`; owned from here on.

    Attributes:
        has_ended: Whether the other end is closed, and all that came from it was received.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._received = bytearray()
        self._unsent = bytearray()
        self.has_ended = False

    def fileno(self) -> int:
        """Its descriptor; -1 once closed."""
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether `flush` is to be called as soon as the descriptor is writable."""
        return bool(self._unsent)

    @property
    def has_frame(self) -> bool:
        """Whether `take` returns a frame."""
        size = self._next_size()
        return size is not None and len(self._received) >= _LENGTH_BYTES + size

    def send(self, frame: bytes) -> None:
        """Send a frame, or keep what cannot be sent yet; nothing happens if the other end is gone.

        Raises:
            OverflowError: It has 4 GiB or more.
        """
        self._unsent += len(frame).to_bytes(_LENGTH_BYTES, "little")
        self._unsent += frame
        self.flush()

    def flush(self) -> None:
        """Send what was kept, as far as the other end takes it now."""
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()

    def receive(self) -> bool:
        """Read some of what has come, unless a whole frame is here already.

        Returns:
            False if nothing has come, or nothing will come any more.
        """
        if self.has_frame:
            return True
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        self._received += data
        self.has_ended = not data
        return bool(data)

    def take(self) -> bytes | None:
        """Return the next frame received; None if there is no whole one."""
        if not self.has_frame:
            return None
        end = _LENGTH_BYTES + (self._next_size() or 0)
        frame = bytes(self._received[_LENGTH_BYTES:end])
        del self._received[:end]
        return frame

    def close(self, *, linger_s: float = 0.0) -> None:
        """Close this end. What was kept is lost unless the other end takes it in time."""
        if linger_s and self._unsent:
            self._socket.settimeout(linger_s)
            with contextlib.suppress(OSError):
                self._socket.sendall(self._unsent)
        self._unsent.clear()
        self._socket.close()

    def _next_size(self) -> int | None:
        if len(self._received) < _LENGTH_BYTES:
            return None
        return int.from_bytes(self._received[:_LENGTH_BYTES], "little")
