"""What every process measures in the same way: buckets, exposition, event loop lag.

The series themselves belong to the process that counts them.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from prometheus_client.metrics_core import Metric

    from pdserve.observe.clock import Clock

LATENCY_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
"""For times a user waits for: vLLM's TTFT buckets."""

STAGE_BUCKETS_S = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0,
    2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
"""For parts of a request inside one process, which may be far below a millisecond."""

SIZE_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
"""For numbers of tokens."""

CONTENT_TYPE = CONTENT_TYPE_LATEST
"""The content type of `exposition`."""


class TokenHistogram(Collector):
    """A histogram of what happens with every token: `observe` costs a tenth of `Histogram`'s.

    It takes no lock: it is observed and read in one event loop.

    Args:
        labels: The one set of labels it has.
        buckets: Upper bounds, ascending, without infinity.
    """

    def __init__(
        self,
        name: str,
        documentation: str,
        *,
        labels: Mapping[str, str],
        buckets: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._labels = dict(labels)
        self._bounds = tuple(buckets)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float, number: int = 1) -> None:
        """Count `value`, `number` times."""
        self._counts[bisect_left(self._bounds, value)] += number
        self._sum += value * number

    def collect(self) -> Iterator[Metric]:
        """Yield the family; called by the registry at each scrape."""
        family = HistogramMetricFamily(self._name, self._documentation, labels=list(self._labels))
        bounds = [*map(str, self._bounds), "+Inf"]
        family.add_metric(
            list(self._labels.values()),
            buckets=list(zip(bounds, accumulate(self._counts), strict=True)),
            sum_value=self._sum,
        )
        yield family


def exposition(registry: CollectorRegistry) -> bytes:
    """Return all series of `registry` in Prometheus' text format."""
    return generate_latest(registry)


def loop_lag_histogram(registry: CollectorRegistry) -> Histogram:
    """Register the histogram that `measure_loop_lag` fills."""
    return Histogram(
        "pdserve_event_loop_lag_seconds",
        "How late the event loop woke a timer.",
        buckets=STAGE_BUCKETS_S,
        registry=registry,
    )


async def measure_loop_lag(histogram: Histogram, clock: Clock, *, interval_s: float = 0.5) -> None:
    """Observe the event loop's lag for ever. Costs one timer per interval."""
    while True:
        start_s = clock.monotonic_s()
        await asyncio.sleep(interval_s)
        histogram.observe(max(0.0, clock.monotonic_s() - start_s - interval_s))
