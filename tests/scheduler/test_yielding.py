"""Prompts of tenants over their share, which let others pass between two of their chunks."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pdserve.config.schema import SchedulingPolicy
from pdserve.wire.request import GenerateRequest
from tests.scheduler.invariants import assert_nothing_held
from tests.scheduler.scripted import Engine, make_request, make_ticket
from tests.toy_executor import expected_output

YIELD_S = 1.0
LONG, SHORT = [1] * 40, [2] * 20


def greedy(name: str = "greedy", max_tokens: int = 2, **fields: Any) -> GenerateRequest:
    """A request that yields."""
    request = make_request(name, LONG, max_tokens)
    return msgspec.structs.replace(request, yields_s=YIELD_S, **fields)


def modest(name: str = "modest", **fields: Any) -> GenerateRequest:
    """A request that does not."""
    return msgspec.structs.replace(make_request(name, SHORT, 1), **fields)


def begun(*requests: GenerateRequest, **fields: Any) -> Engine:
    """An engine of 16 tokens a step that has computed the first chunk of these prompts."""
    engine = Engine(**fields)
    for request in requests:
        engine.scheduler.add(request)
    engine.step()
    return engine


def scheduled(engine: Engine) -> dict[str, int]:
    """Run a step; return what it computed."""
    step = engine.submit()
    assert step is not None
    engine.collect()
    return dict(step.num_scheduled_tokens)


def test_a_begun_prompt_that_yields_sits_out_until_the_other_is_computed() -> None:
    engine = begun(greedy())
    engine.scheduler.add(modest())
    assert [scheduled(engine) for _ in range(3)] == [{"modest": 16}, {"modest": 4}, {"greedy": 8}]
    engine.settle()
    assert_nothing_held(engine.scheduler)


def test_who_was_passed_gets_the_same_tokens() -> None:
    engine = Engine()
    request = greedy(max_tokens=4)
    engine.scheduler.add(request)
    tokens: list[int] = []
    for number in range(12):
        tokens += [t for o in engine.step() if o.request_id == "greedy" for t in o.new_token_ids]
        if number < 3:
            engine.scheduler.add(modest(f"modest-{number}"))
    assert tokens == expected_output(LONG, request.sampling)


def test_prompts_that_yield_leave_half_a_step_free() -> None:
    engine = Engine()
    engine.scheduler.add(greedy("first"))
    engine.scheduler.add(greedy("second"))
    assert scheduled(engine) == {"first": 8}


def test_streams_of_a_tenant_over_its_share_go_on_beside_the_others_prompts() -> None:
    engine = begun(greedy(max_tokens=8))
    for _ in range(4):
        engine.step()
    engine.scheduler.add(modest())
    assert scheduled(engine) == {"greedy": 1, "modest": 15}


def test_who_arrives_later_than_it_yields_does_not_pass() -> None:
    engine = begun(greedy())
    engine.clock.advance(YIELD_S + 0.1)
    engine.scheduler.add(modest())
    assert "greedy" in scheduled(engine)


@pytest.mark.parametrize("is_by_priority", [False, True])
def test_a_better_priority_is_passed_only_where_priorities_do_not_count(
    is_by_priority: bool,
) -> None:
    policy = SchedulingPolicy.PRIORITY if is_by_priority else SchedulingPolicy.FCFS
    engine = begun(greedy(priority=-1), policy=policy)
    engine.scheduler.add(modest())
    assert ("greedy" in scheduled(engine)) is is_by_priority


def test_a_prompt_goes_on_while_the_one_that_may_pass_has_no_room() -> None:
    engine = begun(greedy(), num_blocks=6)
    engine.scheduler.add(make_request("large", [2] * 46, 1))
    assert scheduled(engine) == {"greedy": 8}


def test_a_prompt_goes_on_where_the_one_that_may_pass_must_wait_for_its_connector() -> None:
    engine = begun(greedy())
    engine.scheduler.add(modest(remote_decode=True, ticket=make_ticket()))  # D has not registered
    assert list(scheduled(engine)) == ["greedy"]


def test_who_passes_and_lacks_blocks_takes_them_from_the_one_that_it_passed() -> None:
    engine = begun(greedy(), num_blocks=7)
    engine.step()
    engine.step()
    engine.scheduler.add(modest())
    engine.scheduler.add(modest("another"))
    outputs = engine.settle()
    assert {each.request_id for each in outputs if each.finish_reason} == {
        "greedy",
        "modest",
        "another",
    }
    assert_nothing_held(engine.scheduler)
