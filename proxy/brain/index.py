"""The prefix index: which engine has which prefix, in one dictionary. No I/O, no clock.

An entry is a grain and the set of *holders* that have it, as the bits of an int: matching a prompt
takes one look-up and one AND for each of its grains, however many engines there are. A holder is
forgotten by clearing one bit; its entries are swept away later, some at a time, and then its number
is reused.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import TYPE_CHECKING, Final, assert_never

from pdserve.wire.events import DEVICE, GrainsCleared, GrainsRemoved, GrainsStored

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pdserve.wire.events import GrainEvent

_MAX_SHARED: Final = 1 << 16
"""Sets of holders that entries share, at most; further ones have their own."""


class PrefixIndex:
    """The grains of all holders.

    Expected grains are those that a holder is about to compute: they count until confirmed or
    expired.
    """

    def __init__(self) -> None:
        self._entries: dict[int, int] = {}
        self._shared: dict[int, int] = {}
        self._expected: dict[int, dict[int, float]] = {}
        self._due: deque[tuple[float, int, Sequence[int]]] = deque()
        self._believed = 0
        self._num_bits = 0
        self._owners: dict[int, str] = {}
        self._free: list[int] = []
        self._retired = 0
        self._sweeping = 0
        self._to_sweep: list[int] = []

    def __len__(self) -> int:
        """Return the number of grains that a holder has, or had until recently."""
        return len(self._entries)

    def open(self, owner: str) -> int:
        """Return a number for a new holder that has nothing and counts.

        Args:
            owner: Owner of the number, for `owner`.
        """
        if self._free:
            bit = self._free.pop()
        else:
            bit = self._num_bits
            self._num_bits += 1
        self._believed |= 1 << bit
        self._owners[bit] = owner
        return bit

    def owner(self, bit: int) -> str:
        """Return the owner of a number."""
        return self._owners[bit]

    def retire(self, bit: int) -> None:
        """Forget a holder and its grains. O(1); its number is reused once it is swept."""
        self._believed &= ~(1 << bit)
        self._retired |= 1 << bit

    def believe(self, bit: int, *, is_believed: bool) -> None:
        """Set whether a holder's grains count."""
        if is_believed:
            self._believed |= 1 << bit
        else:
            self._believed &= ~(1 << bit)

    def add(self, bit: int, grains: Iterable[int]) -> None:
        """Note that a holder has these grains."""
        entries, expected, mine = self._entries, self._expected, 1 << bit
        for grain in grains:
            entries[grain] = self._share(entries.get(grain, 0) | mine)
            if grain in expected:
                self._forget_expected(grain, bit)

    def remove(self, bit: int, grains: Iterable[int]) -> None:
        """Note that a holder no longer has these grains."""
        entries, others = self._entries, ~(1 << bit)
        for grain in grains:
            left = entries.get(grain, 0) & others
            if left:
                entries[grain] = self._share(left)
            else:
                entries.pop(grain, None)

    def expect(self, bit: int, grains: Sequence[int], until_s: float) -> None:
        """Note that a holder is about to have these grains.

        Args:
            until_s: When they expire; later calls give no earlier times.
        """
        self._due.append((until_s, bit, grains))
        mine = 1 << bit
        for grain in grains:
            if not self._entries.get(grain, 0) & mine:
                self._expected.setdefault(grain, {})[bit] = until_s

    def sweep(self, num_entries: int, now_s: float) -> None:
        """Clear some entries of retired holders, and expected grains that never came."""
        while self._due and self._due[0][0] <= now_s:
            until_s, bit, grains = self._due.popleft()
            for grain in grains:
                if self._expected.get(grain, {}).get(bit) == until_s:  # else expected once more
                    self._forget_expected(grain, bit)
        if not self._to_sweep:
            if not self._retired:
                return
            self._sweeping, self._retired = self._retired, 0
            self._to_sweep = list(self._entries)
        entries, kept = self._entries, ~self._sweeping
        for grain in self._to_sweep[-num_entries:]:
            mask = entries.get(grain, 0)
            if mask & self._sweeping:
                if mask & kept:
                    entries[grain] = self._share(mask & kept)
                else:
                    del entries[grain]
        del self._to_sweep[-num_entries:]
        if not self._to_sweep:
            freed = _bits_of(self._sweeping)
            for grain in list(self._expected):
                for bit in self._expected[grain].keys() & freed:
                    self._forget_expected(grain, bit)
            self._free += freed
            self._sweeping = 0

    def depths(
        self, grains: Sequence[int], now_s: float, *, at_most: int = sys.maxsize, turn: int = 0
    ) -> dict[int, int]:
        """Return how many of a prompt's grains holders have, from the first one on.

        Holders that lack the first are left out. O(grains), and O(1) for each holder returned.

        Args:
            at_most: Limit on the holders returned, those with most first.
            turn: Rotates the order of holders that have equally much.
        """
        found: dict[int, int] = {}
        for depth, mask in reversed(self._ends(grains, now_s)):
            bits = _bits_of(mask, at_most - len(found), start=turn % max(1, self._num_bits))
            found.update(dict.fromkeys(bits, depth))
        return found

    def depth_of(self, bits: Iterable[int], grains: Sequence[int]) -> int:
        """Return how many of a prompt's grains one of these holders has; O(grains)."""
        mine = sum(1 << bit for bit in bits) & self._believed
        for depth, grain in enumerate(grains):
            mine &= self._entries.get(grain, 0)
            if not mine:
                return depth
        return len(grains) if mine else 0

    def _ends(self, grains: Sequence[int], now_s: float) -> list[tuple[int, int]]:
        """Return who has no more than so many grains, for each number that somebody has."""
        ends: list[tuple[int, int]] = []
        entries, expected, going_on = self._entries, self._expected, self._believed
        for depth, grain in enumerate(grains):
            here = entries.get(grain, 0)
            if grain in expected:
                for bit, until_s in expected[grain].items():
                    if until_s > now_s:
                        here |= 1 << bit
            if depth and (ended := going_on & ~here):
                ends.append((depth, ended))
            going_on &= here
            if not going_on:
                return ends
        return [*ends, (len(grains), going_on)]

    def _share(self, mask: int) -> int:
        shared = self._shared
        if len(shared) >= _MAX_SHARED:
            shared.clear()
        return shared.setdefault(mask, mask)

    def _forget_expected(self, grain: int, bit: int) -> None:
        bits = self._expected[grain]
        bits.pop(bit, None)
        if not bits:
            del self._expected[grain]


