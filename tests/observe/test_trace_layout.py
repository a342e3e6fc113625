"""Windows laid out in time: sums are exact, and terms lie where the engine says they were."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from pdserve.observe.trace_layout import laid_out
from pdserve.wire.trace import StageSpan, Term, Window

TERMS = [
    Term("queue", 1.0, ["queue"]),
    Term("kv", 3.0, ["kv_wait", "kv_transfer"]),
]


def window(start_s: float, end_s: float) -> Window:
    return Window("relay", start_s, end_s, TERMS, "prefill")


def test_terms_lie_where_the_engine_says_and_the_remainder_around_them():
    spans = [
        StageSpan("queue", 11, 12),
        StageSpan("kv_wait", 12, 14),
        StageSpan("kv_transfer", 14, 15),
    ]
    assert laid_out(window(10, 20), spans, uncertainty_s=0.0) == [
        ("relay", 10, 11),
        ("queue", 11, 12),
        ("kv", 12, 15),
        ("relay", 15, 20),
    ]


def test_what_was_before_the_window_is_no_part_of_it():
    spans = [StageSpan("queue", 5, 6), StageSpan("kv_wait", 6, 9), StageSpan("kv_transfer", 9, 12)]
    assert laid_out(window(10, 20), spans, uncertainty_s=0.0) == [
        ("kv", 10, 12),
        ("relay", 12, 20),
    ]


def test_without_the_engines_word_terms_follow_one_another():
    assert laid_out(window(10, 20), [], uncertainty_s=0.0) == [
        ("queue", 10, 11),
        ("kv", 11, 14),
        ("relay", 14, 20),
    ]


def test_a_clock_that_is_off_is_put_right_as_far_as_it_may_be_wrong():
    spans = [StageSpan("queue", 9.5, 10.5)]
    assert laid_out(window(10, 20), spans, uncertainty_s=1.0)[0] == ("queue", 10.0, 11.0)
    assert laid_out(window(10, 20), spans, uncertainty_s=0.0)[0] == ("queue", 10, 10.5)
    late = [StageSpan("queue", 19.5, 20.25)]
    assert laid_out(window(10, 20), late, uncertainty_s=1.0)[-1] == ("queue", 19.25, 20.0)


times = st.integers(0, 100)


@given(
    st.tuples(times, times).map(sorted),
    st.lists(st.tuples(st.sampled_from(["queue", "kv_wait", "other"]), times), max_size=6),
    st.integers(0, 20),
)
def test_slices_cover_the_window_without_gap_or_overlap(edges, ends, uncertainty):
    spans, at = [], 0
    for name, end in ends:
        spans.append(StageSpan(name, at, max(at, end)))
        at = max(at, end)
    start, end = edges
    slices = laid_out(window(start, end), spans, uncertainty_s=uncertainty)
    assert sum(until - begin for _, begin, until in slices) == end - start
    for (_, _, until), (_, begin, _) in itertools.pairwise(slices):
        assert begin == until
    assert all(until > begin for _, begin, until in slices)
