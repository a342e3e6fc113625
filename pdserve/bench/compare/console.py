"""Formats the comparison's table as text. Knows no process and no page."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.bench.compare.result import Comparison
from pdserve.bench.compare.summary import Figure, Row, rows
from pdserve.bench.digits import number
from pdserve.observe.tables import aligned


def tables(comparison: Comparison) -> str:
    """A table for each rate: each figure, and below it the improvement over the baseline."""
    parts = []
    for rate in comparison.request_rates:
        if rate is not None:
            parts.append(f"{rate:g} requests/s")
        parts.append(_table(comparison, rows(comparison, rate)))
    return "\n\n".join(parts)


def _table(comparison: Comparison, table: Sequence[Row]) -> str:
    figures = [figure for figure in Figure if any(figure in row.values for row in table)]
    lines = [
        ["", *(figure.title for figure in figures)],
        ["", *(figure.unit for figure in figures)],
    ]
    for row in table:
        values = [row.values.get(figure) for figure in figures]
        marks = []
        if row.label == comparison.baseline:
            marks.append("baseline")
        if row.num_failed:
            marks.append(f"{row.num_failed} of {row.num_requests} failed")
        if row.is_behind:
            marks.append("fell behind")
        if not row.is_valid:
            marks.append("not valid")
        lines.append([row.label, *(number(value.median if value else None) for value in values)])
        ratios = [row.ratios.get(figure) for figure in figures]
        if marks or any(ratios):
            words = [f"x{number(ratio.median)}" if ratio else "" for ratio in ratios]
            lines.append([f"  {', '.join(marks)}", *words])
    return "\n".join(aligned(lines))
