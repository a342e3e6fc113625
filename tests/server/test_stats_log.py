"""The summary of an engine's log: said while it is busy, and only then."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace

import msgspec

from pdserve.observe.clock import ManualClock
from pdserve.observe.stats_log import log_stats
from pdserve.server.account import EngineStatsLog
from pdserve.wire.request import EngineStats

IDLE = EngineStats(
    num_preemptions=0,
    num_steps=5,
    prefix_cache_queries=100,
    prefix_cache_hits=50,
    prompt_tokens=100,
    generation_tokens=40,
    local_compute_tokens=50,
    local_cache_hit_tokens=50,
    external_kv_tokens=0,
    kv_bytes_received=0,
    kv_descriptors=0,
    kv_load_failures={"timeout": 1},
    lease_ends={"released": 2},
    blocks={"free": 8, "held": 2},
    num_blocks=10,
)
BUSY = msgspec.structs.replace(
    IDLE,
    num_running=3,
    num_waiting=1,
    prefix_cache_queries=300,
    prefix_cache_hits=100,
    local_compute_tokens=5050,
    generation_tokens=640,
    lease_ends={"released": 9},
)


def test_it_says_what_was_done_since_the_last_time_and_nothing_of_an_idle_engine():
    clock, client = ManualClock(), SimpleNamespace(stats=IDLE)
    stats = EngineStatsLog(client, clock)
    assert stats.read() is None
    clock.advance(10)
    assert stats.read() is None
    clock.advance(10)
    client.stats = BUSY
    told = stats.read()
    assert told is not None
    assert {name: value for name, value in told.items() if value is not None} == {
        "prompt_tokens_per_s": 500.0,
        "output_tokens_per_s": 60.0,
        "running": 3,
        "waiting": 1,
        "kv_usage": 0.2,
        "prefix_hit_rate": 0.25,
        "handed_over": 7,
    }
    client.stats = msgspec.structs.replace(BUSY, num_running=0, num_waiting=0)
    assert stats.read() is None


async def test_a_line_comes_at_each_interval_that_has_something_to_tell(caplog):
    caplog.set_level(logging.INFO, "pdserve.stats")
    told = iter([{"running": 9}, None, {"running": 1}, None, {"running": 2}])
    task = asyncio.create_task(log_stats(lambda: next(told, None), interval_s=0.001))
    async with asyncio.timeout(30):
        while len(caplog.records) < 2:
            await asyncio.sleep(0.001)
    task.cancel()
    assert [each.getMessage() for each in caplog.records] == ["stats running=1", "stats running=2"]


async def test_where_nobody_wants_it_nothing_is_read(caplog):
    caplog.set_level(logging.WARNING, "pdserve.stats")
    await log_stats(lambda: 1 / 0, interval_s=0.0)  # type: ignore[arg-type, return-value]
