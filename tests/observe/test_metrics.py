from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.parser import text_string_to_metric_families

from pdserve.observe.metrics import LATENCY_BUCKETS_S, TokenHistogram, exposition


def samples(registry: CollectorRegistry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """All samples but the creation times."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(exposition(registry).decode())
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


@pytest.mark.parametrize("labels", [{}, {"model_name": 'a "model"'}])
@given(values=st.lists(st.floats(0, 5000) | st.sampled_from(LATENCY_BUCKETS_S)))
def test_a_token_histogram_is_exposed_as_any_histogram(labels, values):
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    quick = TokenHistogram("gap", "Gaps.", labels=labels, buckets=LATENCY_BUCKETS_S, registry=ours)
    histogram = Histogram("gap", "Gaps.", list(labels), buckets=LATENCY_BUCKETS_S, registry=theirs)
    usual = histogram.labels(**labels) if labels else histogram
    for value in values:
        quick.observe(value)
        usual.observe(value)
    assert samples(ours) == samples(theirs)
