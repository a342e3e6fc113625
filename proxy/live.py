"""The running requests of one proxy, whether it accepts more, and what it logs at their end.

Reports are cut to a bounded size (`MAX_BYTES_EACH` at worst, usually about 1.7 kB as JSON). The
gaps between tokens are summarized by their median and maximum. A request's log line shows where
its time went (`story` defines the terms), with sums that add up as printed:

    req 3f2a ok status=200 endpoint=/v1/completions path=pull model=m in=512 cached=0 out=64
    total=412.0ms ttft=33.2ms = proxy 0.5 + queue 0.4 + prefill 31.9 + relay 0.4
    | second token +12.1ms = kv 6.3 (8.4 MB, 1.3 GB/s) + handover 2.2 + first step 3.6
    | itl p50 6.1 max 9.8

When the first token of a push arrives, only the last of its KV is left to move: the KV moved before
is not part of the second token's wait (`kv 1.0 (of 6.3, ...)` took 6.3 from P's last computed chunk
on). `wait` is the part of `kv` before the first byte, `step` the part of `handover` during which KV
lay ready, by the engine's own account. The line ends with the reason why KV was pulled that might
have been pushed (`no push: failed`), the part of the prompt from a store (`kv from store 3072 of
4096, 2.1 GB/s`) and, if something failed, the rungs of the ladder taken, with their reasons
(`ladder other_decode(dropped),local(decode_failed)`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

from pdserve.config.schema import Role
from pdserve.errors import DeadlineError, PdserveError, ShuttingDownError
from pdserve.observe.request_log import StoredKV, kv_path, log_request, moved, with_line
from pdserve.observe.stats_log import share
from pdserve.proxy.backend import Health
from pdserve.proxy.brain.prompt import hits_in_words
from pdserve.proxy.story import Mode, Stage
from pdserve.wire.finished import Finished, FinishedRequests, StoryEvent
from pdserve.wire.transfer import KVMode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Iterator

    from pdserve.observe.clock import Clock
    from pdserve.proxy.admission import AdmissionQueue
    from pdserve.proxy.backends import Backends
    from pdserve.proxy.story import Story

MAX_EVENTS = 48
MAX_EVENT_CHARS = 200
MAX_BYTES_EACH = 64 << 10
"""Above what the limits before add up to, with every character escaped."""


class LiveRequests:
    """The running requests of one proxy, and reports of those that have ended.

    Attributes:
        recent: The last requests that have ended.
        is_leaving: Set on shutdown, when no more requests are wanted.
        is_idle: Set while no request runs.
        is_cut: Whether requests that still run are cut off.
    """

    def __init__(self, backends: Backends, admission: AdmissionQueue, clock: Clock) -> None:
        self._backends = backends
        self._admission = admission
        self._clock = clock
        self._stories: dict[int, Story] = {}
        self.recent = FinishedRequests()
        self.is_leaving = False
        self.is_cut = False
        self._limits: set[asyncio.Timeout] = set()
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
        """The stories of running requests, in order of arrival; a view, never a copy."""
        return self._stories.values()

    @contextmanager
    def hold(self, story: Story) -> Iterator[None]:
        """Count a request as running while the block runs."""
        self._stories[id(story)] = story
        self.is_idle.clear()
        try:
            yield
        finally:
            del self._stories[id(story)]
            if not self._stories:
                self.is_idle.set()

    @asynccontextmanager
    async def limit(self, until_s: float) -> AsyncIterator[None]:
        """End the block at its deadline, by the event loop's clock, or when requests are cut off.

        Raises:
            TimeoutError: It was ended; `late` says why.
        """
        async with asyncio.timeout_at(0.0 if self.is_cut else until_s) as limit:
            self._limits.add(limit)
            try:
                yield
            finally:
                self._limits.discard(limit)

    def cut(self) -> None:
        """Cut off the requests that run: each tells its client so."""
        self.is_cut = True
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(0.0)

    def late(self, limit_s: float, what: str = "the request was not finished") -> PdserveError:
        """Return why a request was ended whose longest time is `limit_s`, and `what` was late."""
        if self.is_cut:
            return ShuttingDownError("this proxy")
        return DeadlineError(f"{what} within {limit_s:g} s (--request-timeout-secs)")

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
        """Return the work since the last call, for the log; None if the proxy is idle."""
        now_s = self._clock.monotonic_s()
        seconds, self._since_s = max(now_s - self._since_s, 1e-3), now_s
        tokens, before = self._tokens(), self._tokens_before
        self._tokens_before = tokens
        if not (self._outcomes or self.stories):
            return None
        admission, outcomes = self._admission, self._outcomes
        ttfts_ms = sorted(self._ttfts_ms)
        fields: dict[str, object] = {
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
        return fields

    def _tokens(self) -> tuple[int, int]:
        """Prompt and output tokens of all requests since the start, as far as they have come."""
        num_prompt, num_output = self._ended_tokens
        for story in self.stories:
            num_prompt += story.num_known_prompt_tokens
            num_output += story.num_output_tokens
        return num_prompt, num_output

    def _ready(self, role: Role) -> str | None:
        """How many engines of a role are ready, of how many."""
        engines = [each for each in self._backends if each.role is role]
        num_ready = sum(each.health is Health.READY for each in engines)
        return f"{num_ready}/{len(engines)}" if engines else None


def finished(story: Story, outcome: str, *, seq: int) -> Finished:
    """Return the report of a request that has just ended with `outcome`, as number `seq`."""
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
        kv_path=_kv_path(story, outcome),
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
            StoryEvent(at_ms=round(at_s * 1e3, 3), event=text[:MAX_EVENT_CHARS])
            for at_s, text in story.events[-MAX_EVENTS:]
        ],
    )
    return with_line(ended, times_in_words(story))


def times_in_words(story: Story) -> str:
    """Return where the time went: the end of the log line."""
    first = ""
    if terms := story.ttft_terms():
        name = "ttft" if story.streamed else "first token"
        first = f" {name}={_sum(terms, 'relay', always=('proxy', 'relay'))}"
    parts = []
    if terms := story.second_token_terms():
        always = ("kv", "handover", "first_step")
        total = _sum(terms, "handover", always=always, after=_parts_of(story, terms))
        parts.append(f"second token +{total}")
    if gaps := story.token_gaps:
        parts.append(f"itl p50 {gaps.median_s * 1e3:.1f} max {gaps.max_s * 1e3:.1f}")
    if story.not_pushed is not None:
        parts.append(f"no push: {story.not_pushed.value}")
    stages = story.prefill_stages or story.decode_stages
    if stages is not None:
        stored = StoredKV(stages.store_tokens, stages.store_bytes, stages.store_s)
        if words := stored.of(story.num_known_prompt_tokens or stages.prompt_tokens):
            parts.append(words)
    if story.prompt is not None:
        parts.append(hits_in_words(story.prompt, story.known))
    if story.decision is not None:
        served_s = story.served_s if story.streamed else None
        parts.append(story.decision.in_words(served_s, story.taken))
    if story.rungs:
        rungs = ",".join(f"{rung.value}({reason})" for rung, reason in story.rungs)
        parts.append(f"ladder {rungs}")
    return first + "".join(f" | {part}" for part in parts)


def _parts_of(story: Story, terms: dict[str, float]) -> dict[str, str]:
    """Return the details, in brackets, after terms of the second token's wait."""
    stages = story.decode_stages
    if stages is None or not stages.kv_bytes:
        return {}
    kv = moved(stages.kv_bytes, stages.kv_transfer_s, digest_s=stages.kv_digest_s)
    if stages.kv_mode == KVMode.PUSH.value:
        if stages.kv_transfer_s - terms["kv"] >= 5e-5:
            kv = f"of {stages.kv_transfer_s * 1e3:.1f}, {kv}"
    elif stages.kv_wait_s >= 5e-5:
        kv = f"wait {stages.kv_wait_s * 1e3:.1f}, {kv}"
    step = f" (step {stages.step_wait_s * 1e3:.1f})" if stages.step_wait_s >= 5e-5 else ""
    return {"kv": f" ({kv})", "handover": step}


