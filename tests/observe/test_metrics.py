from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.parser import text_string_to_metric_families

from pdserve.observe.metrics import LATENCY_BUCKETS_S, HistogramFamily, exposition
from pdserve.observe.processes import ProcessSeries


def samples(registry: CollectorRegistry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(exposition(registry).decode())
        for sample in family.samples
    }


@pytest.mark.parametrize("labels", [{}, {"model_name": 'a "model"'}])
@given(values=st.lists(st.floats(0, 5000) | st.sampled_from(LATENCY_BUCKETS_S)))
def test_a_quick_histogram_is_exposed_as_any_histogram(labels, values):
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    quick = HistogramFamily(
        "gap", "Gaps.", labels=list(labels), buckets=LATENCY_BUCKETS_S, registry=ours
    ).of(*labels.values())
    histogram = Histogram("gap", "Gaps.", list(labels), buckets=LATENCY_BUCKETS_S, registry=theirs)
    usual = histogram.labels(**labels) if labels else histogram
    for value in values:
        quick.observe(value)
        usual.observe(value)
    assert samples(ours) == samples(theirs)


def test_no_series_says_when_another_was_made():
    registry = CollectorRegistry()
    Counter("done", "Done.", registry=registry)
    Histogram("took", "Took.", registry=registry)
    assert {name for name, _ in samples(registry)} == {
        "done_total", "took_bucket", "took_count", "took_sum",
    }  # fmt: skip


async def told(children: dict[str, str]) -> dict[tuple[str, str], float]:
    """By name and label, what processes say of themselves."""
    text = (await ProcessSeries(children).exposition()).decode()
    return {
        (sample.name, sample.labels.get("process", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_processes_tell_of_themselves_and_of_those_that_they_started():
    started = "process_start_time_seconds"
    console = subprocess.Popen([sys.executable, "-m", "code"], stdin=subprocess.PIPE)
    try:
        async with asyncio.timeout(30):
            while (started, "console 0") not in (found := await told({"code": "console"})):
                await asyncio.sleep(0.01)
    finally:
        console.communicate()
    assert found[started, "console 0"] > found[started, ""]
    for name in ("resident_memory_bytes", "start_time_seconds", "cpu_seconds_total", "open_fds"):
        assert found[f"process_{name}", ""] > 0
    assert found["python_info", ""] == 1
    assert (started, "console 0") not in await told({"code": "console"})
