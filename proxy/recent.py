"""The requests that ended last: what `/debug/requests` shows, what traces and the dashboard draw.

Each is kept as the JSON that is served, so that it costs no more than its bytes (about 1.5 kB;
`MAX_BYTES_EACH` at worst) and thousands of them are served without work. The gaps between its
tokens are summed up as their median and maximum. Knows no request that still runs.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from pdserve.wire.finished import NUM_KEPT, Finished, Told

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.proxy.story import Story

MAX_EVENTS = 48
MAX_EVENT_CHARS = 200
MAX_LINE_CHARS = 2000
MAX_BYTES_EACH = 64 << 10
"""Above what the limits before add up to, with every character escaped."""


class _Kept(NamedTuple):
    seq: int
    ended_s: float
    rank_ms: float
    json: bytes


_decoder = msgspec.json.Decoder(Finished)


class Recent:
    """A ring of the last `num_kept` finished requests."""

    def __init__(self, num_kept: int = NUM_KEPT) -> None:
        self._kept: deque[_Kept] = deque(maxlen=num_kept)
        self._seqs = itertools.count(1)
        self._complete_since_s = float("-inf")

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, story: Story, outcome: str) -> Finished:
        """Keep a request that has just ended with `outcome`; the one longest ago makes room."""
        now_s = story.clock.monotonic_s()
        finished = _finished(story, outcome, next(self._seqs), now_s)
        # What was slow to its first token is what people look for; without one, all of it was.
        rank_ms = finished.ttft_ms if finished.ttft_ms is not None else finished.total_ms
        if len(self._kept) == self._kept.maxlen:
            self._complete_since_s = self._kept[0].ended_s
        self._kept.append(_Kept(finished.seq, now_s, rank_ms, msgspec.json.encode(finished)))
        return finished

    def as_json(self, number: int, *, after_seq: int = 0) -> bytes:
        """Return the newest `number` that came after `after_seq`, as a JSON list, newest first."""
        newest = itertools.islice(self._newest_first(), number)
        later = itertools.takewhile(lambda kept: kept.seq > after_seq, newest)
        return b"[" + b",".join(kept.json for kept in later) + b"]"

    def since(self, monotonic_s: float) -> list[Finished]:
        """Return those that ended at `monotonic_s` or later, newest first."""
        later = itertools.takewhile(lambda k: k.ended_s >= monotonic_s, self._newest_first())
        return [_decoder.decode(kept.json) for kept in later]

    def json_since(self, monotonic_s: float) -> list[bytes]:
        """Return the same, each as the JSON of a `Finished`, oldest first."""
        later = itertools.takewhile(lambda k: k.ended_s >= monotonic_s, self._newest_first())
        return [kept.json for kept in later][::-1]

    def complete_since_s(self, monotonic_s: float) -> float:
        """Return from when on, at `monotonic_s` or later, nothing is missing."""
        return max(monotonic_s, self._complete_since_s)

    def slowest(self, number: int, *, since_s: float) -> list[Finished]:
        """Return the `number` longest to their first token of those that ended since then."""
        later = itertools.takewhile(lambda k: k.ended_s >= since_s, self._newest_first())
        longest = heapq.nlargest(number, later, key=lambda kept: (kept.rank_ms, kept.seq))
        return [_decoder.decode(kept.json) for kept in longest]

    def _newest_first(self) -> Iterator[_Kept]:
        return reversed(self._kept)


def _finished(story: Story, outcome: str, seq: int, now_s: float) -> Finished:
    first, second = _ms(story.ttft_terms()), _ms(story.second_token_terms())
    gaps = story.token_gaps
    times = {
        "queued": story.queued_s,
        "admitted": story.admitted_s,
        "first_leg": story.first_leg_s,
        "leg": story.leg_s,
        "first_token": story.first_token_s,
        "second_token": story.second_token_s,
    }
    stages = story.decode_stages
    return Finished(
        seq=seq,
        request_id=story.request_id,
        outcome=outcome,
        path=story.path,
        mode=story.mode.value,
        streamed=story.streamed,
        arrived_wall_s=round(story.clock.wall_s() - (now_s - story.arrived_s), 6),
        arrived_s=round(story.arrived_s, 6),
        total_ms=round((now_s - story.arrived_s) * 1e3, 3),
        ttft_ms=round(sum(first.values()), 3) if first else None,
        ttft_terms=first,
        second_token_ms=round(sum(second.values()), 3) if second else None,
        second_token_terms=second,
        itl_p50_ms=round(gaps.median_s * 1e3, 3) if gaps else None,
        itl_max_ms=round(gaps.max_s * 1e3, 3) if gaps else None,
        num_gaps=len(gaps),
        kv_mode=story.kv_mode.value if story.kv_mode is not None else None,
        kv_bytes=stages.kv_bytes if stages is not None else 0,
        rungs=[rung.value for rung, _ in story.rungs],
        rung_reasons=[reason for _, reason in story.rungs],
        prompt_tokens=story.num_prompt_tokens
        or (story.prefill_stages.prompt_tokens if story.prefill_stages is not None else 0),
        output_tokens=story.num_output_tokens,
        prefill=story.prefill_url,
        decode=story.decode_url,
        times_ms={
            name: round((at_s - story.arrived_s) * 1e3, 3)
            for name, at_s in times.items()
            if at_s is not None
        },
        line=story.line(outcome)[:MAX_LINE_CHARS],
        story=[
            Told(at_ms=round(at_s * 1e3, 3), event=text[:MAX_EVENT_CHARS])
            for at_s, text in story.events[-MAX_EVENTS:]
        ],
    )


def _ms(terms: dict[str, float]) -> dict[str, float]:
    """Microseconds are the last place, so that the parts add up to the sum as it is shown."""
    return {name: round(seconds * 1e3, 3) for name, seconds in terms.items()}
