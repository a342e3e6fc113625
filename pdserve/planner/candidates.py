"""Chooses the layouts worth simulating, by a closed form. Pure.

Prompts keep prefill engines busy for a share of the time, and output tokens set the pace of decode
engines' steps; home roles use the same formula (`proxy/brain/roles`). It ignores queues, bursts and
caches, so it only orders the layouts to simulate.
"""

from __future__ import annotations

import dataclasses
import statistics
from typing import TYPE_CHECKING, Final

from pdserve.planner.work import FleetLayout
from pdserve.proxy.brain.roles import Demand, HomeBounds, load_of
from pdserve.proxy.brain.work import ServiceTimes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.planner.work import FleetCosts, Work

_MIN_SPAN_S: Final = 1.0


def demand_of(workload: Sequence[Work], costs: FleetCosts) -> Demand:
    """Return the demand of a workload, as if each prompt were computed alone."""
    openings = [each.at_s for each in workload if each.after is None]
    span_s = max(_MIN_SPAN_S, max(openings) - min(openings))
    return Demand(
        prompt_engines=sum(costs.of_prompt(len(each.prompt)) for each in workload) / span_s,
        tokens_per_s=sum(each.num_output for each in workload) / span_s,
        kv_tokens=statistics.mean(len(each.prompt) + each.num_output / 2 for each in workload),
    )


def splits(
    num_engines: int, demand: Demand, costs: FleetCosts, itl_slo_s: float
) -> list[FleetLayout]:
    """Return all layouts of prefill and decode engines, the likeliest first."""
    times = ServiceTimes(
        prefill=(costs.prefill, costs.prefill_token, costs.prefill_pair),
        step=(costs.decode, costs.decode_request, costs.decode_token),
        wire=(costs.wire, costs.wire_token),
        prefill_error=0.0,
        step_error=0.0,
        wire_error=0.0,
        first_factor=1.0,
        first_band=0.0,
        mean_output=1.0,
        spread=0.0,
        hop_s=costs.hop,
    )

    def worst(layout: FleetLayout) -> float:
        bounds = HomeBounds(
            num_prefill=layout.num_prefill, num_decode=layout.num_decode, num_both=0
        )
        return load_of(demand, times, bounds, 0, itl_slo_s).worst

    layouts = [FleetLayout(num, num_engines - num) for num in range(1, num_engines)]
    return sorted(layouts, key=worst)


def sized(layout: FleetLayout, size: FleetLayout) -> FleetLayout:
    """Return a layout whose engines have the size of another layout's."""
    return dataclasses.replace(
        size,
        num_prefill=layout.num_prefill,
        num_decode=layout.num_decode,
        num_both=layout.num_both,
    )
