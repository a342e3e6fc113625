"""Lays a trace out: which lane, in which order, how many at a time, and what a window has when.

The slices of a window cover it from beginning to end without gaps, so their sum is exact: the time
before, between and after its terms is the remainder. Pure.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from pdserve.wire.trace import CountersEvent

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pdserve.wire.trace import FrontRequest, StageSpan, Window

Slice = tuple[str, float, float]
"""Name, start and end."""


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


def laid_out(window: Window, spans: Sequence[StageSpan], *, uncertainty_s: float) -> list[Slice]:
    """Return the window as slices.

    Args:
        spans: What the engine says of its stages, in order, by the window's clock. A term is where
            the spans are that it stands for, as far as they are inside of the window: a push may
            have moved its KV before the first token. Without any, terms have the seconds that the
            window gives them, one behind the other.
        uncertainty_s: How wrong the spans' clock may be. Who answered was asked after the window
            began, and before it ended: spans that say otherwise are moved by so much at most.
    """
    names = {stage: term.name for term in window.terms for stage in term.stages}
    known = [span for span in spans if span.name in names]
    if not known:
        return _in_a_row(window)
    early_s = window.start_s - known[0].start_s
    late_s = known[-1].end_s - window.end_s
    shift_s = 0.0
    if late_s > 0:
        shift_s = -min(late_s, uncertainty_s)
    elif early_s > 0:
        shift_s = min(early_s, uncertainty_s, -late_s)
    at_s = window.start_s
    slices: list[Slice] = []
    for span in known:
        begin_s = min(max(at_s, span.start_s + shift_s), window.end_s)
        end_s = min(max(begin_s, span.end_s + shift_s), window.end_s)
        if end_s <= begin_s:
            continue
        if begin_s > at_s:
            slices.append((window.name, at_s, begin_s))
        name = names[span.name]
        if slices and slices[-1][0] == name and slices[-1][2] == begin_s:
            slices[-1] = (name, slices[-1][1], end_s)
        else:
            slices.append((name, begin_s, end_s))
        at_s = end_s
    if window.end_s > at_s:
        slices.append((window.name, at_s, window.end_s))
    return slices


def _in_a_row(window: Window) -> list[Slice]:
    at_s = window.start_s
    slices: list[Slice] = []
    for term in window.terms:
        end_s = min(at_s + term.seconds, window.end_s)
        if end_s > at_s:
            slices.append((term.name, at_s, end_s))
            at_s = end_s
    if window.end_s > at_s:
        slices.append((window.name, at_s, window.end_s))
    return slices
