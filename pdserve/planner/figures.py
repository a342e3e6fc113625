"""Figures of a run, predicted or measured, by the same rules so that they compare."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from pdserve.bench.goodput import is_within

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.bench.goodput import Slo
    from pdserve.bench.records import Outcome
    from pdserve.planner.work import FleetLayout

_COMPARED: Final = tuple(
    f"{name}_p{percent}_ms" for name in ("ttft", "tpot", "itl") for percent in (50, 90, 99)
)


class LoadFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of the requests of one run; latencies cover answered requests only.

    Attributes:
        goodput: The share of all requests that met every objective.
        num_good: Number of those requests.
        num_failed: Requests that were rejected, failed, or were unfinished at the end.
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


class PlanCheck(msgspec.Struct, frozen=True, kw_only=True):
    """Some of a workload, as predicted and as measured at a running deployment.

    Attributes:
        layout: Layout of the deployment.
        goodput_off: Predicted goodput minus measured goodput.
        off: Relative error of each figure: predicted / measured - 1.
        notes: Sentences needed to interpret the figures.
    """

    url: str
    layout: str
    predicted: LoadFigures
    measured: LoadFigures
    goodput_off: float
    off: dict[str, float]
    notes: list[str] = []


def compare(
    url: str,
    layout: FleetLayout,
    predicted: LoadFigures,
    measured: LoadFigures,
    *,
    notes: list[str],
) -> PlanCheck:
    """Compare a simulation with a run."""
    off = {}
    for name in _COMPARED:
        was = getattr(measured, name)
        if was > 0:
            off[name] = getattr(predicted, name) / was - 1
    return PlanCheck(
        url=url,
        layout=str(layout),
        predicted=predicted,
        measured=measured,
        goodput_off=predicted.goodput - measured.goodput,
        off=off,
        notes=notes,
    )
