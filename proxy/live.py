"""The requests of one proxy: those that run, whether more are wanted, what is told at their end.

What is told is cut to a bounded size (`MAX_BYTES_EACH` at worst, about 1.7 kB as JSON as a rule).
The gaps between tokens are summed up as their median and maximum.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pdserve.observe.request_log import with_line
from pdserve.wire.finished import Finished, Told

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from pdserve.proxy.story import Story

MAX_EVENTS = 48
MAX_EVENT_CHARS = 200
MAX_BYTES_EACH = 64 << 10
"""Above what the limits before add up to, with every character escaped."""


class LiveRequests:
    """The requests that run in one proxy.

    Attributes:
        is_leaving: Set on shutdown: no more are wanted.
        is_idle: Set while nothing runs.
    """

    def __init__(self) -> None:
        self._stories: dict[int, Story] = {}
        self.is_leaving = False
        self.is_idle = asyncio.Event()
        self.is_idle.set()

    @property
    def stories(self) -> Collection[Story]:
        """The stories of those that run, in the order of their arrival; a view, never a copy."""
        return self._stories.values()

    @contextmanager
    def hold(self, story: Story) -> Iterator[None]:
        """Count a request among those that run for as long as the block does."""
        self._stories[id(story)] = story
        self.is_idle.clear()
        try:
            yield
        finally:
            del self._stories[id(story)]
            if not self._stories:
                self.is_idle.set()


def finished(story: Story, outcome: str, *, seq: int) -> Finished:
    """Return what is told of a request that has just ended with `outcome`, as number `seq`."""
    now_s = story.clock.monotonic_s()
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
    stages, first_stages = story.decode_stages, story.prefill_stages or story.decode_stages
    ended = Finished(
        seq=seq,
        request_id=story.request_id,
        outcome=outcome,
        status=story.status,
        reason=story.reason,
        stage="" if outcome == "ok" else story.stage.value,
        path=story.path,
        model=story.model,
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
        kv_path=story.kv_path,
        rungs=[rung.value for rung, _ in story.rungs],
        rung_reasons=[reason for _, reason in story.rungs],
        prompt_tokens=story.num_known_prompt_tokens,
        cached_tokens=first_stages.cached_tokens if first_stages is not None else 0,
        store_tokens=first_stages.store_tokens if first_stages is not None else 0,
        output_tokens=story.num_output_tokens,
        prefill=story.prefill_url,
        decode=story.decode_url,
        times_ms={
            name: round((at_s - story.arrived_s) * 1e3, 3)
            for name, at_s in times.items()
            if at_s is not None
        },
        story=[
            Told(at_ms=round(at_s * 1e3, 3), event=text[:MAX_EVENT_CHARS])
            for at_s, text in story.events[-MAX_EVENTS:]
        ],
    )
    return with_line(ended, story.times())


def _ms(terms: dict[str, float]) -> dict[str, float]:
    """Return milliseconds, rounded so that the parts add up to the sum as it is shown."""
    return {name: round(seconds * 1e3, 3) for name, seconds in terms.items()}
