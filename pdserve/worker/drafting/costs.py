"""What a row more costs a step, measured on one product of the model."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_ROWS: Final = (1, 2, 4, 8, 16, 32, 64, 128)
_NUM_ROUNDS: Final = 5
"""Of all numbers of rows, so that what else runs for a moment is in no row's best time alone."""


def measure_rows(product: Callable[[int], object]) -> tuple[tuple[int, float], ...]:
    """Return the seconds of `product` for a few numbers of rows, the best of some rounds."""
    for rows in _ROWS:
        product(rows)
    rounds = [[_seconds(product, rows) for rows in _ROWS] for _ in range(_NUM_ROUNDS)]
    return tuple(zip(_ROWS, map(min, zip(*rounds, strict=True)), strict=True))


def _seconds(product: Callable[[int], object], rows: int) -> float:
    start_s = time.perf_counter()
    product(rows)
    return time.perf_counter() - start_s
