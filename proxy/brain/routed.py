"""What an engine that does not tell of its KV has, judged by what was sent to it. No I/O.

The prefixes sent there last are taken for those it has, as many as it has room for. Where its
answers say that it had less, room for less is assumed; where it had as much, room for more.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.proxy.brain.index import PrefixIndex

_MIN_GRAINS: Final = 16
_SHRINK: Final = 0.9


class RoutedPrefixes:
    """One engine's part of an index.

    Args:
        owner: URL of the engine.
        max_grains: It has room for no more, by what it says of itself.

    Attributes:
        num_grains: It is taken to have room for so many.
    """

    def __init__(self, index: PrefixIndex, owner: str, max_grains: int) -> None:
        self._index = index
        self._max_grains = max(_MIN_GRAINS, max_grains)
        self._recent: OrderedDict[int, None] = OrderedDict()
        self.num_grains = self._max_grains
        self.bit = index.open(owner)

    def sent(self, grains: Sequence[int]) -> None:
        """Note a prompt that was sent there. Of a prefix its end is forgotten first."""
        recent = self._recent
        self._index.add(self.bit, [grain for grain in grains if grain not in recent])
        for grain in reversed(grains):
            recent[grain] = None
            recent.move_to_end(grain)
        self._forget_oldest()

    def answered(self, grains: Sequence[int], *, num_expected: int, num_found: int) -> None:
        """Learn how many grains of a prompt the engine had of those that were expected."""
        if num_found < num_expected:
            lacking = [grain for grain in grains[num_found:num_expected] if grain in self._recent]
            room = int(self.num_grains * _SHRINK)
            self.num_grains = max(_MIN_GRAINS, room)
            for grain in lacking:
                del self._recent[grain]
            self._index.remove(self.bit, lacking)
            self._forget_oldest()
            self.sent(grains)  # which the engine has now
        else:
            self.num_grains = min(self._max_grains, self.num_grains + num_found)

    def close(self) -> None:
        """Leave the index for good."""
        self._index.retire(self.bit)

    def _forget_oldest(self) -> None:
        gone = []
        while len(self._recent) > self.num_grains:
            gone.append(self._recent.popitem(last=False)[0])
        self._index.remove(self.bit, gone)
