"""What a row more costs a step, measured on one product of the model."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_ROWS: Final = (1, 2, 4, 8, 16, 32, 64, 128)
_NUM_TRIES: Final = 3


def measure_rows(product: Callable[[int], object]) -> tuple[tuple[int, float], ...]:
    """Return the seconds that `product` takes for a few numbers of rows, the best of some tries."""
    for rows in _ROWS:
        product(rows)
    return tuple((rows, min(_seconds(product, rows) for _ in range(_NUM_TRIES))) for rows in _ROWS)


def _seconds(product: Callable[[int], object], rows: int) -> float:
    start_s = time.perf_counter()
    product(rows)
    return time.perf_counter() - start_s