class Holder:
    """One engine core's part of an index, kept in step by an `EventReader`.

    A tier's grains are left out: KV that an engine must load first is no hit of its own.

    Args:
        owner: URL of the engine.

    Attributes:
        bit: Its number in the index, a new one after each `retire`.
    """

    def __init__(self, index: PrefixIndex, owner: str = "") -> None:
        self._index = index
        self._owner = owner
        self.bit = index.open(owner)
        self._is_believed = True

    def retire(self) -> None:
        """See `GrainIndex`."""
        self._index.retire(self.bit)
        self.bit = self._index.open(self._owner)
        self._index.believe(self.bit, is_believed=self._is_believed)

    def apply(self, event: GrainEvent) -> None:
        """See `GrainIndex`."""
        match event:
            case GrainsStored(grains, medium):
                if medium == DEVICE:
                    self._index.add(self.bit, grains)
            case GrainsRemoved(grains, medium):
                if medium == DEVICE:
                    self._index.remove(self.bit, grains)
            case GrainsCleared():
                self.retire()
            case _:
                assert_never(event)

    def believe(self, *, is_believed: bool) -> None:
        """Set whether it counts."""
        self._is_believed = is_believed
        self._index.believe(self.bit, is_believed=is_believed)

    def close(self) -> None:
        """Leave the index for good."""
        self._index.retire(self.bit)


def _bits_of(mask: int, at_most: int = sys.maxsize, *, start: int = 0) -> list[int]:
    """Return the numbers of a mask's bits, starting with those from `start` on."""
    bits: list[int] = []
    later = mask >> start << start
    for part in (later, mask ^ later):
        while part and len(bits) < at_most:
            lowest = part & -part
            bits.append(lowest.bit_length() - 1)
            part ^= lowest
    return bits
