"""What became of the last request of each session, for as long as that counts. No I/O.

Who says that requests belong together (`X-Session-Id`, or `session_id` in the body) has them served
alike while the alternatives are close, so that one that flickers does not move KV to and fro.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Final

DWELL_S: Final = 30.0
MAX_SESSIONS: Final = 100_000


class Sessions:
    """The sessions of one proxy; the ones that were used last, if there are too many."""

    def __init__(self) -> None:
        self._last: OrderedDict[str, tuple[bool, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._last)

    def was_split(self, name: str, now_s: float) -> bool | None:
        """Whether a session's last request was split; None if there was none of late."""
        last = self._last.get(name)
        return last[0] if last is not None and now_s - last[1] <= DWELL_S else None

    def note(self, name: str, *, is_split: bool, now_s: float) -> None:
        """Keep what becomes of a request."""
        if name:
            self._last[name] = is_split, now_s
            self._last.move_to_end(name)
            if len(self._last) > MAX_SESSIONS:
                self._last.popitem(last=False)


def preference(name: str, url: str) -> bytes:
    """How much a session likes an engine, in an order of its own that every proxy finds alike.

    Rendezvous hashing: an engine that comes or goes moves only what it takes or leaves.
    """
    return hashlib.blake2b(f"{name}\0{url}".encode(), digest_size=8).digest()
