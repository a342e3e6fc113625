"""Compares the simulation of a running deployment with its measured figures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from pdserve.planner.figures import LoadFigures

if TYPE_CHECKING:
    from pdserve.planner.work import FleetLayout

_COMPARED: Final = tuple(
    f"{name}_p{percent}_ms" for name in ("ttft", "tpot", "itl") for percent in (50, 90, 99)
)


class PlanCheck(msgspec.Struct, frozen=True, kw_only=True):
    """Some of a workload, as predicted and as measured at a running deployment.

    Attributes:
        layout: The deployment's.
        goodput_off: Predicted share less measured one.
        off: By figure, predicted over measured less 1.
        notes: What whoever reads them has to know.
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
    """Return what a simulation and a run have in common."""
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
