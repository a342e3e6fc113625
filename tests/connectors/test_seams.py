"""What is kept of jobs for traces."""

from __future__ import annotations

from collections import deque
from typing import Any, cast

from pdserve.connectors.transfer.seams import Direction, JobEnd, Seams
from pdserve.wire.trace import RankSlice


def traced(end: JobEnd) -> deque[RankSlice]:
    others = cast("dict[str, Any]", dict.fromkeys(Seams.__slots__))
    seams = Seams(**{**others, "slices": deque()})
    seams.trace(Direction.READ, 4096, "r", end)
    return seams.slices


def test_a_job_leaves_slices_of_its_move_and_of_what_was_done_to_its_bytes() -> None:
    moved, digested = traced(JobEnd(None, b"", 1.0, 2.0, 3.0, 1))
    assert (moved.name, moved.start_s, moved.end_s) == ("read", 1.0, 2.0)
    assert moved.facts == {"request": "r", "bytes": 4096, "descriptors": 1}
    assert (digested.name, digested.start_s, digested.end_s) == ("digest", 2.0, 3.0)


def test_a_job_that_fails_leaves_a_slice_that_says_so() -> None:
    (failed,) = traced(JobEnd("p is gone", None, 1.0, 2.0, 2.0, 1))
    assert failed.facts["failure"] == "p is gone"
