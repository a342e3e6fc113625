"""Metrics that all processes share: buckets, exposition, event loop lag.

The series themselves belong to the process that counts them.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from itertools import accumulate, product
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

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

_LAG_INTERVAL_S = 0.5

CONTENT_TYPE = CONTENT_TYPE_LATEST
"""The content type of `exposition`."""


def counter_of(
    registry: CollectorRegistry, name: str, documentation: str, **labels: Iterable[str]
) -> Counter:
    """Register a counter whose series exist from the start.

    Args:
        labels: The values of each label; there is a series for each combination.
    """
    counter = Counter(name, documentation, list(labels), registry=registry)
    for values in product(*labels.values()):
        counter.labels(*values)
    return counter


class BucketCounts:
    """One histogram: the number of values in each bucket.

    Args:
        bounds: Upper bounds, ascending, without infinity.

    Attributes:
        counts: Per bucket, the one above the last bound included; not cumulative.
        total: Sum of all values.
    """

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, number: int = 1) -> None:
        """Count `value`, `number` times."""
        self.counts[bisect_left(self._bounds, value)] += number
        self.total += value * number


class HistogramFamily(Collector):
    """The histograms of one name: observing a value costs a tenth of `Histogram`'s time.

    It takes no lock: it is observed and read in one event loop.

    Args:
        labels: Label names.
        buckets: Upper bounds, ascending, without infinity.
    """

    def __init__(
        self,
        name: str,
        documentation: str,
        *,
        labels: Sequence[str] = (),
        buckets: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._labels = tuple(labels)
        self._bounds = tuple(buckets)
        self._children: dict[tuple[str, ...], BucketCounts] = {}
        registry.register(self)

    def of(self, *values: str) -> BucketCounts:
        """Return the histogram with these label values, which is exposed from then on."""
        return self._children.setdefault(values, BucketCounts(self._bounds))

    def collect(self) -> Iterator[Metric]:
        """Yield the family; called by the registry at each scrape."""
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._labels)
        for values, child in self._children.items():
            add_histogram(family, values, self._bounds, child.counts, child.total)
        yield family


def add_histogram(
    family: HistogramMetricFamily,
    labels: Sequence[str],
    bounds: Sequence[float],
    counts: Sequence[float],
    total: float,
) -> None:
    """Add a histogram to its family.

    Args:
        labels: Values, in the family's order.
        counts: Per bucket, the one above the last of `bounds` included; not cumulative.
        total: Sum of all values.
    """
    uppers = [*(str(float(bound)) for bound in bounds), "+Inf"]
    family.add_metric(
        labels,
        buckets=list(zip(uppers, accumulate(counts), strict=True)),
        sum_value=total,
    )


class _Lasting(Collector):
    """A registry's families without the times at which series were created.

    Those would be half of all samples, and no query reads them (OpenMetrics' `_created`).
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        """See the base class."""
        for family in self._registry.collect():
            family.samples = [each for each in family.samples if not each.name.endswith("_created")]
            yield family


def exposition(registry: CollectorRegistry) -> bytes:
    """Return all series of `registry` in Prometheus' text format."""
    return generate_latest(_Lasting(registry))


def loop_lag_histogram(registry: CollectorRegistry) -> Histogram:
    """Register the histogram that `measure_loop_lag` fills."""
    return Histogram(
        "pdserve_event_loop_lag_seconds",
        "How late the event loop woke a timer.",
        buckets=STAGE_BUCKETS_S,
        registry=registry,
    )


async def measure_loop_lag(histogram: Histogram, clock: Clock) -> None:
    """Observe the event loop's lag for ever. Costs one timer per interval."""
    while True:
        start_s = clock.monotonic_s()
        await asyncio.sleep(_LAG_INTERVAL_S)
        histogram.observe(max(0.0, clock.monotonic_s() - start_s - _LAG_INTERVAL_S))
