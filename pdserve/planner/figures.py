"""Figures of a run, predicted or measured, by the same rules so that they compare."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from pdserve.bench.goodput import is_within

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.bench.goodput import Slo
    from pdserve.bench.records import Outcome


class LoadFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What requests of one run took; latencies are of those that were answered to their end.

    Attributes:
        goodput: The share of all requests that met every objective.
        num_good: How many that are.
        num_failed: Requests that were turned away, failed, or were not over at the end.
    """

    num_requests: int
    num_good: int
    num_failed: int
    goodput: float
    ttft_p50_ms: float
    ttft_p90_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    tpot_p90_ms: float
    tpot_p99_ms: float
    itl_p50_ms: float
    itl_p90_ms: float
    itl_p99_ms: float


def load_figures(outcomes: Sequence[Outcome], slos: Sequence[Slo]) -> LoadFigures:
    """Return the figures of a run of at least one request."""
    answered = [each for each in outcomes if each.is_good]
    num_good = sum(is_within(each, slos) for each in answered)
    seconds = {
        "ttft": [each.ttft_s for each in answered],
        "tpot": [tpot_s for each in answered if (tpot_s := each.tpot_s) is not None],
        "itl": [gap_s for each in answered for gap_s in each.itl_s],
    }
    return LoadFigures(
        num_requests=len(outcomes),
        num_good=num_good,
        num_failed=len(outcomes) - len(answered),
        goodput=num_good / len(outcomes),
        **{
            f"{name}_p{percent}_ms": float(np.percentile(values or [0.0], percent)) * 1e3
            for name, values in seconds.items()
            for percent in (50, 90, 99)
        },
    )
