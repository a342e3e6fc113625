"""The summary of a proxy's log: said while it is busy, and only then."""

from __future__ import annotations

import pytest

from tests.proxy.scripted import ScriptedEngine


async def test_it_sums_up_what_was_done_since_it_was_last_read_and_is_silent_when_idle(make_stack):
    prefill, decode = (
        ScriptedEngine("prefill", can_push=True),
        ScriptedEngine("decode", can_push=True),
    )
    prefill.stages = {"cached_tokens": 3}
    stack = await make_stack([prefill], [decode])
    stats = stack.proxy.live.stats
    assert stats() is None
    for _ in range(2):
        await stack.stream()
    await stack.refused(["no object"])
    told = stats()
    assert told is not None
    assert told["prompt_tokens_per_s"] > 0
    assert told["output_tokens_per_s"] > 0
    assert told["ttft_p50_ms"] > 0
    names = "ended failed running waiting prefix_hit_rate push pull local prefill decode"
    assert {name: told[name] for name in names.split()} == {
        "ended": 3,
        "failed": 0,
        "running": 0,
        "waiting": 0,
        "prefix_hit_rate": pytest.approx(3 / 7, abs=1e-3),
        "push": 2,
        "pull": None,
        "local": None,
        "prefill": "1/1",
        "decode": "1/1",
    }
    assert stats() is None


async def test_tokens_of_a_request_that_runs_on_are_counted_as_they_come(make_stack):
    engine = ScriptedEngine("both")
    stack = await make_stack([engine], [engine])
    stats = stack.proxy.live.stats
    engine.gate.clear()
    async with stack.post({"prompt": "hi", "max_tokens": 4, "stream": True}) as response:
        await response.content.readany()
        told = stats()
        assert (told["ended"], told["running"]) == (0, 1)
        assert told["output_tokens_per_s"] > 0
        engine.gate.set()
        await response.read()
    assert stats()["ended"] == 1