def _kv_path(story: Story, outcome: str) -> str:
    """Return how the KV was moved; see `Finished`."""
    stages = story.prefill_stages or story.decode_stages
    has_store = stages is not None and stages.store_tokens > 0
    is_whole = outcome == "ok" and story.stage is Stage.PREFILL  # that engine served all of it
    if story.mode is Mode.DISAGGREGATED and not is_whole:
        return kv_path(story.kv_mode.value if story.kv_mode else "", has_store=has_store)
    return kv_path("local" if story.decode_url or is_whole else "", has_store=has_store)


def _sum(
    terms: dict[str, float],
    remainder: str,
    *,
    always: tuple[str, ...],
    after: dict[str, str] | None = None,
) -> str:
    """Print terms in tenths of milliseconds so that the printed figures add up as well."""
    tenths = {name: round(seconds * 1e4) for name, seconds in terms.items()}
    total = round(sum(terms.values()) * 1e4)
    tenths[remainder] += total - sum(tenths.values())
    shown = [
        f"{name.replace('_', ' ')} {value / 10:.1f}{(after or {}).get(name, '')}"
        for name, value in tenths.items()
        if value or name in always
    ]
    return f"{total / 10:.1f}ms = " + " + ".join(shown)


def _ms(terms: dict[str, float]) -> dict[str, float]:
    """Return milliseconds, rounded so that the parts add up to the sum as it is shown."""
    return {name: round(seconds * 1e3, 3) for name, seconds in terms.items()}


def _at(ordered: list[float], quantile: float) -> float | None:
    return round(ordered[int(quantile * (len(ordered) - 1))], 1) if ordered else None
