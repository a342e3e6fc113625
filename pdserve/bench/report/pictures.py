"""The pictures of a comparison, each made of its runs and of nothing else.

Which run and which rate a picture shows stands in its caption. Knows no page.
"""

from __future__ import annotations

from pdserve.bench.compare.result import Comparison
from pdserve.bench.report.distributions import cdfs
from pdserve.bench.report.over_rate import latency_over_rate, pareto, rate_matched
from pdserve.bench.report.over_time import itl_over_time, timelines
from pdserve.bench.report.picture import Picture
from pdserve.bench.report.stages import stages


def pictures(comparison: Comparison, rate: float | None) -> list[Picture]:
    """All pictures there is data for; those of single runs show `rate`."""
    found = [
        itl_over_time(comparison, rate),
        *cdfs(comparison, rate),
        *latency_over_rate(comparison),
        pareto(comparison),
        stages(comparison, rate),
        *timelines(comparison, rate),
        rate_matched(comparison, rate),
    ]
    return [picture for picture in found if picture is not None]
