"""What the dashboard says above all: what users feel, and nothing that it cannot know."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry, Histogram

from pdserve.proxy.dashboard.banner import (
    SPAN_S,
    Felt,
    Minute,
    Tally,
    Waits,
    banner,
)

BOUNDS = (0.01, 0.1, 1.0)


def waits(*seconds: float) -> Waits:
    histogram = Histogram("waits", "", ["mode"], registry=CollectorRegistry(), buckets=BOUNDS)
    histogram.labels("local")  # exists, and counts nothing
    for each in seconds:
        histogram.labels("push").observe(each)
    return Waits.of(histogram)


def counts(ttft: Waits | None = None, **outcomes: int) -> Tally:
    return Tally(outcomes, ttft or waits(), waits())


WELL = Felt(
    unserved=None,
    ready={"prefill": 1, "decode": 1, "both": 0},
    known={"prefill": 1, "decode": 1, "both": 0},
    minute=counts(waits(*[0.05] * 120), ok=120),
    span_s=60.0,
)


@pytest.mark.parametrize(
    ("felt", "tone", "headline"),
    [
        (WELL, "good", "Requests are served"),
        (replace(WELL, minute=counts()), "", "Ready; nobody has asked for a minute"),
        (replace(WELL, unserved="no engine is ready"), "bad", "Nobody is served"),
        (replace(WELL, minute=counts(ok=90, error=10)), "bad", "10 of 100 requests failed"),
        (replace(WELL, minute=counts(shed=1)), "bad", "1 of 1 requests failed"),
        (replace(WELL, minute=counts(ok=1990, shed=10)), "warn", "10 of 2,000 requests failed"),
        (replace(WELL, minute=counts(ok=9, client_error=50)), "good", "Requests are served"),
        (
            replace(WELL, ready={"prefill": 1, "decode": 0}),
            "warn",
            "Prefill engines do everything: no decode engine is ready",
        ),
        (
            replace(WELL, ready={"decode": 2}, known={"decode": 2}),
            "warn",
            "Decode engines do everything: no prefill engine is here",
        ),
        (replace(WELL, ready={"both": 1}, known={"both": 1}), "good", "Requests are served"),
        (replace(WELL, num_waiting=3), "warn", "Requests wait for a place"),
        (
            replace(WELL, unwell=["decode engine d:2 is not ready: it drains"]),
            "warn",
            "Requests are served, by fewer engines than there are",
        ),
    ],
)
def test_the_gravest_is_said_first(felt: Felt, tone: str, headline: str) -> None:
    said = banner(felt)
    assert (said.tone, said.headline) == (tone, headline)


def test_details_say_why_and_how_fast() -> None:
    minute = counts(waits(*[0.05] * 120), ok=100, error=20)
    unwell = ["decode engine d:2 is unreachable: cannot connect"]
    said = banner(replace(WELL, minute=minute, unwell=unwell, num_waiting=2))
    assert said.details == [
        "In the last 60 s: 20 failed",
        "2 wait for a place at the proxy",
        *unwell,
        "1.7 requests/s · first token p50 55 ms p90 91 ms p99 99.1 ms",
    ]


def test_a_quantile_is_told_only_where_one_more_wait_does_not_decide_it() -> None:
    assert waits(0.05).quantile(0.5) is None
    assert waits(0.05, 0.05).quantile(0.5) is not None
    assert waits(*[0.05] * 9).quantile(0.9) is None
    assert waits(*[0.05] * 10).quantile(0.9) == pytest.approx(0.091)
    assert waits(*[0.05] * 99).quantile(0.99) is None
    assert waits(*[5.0] * 100).quantile(0.99) == 1.0  # beyond the last bound


def test_a_minute_forgets_what_is_older() -> None:
    minute = Minute()
    assert minute.grown is None
    for second in range(200):
        minute.note(counts(ok=second), float(second))
    assert minute.span_s == SPAN_S
    assert minute.grown is not None
    assert minute.grown.outcomes == {"ok": 60}
