"""Tokens that a step has sampled and the host does not have yet.

A step that is launched behind another one takes the other's tokens where they are, on the device.
The host writes them to their requests once they have come, unless the request is gone by then.

Knows rows of a batch and positions in them; no tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class AwaitedTokens:
    """Where the `M` tokens of a step belong.

    Attributes:
        rows: `[M]`, of the batch; distinct.
        positions: `[M]`, in them.
        tenures: `[M]`, of the rows, when the step was launched.
    """

    rows: NDArray[np.int64]
    positions: NDArray[np.int64]
    tenures: NDArray[np.int64]


class AwaitedRows:
    """Which rows of a batch await a token of the step that was launched last.

    Args:
        num_rows: Of the batch.
    """

    def __init__(self, num_rows: int) -> None:
        self._index = np.full(num_rows, -1, dtype=np.int64)
        self._tenure = np.zeros(num_rows, dtype=np.int64)
        self._last: AwaitedTokens | None = None

    def change_hands(self, row: int) -> None:
        """Note that `row` is another request's, or nobody's."""
        self._index[row] = -1
        self._tenure[row] += 1

    def index_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return which of the step's tokens each of `rows` awaits; -1 = none."""
        return self._index[rows]

    def begin(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> AwaitedTokens:
        """Await a token of each of `rows`, of which there is one step's at a time."""
        self._index[:] = -1
        self._index[rows] = np.arange(len(rows))
        self._last = AwaitedTokens(rows, positions, self._tenure[rows])
        return self._last

    def end(self, awaited: AwaitedTokens) -> NDArray[np.bool_]:
        """Tell which of the tokens still have the request that they were sampled for, `[M]`."""
        if self._last is awaited:
            self._index[:] = -1
            self._last = None
        is_there: NDArray[np.bool_] = self._tenure[awaited.rows] == awaited.tenures
        return is_there
