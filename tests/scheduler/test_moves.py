"""A request that runs goes on at another engine, with its KV and with the same tokens."""

from __future__ import annotations

import pytest

from pdserve.connectors.memory.exchange import Exchange
from pdserve.observe.clock import ManualClock
from pdserve.wire.ids import RequestId
from pdserve.wire.request import EngineOutput, FinishReason, GenerateRequest
from pdserve.wire.transfer import KVHandoff
from tests.scheduler.invariants import assert_nothing_held
from tests.toy import ToyEngine, sampling
from tests.toy_executor import expected_output

PROMPT = [1] * 20
MAX_TOKENS = 12
EXPECTED = expected_output(PROMPT, sampling(MAX_TOKENS, ignore_eos=True))


class Fleet:
    """Engines that reach one another."""

    def __init__(self, *names: str, **fields: int) -> None:
        clock, exchange = ManualClock(), Exchange()
        self.engines = [ToyEngine(name, exchange, clock, **fields) for name in names]

    def assert_nothing_held(self) -> None:
        for _ in range(3):
            for engine in self.engines:
                engine.settle()
        for engine in self.engines:
            assert_nothing_held(engine.scheduler)


def request(request_id: str = "r", handoff: KVHandoff | None = None) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId(request_id),
        prompt_token_ids=PROMPT,
        sampling=sampling(MAX_TOKENS, ignore_eos=True),
        arrival_s=0.0,
        handoff=handoff,
    )


