"""The usage that a client reads, whichever engines its tokens came from."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pdserve.config.http import KVTransfer
from tests.proxy.test_with_server import COMPLETIONS, ask, deployed, text
from tests.server.conftest import EOS, events

__all__ = ["text"]

PROMPT = list(range(20, 40))
BODY = {"prompt": PROMPT, "max_tokens": 12, "seed": 5, "temperature": 1.0}
CONTINUOUS = {
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}


def figures(chunk: dict[str, Any]) -> tuple[int, int, int]:
    """Prompt, cached and output tokens."""
    usage = chunk["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return usage["prompt_tokens"], cached, usage["completion_tokens"]


@pytest.mark.parametrize("mode", [KVTransfer.PULL, KVTransfer.PUSH])
async def test_what_the_prefill_engine_had_cached_is_what_the_client_reads(text, mode):
    prefill = {"num_cached_tokens": 16, "can_push": True}
    decode = {"num_cached_tokens": 3, "can_push": True}
    async with deployed(text, prefill=[prefill], decode=[decode], kv_mode=mode) as both:
        answer = msgspec.json.decode(await ask(both.url, COMPLETIONS, BODY))
        assert figures(answer) == (20, 16, 12)
        chunks = events(await ask(both.url, COMPLETIONS, BODY | CONTINUOUS))
        assert [figures(chunk) for chunk in chunks] == [
            *((20, 16, num) for num in range(1, 13)),
            (20, 16, 12),
        ]
        loads = both.servers[1].engine.stats.kv_loads
        assert loads[mode.value] == 2


async def test_cached_tokens_of_choices_that_ended_at_the_prefill_engine_count_once(text):
    def next_token(request, output):
        ends_at_once = request.prompt_token_ids[0] == 50 or request.sampling.seed % 2
        return EOS if ends_at_once and not output else 60 + len(output)

    parameters = {"num_cached_tokens": 4, "next_token": next_token}
    body = BODY | {"prompt": [PROMPT, [50] * 10], "n": 3}
    async with deployed(text, prefill=[parameters], decode=[parameters]) as both:
        answer = msgspec.json.decode(await ask(both.url, COMPLETIONS, body))
        assert "stop" in {choice["finish_reason"] for choice in answer["choices"]}
        assert figures(answer)[:2] == (30, 8)
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        *_, last = events(await ask(both.url, COMPLETIONS, body | stream))
        assert last["usage"] == answer["usage"]


async def test_figures_go_on_where_a_lost_stream_is_resumed(text):
    decode = [
        {"num_cached_tokens": 3, "die_after": 5},
        {"num_cached_tokens": 7},
    ]
    async with deployed(text, prefill=[{"num_cached_tokens": 16}], decode=decode) as three:
        chunks = events(await ask(three.url, COMPLETIONS, BODY | CONTINUOUS))
        assert three.servers[1].engine.dead_reason is not None
    assert [figures(chunk) for chunk in chunks] == [
        *((20, 16, num) for num in range(1, 13)),
        (20, 16, 12),
    ]
