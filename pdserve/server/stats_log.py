"""What an engine did since it was last asked, for its log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.observe.stats_log import share

if TYPE_CHECKING:
    from pdserve.engine.client import EngineClient
    from pdserve.observe.clock import Clock
    from pdserve.wire.request import EngineStats


class EngineStatsLog:
    """Compares an engine's newest snapshot with the one before."""

    def __init__(self, client: EngineClient, clock: Clock) -> None:
        self._client = client
        self._clock = clock
        self._before: EngineStats | None = None
        self._since_s = clock.monotonic_s()

    def read(self) -> dict[str, object] | None:
        """Return what was done since the last call; None of an engine that is idle.

        What an engine never does (hand KV over, preempt) is left out where it did not happen.
        """
        now, before, now_s = self._client.stats, self._before, self._clock.monotonic_s()
        seconds, self._since_s = max(now_s - self._since_s, 1e-3), now_s
        self._before = now
        if now is None or before is None:
            return None
        num_computed = now.local_compute_tokens - before.local_compute_tokens
        num_generated = now.generation_tokens - before.generation_tokens
        num_open = now.in_brief().num_requests
        if not (num_open or num_computed or num_generated):
            return None
        return {
            "prompt_tokens_per_s": round(num_computed / seconds, 1),
            "output_tokens_per_s": round(num_generated / seconds, 1),
            "running": now.num_running,
            "waiting": now.num_waiting,
            "receiving": now.num_receiving or None,
            "kv_usage": round(now.kv_usage, 3),
            "prefix_hit_rate": share(
                now.prefix_cache_hits - before.prefix_cache_hits,
                now.prefix_cache_queries - before.prefix_cache_queries,
            ),
            "handed_over": _added(now.lease_ends, before.lease_ends),
            "taken_over": _added(now.kv_loads, before.kv_loads),
            "not_taken_over": _added(now.kv_load_failures, before.kv_load_failures),
            "preempted": now.num_preemptions - before.num_preemptions or None,
        }


def _added(now: dict[str, int], before: dict[str, int]) -> int | None:
    return sum(now.values()) - sum(before.values()) or None
