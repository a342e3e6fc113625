"""Formats numbers for people. Knows no unit."""

from __future__ import annotations

import math


def number(value: float | None, digits: int = 3) -> str:
    """Format a figure with `digits` significant digits and no exponent: 0.123, 12.3, 1,230.

    None and values that are not numbers become a dash.
    """
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    rounded = round(value, decimals)
    return f"{rounded:,.{max(0, decimals if abs(value) < 10**digits else 0)}f}"
