"""How much of a prompt was cached is told of the prompt, not of each of its choices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.connectors.base import Match
from pdserve.kvcache.manager import SharedPrompt
from pdserve.wire.ids import RequestId
from tests.scheduler.scripted import Engine, failed, make_handoff, make_request

if TYPE_CHECKING:
    from pdserve.wire.request import EngineOutput

PROMPT = [token % 7 for token in range(30)]


def cached(outputs: list[EngineOutput]) -> set[int]:
    """What the outputs with tokens say."""
    return {output.num_cached_tokens for output in outputs if output.new_token_ids}


def test_choices_say_what_was_cached_before_the_first_of_them() -> None:
    engine = Engine()
    told = []
    for group in "ab":
        shared = SharedPrompt()
        for number in range(3):
            engine.scheduler.add(make_request(f"{group}{number}", PROMPT), shared)
        told.append(cached(engine.run()))
    block_size = engine.scheduler.kv.block_size
    assert told == [{0}, {29 // block_size * block_size}]
    assert engine.scheduler.stats().prefix_cache_hits > 3 * (29 // block_size * block_size)


def test_what_a_store_had_counts_as_cached() -> None:
    engine = Engine()
    engine.connector.offers[RequestId("r")] = Match(16, is_async=False)
    engine.scheduler.add(make_request("r", PROMPT))
    assert engine.submit() is not None
    engine.fill(PROMPT, "r", 16)
    assert cached(engine.collect() + engine.run()) == {16}


def test_a_request_that_was_handed_over_says_what_the_prefill_engine_had_cached() -> None:
    engine = Engine()
    handoff = make_handoff("n", [5], num_tokens=len(PROMPT), num_cached_tokens=16)
    engine.scheduler.add(make_request("d", PROMPT, handoff=handoff))
    engine.step()
    outputs = engine.report(failed=[failed("d")])  # then it is computed here
    assert cached(outputs + engine.run()) == {16}
