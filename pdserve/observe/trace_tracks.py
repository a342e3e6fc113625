"""Lays a trace out: which lane, in which order, and how many at a time. Pure."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from pdserve.wire.trace import CountersEvent

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pdserve.wire.trace import FrontRequest


def lanes_of(intervals: Sequence[tuple[float, float]]) -> list[int]:
    """For intervals in the order of their beginnings, the lowest lane that is free."""
    lanes: list[int] = []
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    num_lanes = 0
    for start_s, end_s in intervals:
        while busy and busy[0][0] <= start_s:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            lane = heapq.heappop(free)
        else:
            lane, num_lanes = num_lanes, num_lanes + 1
        heapq.heappush(busy, (end_s, lane))
        lanes.append(lane)
    return lanes


def by_number(track: str) -> list[tuple[int, str]]:
    """Sorts rank 2 before rank 10."""
    return [(int(word), "") if word.isdigit() else (-1, word) for word in track.split()]


def requests_in_front(requests: Iterable[FrontRequest]) -> Iterator[CountersEvent]:
    """How many of a proxy's requests waited for their first token, and how many had it.

    Those that ended before the trace begins are in neither.
    """
    changes: list[tuple[float, int, int]] = []
    for request in requests:
        start_s = request.windows[0].start_s if request.windows else request.at_s
        is_over = bool(request.outcome)
        changes.append((start_s, 1, 0))
        if request.ttft_s:
            changes.append((start_s + request.ttft_s, -1, 1))
        if is_over:
            changes.append((request.at_s, 0, -1) if request.ttft_s else (request.at_s, -1, 0))
    num_waiting = num_decoding = 0
    for at_s, waiting, decoding in sorted(changes):
        num_waiting, num_decoding = num_waiting + waiting, num_decoding + decoding
        counted = {"until the first token": num_waiting, "after it": num_decoding}
        yield CountersEvent(at_s, {"requests": counted})
