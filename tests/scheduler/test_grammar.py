"""Requests with grammars: those that sit a step out, and those that cannot go on."""

from __future__ import annotations

import pytest

from pdserve.connectors.memory.exchange import Exchange
from pdserve.observe.clock import ManualClock
from pdserve.wire.ids import RequestId
from pdserve.wire.request import EngineOutput, ErrorCode, FinishReason
from pdserve.wire.sampling import Grammar
from pdserve.wire.transfer import LoadFailure
from tests.scheduler.invariants import assert_nothing_held
from tests.scheduler.scripted import Engine, make_handoff, make_request, received
from tests.toy import ToyEngine
from tests.toy_executor import TOY_EOS, expected_output

EVEN = Grammar(text="the toy's")
PROMPT = [1] * 20


def tokens_of(outputs: list[EngineOutput], name: str) -> list[int]:
    return [t for each in outputs if each.request_id == name for t in each.new_token_ids]


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("num_blocks", [16, 9])
def test_rows_that_sit_out_get_the_tokens_that_they_would_have_got(
    num_stages: int, num_blocks: int
) -> None:
    """Two steps in flight, pipelines, and so few blocks that requests are preempted."""
    engine = ToyEngine("e", Exchange(), ManualClock(), num_blocks=num_blocks, num_stages=num_stages)
    requests = [
        make_request(f"r{seed}", [seed + 1] * (5 + seed), 20, seed=seed, grammar=grammar)
        for seed, grammar in enumerate((EVEN, None, EVEN, EVEN))
    ]
    for request in requests:
        engine.scheduler.add(request)
    outputs = engine.settle()
    stats = engine.scheduler.stats()
    assert stats.num_steps > 20 + 5, "no row sat out"
    assert stats.num_sat_out > 5
    for request in requests:
        wanted = expected_output(request.prompt_token_ids, request.sampling)
        assert tokens_of(outputs, request.request_id) == wanted
    assert_nothing_held(engine.scheduler)
    engine.close()


def test_a_prompt_that_sits_out_keeps_its_log_probabilities() -> None:
    engine = Engine()
    engine.scheduler.add(make_request("r", PROMPT, 4, grammar=EVEN, prompt_logprobs=1))
    engine.submit()
    engine.submit()
    outputs = engine.collect(unready_ids=[RequestId("r")], request_ids=[], sampled_token_ids=[])
    outputs += engine.run()
    first = next(output for output in outputs if output.new_token_ids)
    assert first.prompt_logprobs is not None
    assert len(first.prompt_logprobs) == len(PROMPT)


def test_an_end_that_a_grammar_forces_ends_before_the_minimum() -> None:
    engine = Engine()
    ids = [RequestId("free"), RequestId("bound")]
    for name, grammar in (("free", None), ("bound", EVEN)):
        engine.scheduler.add(
            make_request(name, [1] * 4, 6, min_tokens=4, ignore_eos=False, grammar=grammar)
        )
    engine.submit()
    outputs = engine.collect(request_ids=ids, sampled_token_ids=[[TOY_EOS]] * 2, unready_ids=[])
    assert {each.request_id: each.finish_reason for each in outputs} == {
        "free": None,
        "bound": FinishReason.STOP,
    }


def test_a_dead_end_ends_its_request_alone_and_says_why() -> None:
    engine = Engine()
    for name in ("bound", "other"):
        engine.scheduler.add(make_request(name, [2] * 8, 8))
    engine.submit()
    found = engine.collect(
        dead_ends={RequestId("bound"): "nothing is left"},
        request_ids=[RequestId("other")],
        sampled_token_ids=[[0]],
    )
    (error,) = [each for each in found if each.request_id == "bound"]
    assert error.finish_reason is FinishReason.ERROR
    assert error.error_code == ErrorCode.GRAMMAR_DEAD_END.value
    assert "nothing is left" in (error.error or "")
    assert "behind 0 tokens" in (error.error or "")
    assert tokens_of(found, "other") == [0]


def test_a_first_token_that_the_grammar_does_not_allow_refuses_the_handoff() -> None:
    engine = Engine()
    handoff = make_handoff("lease", [3], num_tokens=len(PROMPT))
    engine.scheduler.add(make_request("r", PROMPT, handoff=handoff, grammar=EVEN))
    engine.submit_all()
    engine.fill(PROMPT, "r")
    engine.report(received=[received("r")])
    for _ in range(2):  # the next step is in flight when it is found
        assert engine.submit() is not None
    outputs = engine.collect() + engine.settle()
    (error,) = [each for each in outputs if each.finish_reason]
    assert error.error_code == ErrorCode.HANDOFF_REFUSED.value
    failures = engine.scheduler.stats().kv_load_failures
    assert failures[LoadFailure.INCOMPATIBLE.value] == 1
    assert_nothing_held(engine.scheduler)


@pytest.mark.parametrize(("remote_decode", "max_tokens"), [(True, 1), (False, 8)])
def test_of_what_another_engine_goes_on_with_ranks_are_asked_for_one_token(
    remote_decode: bool, max_tokens: int
) -> None:
    """Behind the last one they work out nothing."""
    engine = Engine()
    engine.scheduler.add(make_request("r", PROMPT, 8, grammar=EVEN, remote_decode=remote_decode))
    step = engine.submit()
    assert [each.sampling.max_tokens for each in step.new_requests] == [max_tokens]
