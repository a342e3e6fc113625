"""What is over, remembered for a time, so that what comes too late is told from what is unknown.

A nonce is used once. Whoever keeps a book of nonces has to know those that are over for as long
as somebody may still speak of them, and not for longer, or the book grows with every request
that was ever served. Times are the caller's, of whichever clock it reads; pure.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable

V = TypeVar("V")

LEASES_REMEMBERED: Final = 10
"""For how many lease times a rank remembers a lease or a push that is over.

Whoever speaks of it later is only told more slowly that it is gone: it is unknown then, which is
never a yes.
"""
_MAX_REMEMBERED: Final = 1 << 16


class Remembered(Generic[V]):
    """Keys that are over, each with a value, until a time of its own.

    A key is forgotten by a later `add`, never before its time, unless more than `max_remembered`
    are known: then the oldest is. O(1) each, amortised. Keys are forgotten in the order in which
    they came: one that is to be remembered for longer keeps those behind it.
    """

    def __init__(self, max_remembered: int = _MAX_REMEMBERED) -> None:
        self._max_remembered = max_remembered
        self._until_s: OrderedDict[Hashable, tuple[float, V]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until_s)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._until_s

    def get(self, key: Hashable) -> V | None:
        """The key's value; None if it is not known (any more)."""
        entry = self._until_s.get(key)
        return None if entry is None else entry[1]

    def pop(self, key: Hashable) -> V | None:
        """Forget a key; return its value, None if it was not known (any more)."""
        entry = self._until_s.pop(key, None)
        return None if entry is None else entry[1]

    def add(self, key: Hashable, value: V, *, now_s: float, until_s: float) -> None:
        """Remember a key until `until_s`, anew if it is known; forget those whose time is over."""
        self._until_s[key] = until_s, value
        self._until_s.move_to_end(key)
        while self._until_s:
            first, (first_until_s, _) = next(iter(self._until_s.items()))
            if first_until_s > now_s and len(self._until_s) <= self._max_remembered:
                break
            del self._until_s[first]
