"""Tables for people who read a console; knows nothing of what is in them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence


_MIN_WIDTH: Final = 10


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of equally many cells as lines, with words to the left and figures to the right.

    The first column has words; the others are as wide as most figures, or wider.
    """
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    widths = [max(_MIN_WIDTH, width) for width in others]
    return [
        "  ".join([words.ljust(first), *map(str.rjust, figures, widths)]).rstrip()
        for words, *figures in rows
    ]
