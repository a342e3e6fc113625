"""What a proxy did since it was last asked, for its log."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from pdserve.config.schema import Role
from pdserve.observe.stats_log import share
from pdserve.proxy.backend import Health

if TYPE_CHECKING:
    from pdserve.observe.clock import Clock
    from pdserve.proxy.live import LiveRequests
    from pdserve.proxy.services import Services
    from pdserve.wire.finished import Finished


class ProxyStatsLog:
    """Counts the requests that end, and what those that run have got so far."""

    def __init__(self, services: Services, live: LiveRequests, clock: Clock) -> None:
        self._services = services
        self._live = live
        self._clock = clock
        self._since_s = clock.monotonic_s()
        self._tokens_before = (0, 0)
        self._ended_tokens = (0, 0)
        self._begin()

    def _begin(self) -> None:
        self._outcomes: Counter[str] = Counter()
        self._paths: Counter[str] = Counter()
        self._ttfts_ms: list[float] = []
        self._num_prompt = self._num_cached = 0

    def add(self, ended: Finished) -> None:
        """Count a request that has ended."""
        self._outcomes[ended.outcome] += 1
        self._paths[ended.kv_path.removesuffix("+store")] += 1
        if ended.ttft_ms is not None:
            self._ttfts_ms.append(ended.ttft_ms)
        self._num_prompt += ended.prompt_tokens
        self._num_cached += ended.cached_tokens
        num_prompt, num_output = self._ended_tokens
        self._ended_tokens = (num_prompt + ended.prompt_tokens, num_output + ended.output_tokens)

    def read(self) -> dict[str, object] | None:
        """Return what was done since the last call; None of a proxy that is idle."""
        now_s = self._clock.monotonic_s()
        seconds, self._since_s = max(now_s - self._since_s, 1e-3), now_s
        tokens, before = self._tokens(), self._tokens_before
        self._tokens_before = tokens
        if not (self._outcomes or self._live.stories):
            return None
        admission, outcomes = self._services.admission, self._outcomes
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
            "kv_usage": max(
                (round(each.kv_usage, 3) for each in self._services.backends), default=0
            ),
            "prefix_hit_rate": share(self._num_cached, self._num_prompt),
            **{path: self._paths[path] or None for path in ("push", "pull", "local")},
            **{role.value: self._ready(role) for role in Role},
        }
        self._begin()
        return told

    def _tokens(self) -> tuple[int, int]:
        """Prompt and output tokens of all requests since the start, as far as they have come."""
        num_prompt, num_output = self._ended_tokens
        for story in self._live.stories:
            num_prompt += story.num_prompt_tokens
            num_output += story.num_output_tokens
        return num_prompt, num_output

    def _ready(self, role: Role) -> str | None:
        """How many engines of a role are ready, of how many."""
        engines = [each for each in self._services.backends if each.role is role]
        num_ready = sum(each.health is Health.READY for each in engines)
        return f"{num_ready}/{len(engines)}" if engines else None


def _at(ordered: list[float], quantile: float) -> float | None:
    return round(ordered[int(quantile * (len(ordered) - 1))], 1) if ordered else None
