"""The requests of one proxy: those that run, whether more are wanted, what is told at their end.

What is told is cut to a bounded size (`MAX_BYTES_EACH` at worst, about 1.7 kB as JSON as a rule).
The gaps between tokens are summed up as their median and maximum.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pdserve.config.schema import Role
from pdserve.observe.request_log import log_request, with_line
from pdserve.observe.stats_log import share
from pdserve.proxy.backend import Health
from pdserve.wire.finished import Finished, FinishedRequests, Told

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from pdserve.observe.clock import Clock
    from pdserve.proxy.admission import AdmissionQueue
    from pdserve.proxy.backends import Backends
    from pdserve.proxy.story import Story

MAX_EVENTS = 48
MAX_EVENT_CHARS = 200
MAX_BYTES_EACH = 64 << 10
"""Above what the limits before add up to, with every character escaped."""


class LiveRequests:
    """The requests that run in one proxy, and what is told of those that have ended.

    Attributes:
        recent: The last that have ended.
        is_leaving: Set on shutdown: no more are wanted.
        is_idle: Set while nothing runs.
    """

    def __init__(self, backends: Backends, admission: AdmissionQueue, clock: Clock) -> None:
        self._backends = backends
        self._admission = admission
        self._clock = clock
        self._stories: dict[int, Story] = {}
        self.recent = FinishedRequests()
        self.is_leaving = False
        self.is_idle = asyncio.Event()
        self.is_idle.set()
        self._since_s = clock.monotonic_s()
        self._tokens_before = (0, 0)
        self._ended_tokens = (0, 0)
        self._begin()

    def _begin(self) -> None:
        self._outcomes: Counter[str] = Counter()
        self._paths: Counter[str] = Counter()
        self._ttfts_ms: list[float] = []
        self._num_prompt = self._num_cached = 0

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

    def ended(self, story: Story, outcome: str) -> None:
        """Keep, count and log a request that has ended with `outcome`."""
        ended = finished(story, outcome, seq=self.recent.next_seq)
        self.recent.add(ended)
        self._outcomes[outcome] += 1
        self._paths[ended.kv_path.removesuffix("+store")] += 1
        if ended.ttft_ms is not None:
            self._ttfts_ms.append(ended.ttft_ms)
        self._num_prompt += ended.prompt_tokens
        self._num_cached += ended.cached_tokens
        num_prompt, num_output = self._ended_tokens
        self._ended_tokens = (num_prompt + ended.prompt_tokens, num_output + ended.output_tokens)
        log_request(ended)

    def stats(self) -> dict[str, object] | None:
        """Return what was done since the last call, for the log; None of a proxy that is idle."""
        now_s = self._clock.monotonic_s()
        seconds, self._since_s = max(now_s - self._since_s, 1e-3), now_s
        tokens, before = self._tokens(), self._tokens_before
        self._tokens_before = tokens
        if not (self._outcomes or self.stories):
            return None
        admission, outcomes = self._admission, self._outcomes
        ttfts_ms = sorted(self._ttfts_ms)
        told: dict[str, object] = {
            "ended": outcomes.total(),
            "failed": outcomes["error"] + outcomes["shed"],
            "prompt_tokens_per_s": round(max(0, tokens[0] - before[0]) / seconds, 1),
            "output_tokens_per_s": round(max(0, tokens[1] - before[1]) / seconds, 1),
            "running": admission.num_running,
            "waiting": admission.num_waiting,
            "ttft_p50_ms": _at(ttfts_ms, 0.5),
            "ttft_p99_ms": _at(ttfts_ms, 0.99),
            "kv_usage": max((round(each.kv_usage, 3) for each in self._backends), default=0),
            "prefix_hit_rate": share(self._num_cached, self._num_prompt),
            **{path: self._paths[path] or None for path in ("push", "pull", "local")},
            **{role.value: self._ready(role) for role in Role},
        }
        self._begin()
        return told

    def _tokens(self) -> tuple[int, int]:
        """Prompt and output tokens of all requests since the start, as far as they have come."""
        num_prompt, num_output = self._ended_tokens
        for story in self.stories:
            num_prompt += story.num_prompt_tokens
            num_output += story.num_output_tokens
        return num_prompt, num_output

    def _ready(self, role: Role) -> str | None:
        """How many engines of a role are ready, of how many."""
        engines = [each for each in self._backends if each.role is role]
        num_ready = sum(each.health is Health.READY for each in engines)
        return f"{num_ready}/{len(engines)}" if engines else None


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


def _at(ordered: list[float], quantile: float) -> float | None:
    return round(ordered[int(quantile * (len(ordered) - 1))], 1) if ordered else None
