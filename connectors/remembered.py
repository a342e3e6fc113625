"""Remembers what has ended for a while, to tell late messages from unknown ones.

A nonce is used once. A table of nonces must remember the finished ones for as long as messages
about them may still arrive, but no longer, or it would grow with every request served. Pure: the
caller passes in times, from any one clock.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable

V = TypeVar("V")

LEASES_REMEMBERED: Final = 10
"""How long a rank remembers a lease or a push that is over, in lease lengths.

After that its nonce is unknown: still never valid, but a peer that asks learns later that it is
gone.
"""
_MAX_REMEMBERED: Final = 1 << 16


class Remembered(Generic[V]):
    """Finished keys, each remembered with a value until a time of its own.

    A later `add` forgets a key, never before its time, unless there are more than
    `max_remembered`: then the oldest goes. O(1) each, amortised. Keys are forgotten in the order
    in which they were added: one with a later deadline keeps all those after it.
    """

    def __init__(self, max_remembered: int = _MAX_REMEMBERED) -> None:
        self._max_remembered = max_remembered
        self._until_s: OrderedDict[Hashable, tuple[float, V]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until_s)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._until_s

    def get(self, key: Hashable) -> V | None:
        """Return the key's value; None if it is unknown or forgotten."""
        entry = self._until_s.get(key)
        return None if entry is None else entry[1]

    def pop(self, key: Hashable) -> V | None:
        """Forget a key; return its value, or None if it is unknown or forgotten."""
        entry = self._until_s.pop(key, None)
        return None if entry is None else entry[1]

    def add(self, key: Hashable, value: V, *, now_s: float, until_s: float) -> None:
        """Remember a key until `until_s`, replacing any entry; forget those whose time is over."""
        self._until_s[key] = until_s, value
        self._until_s.move_to_end(key)
        while self._until_s:
            first, (first_until_s, _) = next(iter(self._until_s.items()))
            if first_until_s > now_s and len(self._until_s) <= self._max_remembered:
                break
            del self._until_s[first]