def tokens_of(outputs: list[EngineOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


def run_until(engine: ToyEngine, num_tokens: int) -> list[EngineOutput]:
    outputs: list[EngineOutput] = []
    while len(tokens_of(outputs)) < num_tokens:
        outputs += engine.step()
    return outputs


def give_away(engine: ToyEngine, request_id: str = "r") -> tuple[list[EngineOutput], KVHandoff]:
    engine.scheduler.hand_over([RequestId(request_id)])
    outputs = engine.settle()
    last = outputs[-1]
    assert last.finish_reason is FinishReason.HANDOFF
    assert last.handoff is not None
    return outputs, last.handoff


@pytest.mark.parametrize("num_tokens", [1, 2, 5, 9])
@pytest.mark.parametrize("num_stages", [1, 2])
def test_it_goes_on_where_it_stopped_with_the_kv_of_all_that_came_before(num_tokens, num_stages):
    fleet = Fleet("a", "b", num_stages=num_stages)
    a, b = fleet.engines
    a.scheduler.add(request())
    before = run_until(a, num_tokens)
    more, handoff = give_away(a)
    first = tokens_of(before + more)
    assert handoff.first_token_ids == first
    assert handoff.num_tokens == len(PROMPT) + len(first) - 1
    b.scheduler.add(request("s", handoff))
    outputs = b.settle()
    assert tokens_of(outputs) == EXPECTED
    stats = b.scheduler.stats()
    assert (stats.kv_loads["pull"], stats.local_compute_tokens) == (1, 0)
    assert stats.generation_tokens == MAX_TOKENS - len(first)
    fleet.assert_nothing_held()
    assert a.scheduler.stats().lease_ends["read"] == 1


def test_steps_that_are_under_way_come_to_their_end_before_it_goes():
    fleet = Fleet("a", "b")
    a, b = fleet.engines
    a.scheduler.add(request())
    before = run_until(a, 3)
    a.submit()
    a.submit()
    assert len(a.in_flight) >= 2
    more, handoff = give_away(a)
    assert len(tokens_of(before + more)) == len(handoff.first_token_ids) > 4
    b.scheduler.add(request("s", handoff))
    assert tokens_of(b.settle()) == EXPECTED
    fleet.assert_nothing_held()


def test_drafts_that_are_under_way_are_taken_too():
    fleet = Fleet("a", "b", max_drafted=3)
    a, b = fleet.engines
    a.scheduler.add(request())
    before = run_until(a, 4)
    more, handoff = give_away(a)
    assert tokens_of(before + more) == handoff.first_token_ids
    b.scheduler.add(request("s", handoff))
    assert tokens_of(b.settle()) == EXPECTED
    fleet.assert_nothing_held()


def test_one_whose_prompt_is_computed_goes_with_its_first_token():
    fleet = Fleet("a", "b")
    a, b = fleet.engines
    a.scheduler.add(request())
    a.step()  # a part of the prompt
    _, handoff = give_away(a)
    assert handoff.first_token_ids == EXPECTED[:1]
    b.scheduler.add(request("s", handoff))
    assert tokens_of(b.settle()) == EXPECTED
    fleet.assert_nothing_held()


def test_it_may_go_again_and_again_and_come_back():
    fleet = Fleet("a", "b")
    a, b = fleet.engines
    a.scheduler.add(request("r0"))
    outputs, source, target = run_until(a, 2), a, b
    for turn in range(1, 4):
        _, handoff = give_away(source, f"r{turn - 1}")
        target.scheduler.add(request(f"r{turn}", handoff))
        outputs = run_until(target, len(handoff.first_token_ids) + 1)
        source, target = target, source
    assert tokens_of(outputs + source.settle()) == EXPECTED
    fleet.assert_nothing_held()


def test_one_whose_last_token_comes_meanwhile_ends_where_it_is():
    fleet = Fleet("a")
    (a,) = fleet.engines
    a.scheduler.add(request())
    outputs = run_until(a, MAX_TOKENS - 1)
    a.submit()
    a.scheduler.hand_over([RequestId("r")])
    outputs += a.settle()
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert tokens_of(outputs) == EXPECTED
    fleet.assert_nothing_held()


def test_one_that_waits_or_is_unknown_stays():
    fleet = Fleet("a", max_num_seqs=1)
    (a,) = fleet.engines
    a.scheduler.add(request("running"))
    a.scheduler.add(request("waiting"))
    a.step()
    a.scheduler.hand_over([RequestId("waiting"), RequestId("unknown")])
    outputs = a.settle()
    assert [each.finish_reason for each in outputs if each.finish_reason] == [
        FinishReason.LENGTH,
        FinishReason.LENGTH,
    ]
    fleet.assert_nothing_held()


def test_where_its_engine_dies_before_it_was_read_all_is_computed_again_with_the_same_tokens():
    fleet = Fleet("a", "b")
    a, b = fleet.engines
    a.scheduler.add(request())
    run_until(a, 5)
    _, handoff = give_away(a)
    a.close()
    b.scheduler.add(request("s", handoff))
    assert tokens_of(b.settle()) == EXPECTED
    assert_nothing_held(b.scheduler)


def test_one_that_nobody_reads_is_free_when_its_lease_is_over():
    fleet = Fleet("a")
    (a,) = fleet.engines
    a.scheduler.add(request())
    run_until(a, 5)
    _, handoff = give_away(a)
    a.scheduler.release_lease(handoff.nonce)
    fleet.assert_nothing_held()


def test_a_handoff_whose_tokens_were_edited_is_refused():
    """Their number says how much KV there is."""
    fleet = Fleet("a", "b")
    a, b = fleet.engines
    a.scheduler.add(request())
    run_until(a, 5)
    _, handoff = give_away(a)
    handoff.first_token_ids.append(1)
    b.scheduler.add(request("s", handoff))
    (output,) = b.settle()
    assert output.finish_reason is FinishReason.ERROR
    assert "tokens is" in str(output.error)


def test_one_whose_prompt_is_computed_here_again_goes_once_no_step_computes_it():
    """All of its tokens but the last are in a step that is not back, and samples nothing."""
    fleet = Fleet("a", "b", "c", max_num_batched_tokens=len(PROMPT) + 1)
    a, b, c = fleet.engines
    a.scheduler.add(request())
    run_until(a, 1)
    _, handoff = give_away(a)
    a.close()
    b.scheduler.add(request("s", handoff))
    while not b.in_flight:
        b.collect()
        b.submit()
    assert handoff.num_tokens == b.in_flight[-1].num_scheduled_tokens["s"]
    b.scheduler.hand_over([RequestId("s")])
    early = b.report()
    assert not early, "it has gone while a step wrote its blocks"
    _, handoff = give_away(b, "s")
    c.scheduler.add(request("t", handoff))
    assert tokens_of(c.settle()) == EXPECTED
    assert c.scheduler.stats().kv_loads["pull"] == 1
    for engine in (b, c):
        engine.settle()
        assert_nothing_held(engine.scheduler)
