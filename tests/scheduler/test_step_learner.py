"""What an engine learns of its own steps, for proxies to hear."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING

import pytest

from pdserve.observe.linear_fit import LinearFit
from pdserve.wire.learned import FitSums
from tests.scheduler.scripted import Engine, make_request
from tests.toy_executor import TOY_VOCAB_SIZE

if TYPE_CHECKING:
    from pdserve.wire.learned import LearnedTimes
    from pdserve.wire.step import SchedulerOutput

PROMPT_S = (2e-3, 1e-4, 1e-6)
"""For each prompt, each of its tokens, each pair of one and one before it."""
STEP_S = (5e-3, 1e-3, 1e-5)
"""For a step of streams, each of them, each token of their KV."""


def seconds_of(step: SchedulerOutput) -> float:
    """What a step takes; a request's name begins with the length of its prompt."""
    before = {new.request_id: new.num_computed_tokens for new in step.new_requests}
    before |= dict(zip(step.known_ids, step.num_computed_tokens, strict=True))
    streams = [before[each] + 1 for each, num in step.num_scheduled_tokens.items() if num == 1]
    seconds = STEP_S[0] + STEP_S[1] * len(streams) + STEP_S[2] * sum(streams) if streams else 0.0
    for each, num in step.num_scheduled_tokens.items():
        if num > 1:
            is_whole = before[each] + num == int(each.partition("-")[0])
            pairs = num * (before[each] + num / 2)
            seconds += PROMPT_S[0] * is_whole + PROMPT_S[1] * num + PROMPT_S[2] * pairs
    return seconds


def played(num_steps: int = 500, **fields: bool | int) -> Engine:
    """An engine that has served prompts of several lengths, with and without streams beside."""
    rng = random.Random(0)
    engine = Engine(num_blocks=200, max_model_len=200, max_num_batched_tokens=64, **fields)
    for number in range(num_steps):
        if rng.random() < 0.1:
            num = rng.choice([20, 60, 110])
            prompt = [rng.randrange(TOY_VOCAB_SIZE) for _ in range(num)]
            engine.scheduler.add(make_request(f"{num}-{number}", prompt, rng.choice([5, 15])))
        step = engine.submit()
        engine.clock.advance(0.05 if step is None else seconds_of(step))
        engine.collect()
    return engine


def told(engine: Engine) -> LearnedTimes | None:
    return engine.scheduler.telemetry.learned(engine.clock.monotonic_s())


def weights(sums: FitSums) -> list[float]:
    fit = LinearFit(3)
    fit.begin_with(sums)
    return fit.weights


def test_what_prompts_and_steps_take_is_learned_from_steps_of_both():
    learned = told(played(tells=True))
    assert learned is not None
    assert weights(learned.prompts) == pytest.approx(PROMPT_S, rel=0.05)
    assert weights(learned.steps) == pytest.approx(STEP_S, rel=0.05)


@pytest.mark.parametrize("fields", [{"tells": False}, {"max_drafted": 2}, {"num_stages": 2}])
def test_an_engine_learns_nothing_that_nobody_is_told_or_whose_steps_are_not_a_token_each(fields):
    assert told(played(30, **{"tells": True, **fields})) is None


def test_until_it_knows_something_it_says_nothing():
    engine = Engine(tells=True)
    assert told(engine) is None


def test_at_first_it_says_more_as_soon_as_it_knows_from_twice_as_much():
    engine = Engine(tells=True, num_blocks=200, max_model_len=200)
    start_s = engine.clock.monotonic_s()
    said: list[LearnedTimes] = []
    for number in range(40):
        engine.scheduler.add(make_request(f"20-{number}", [number % 8, number // 8] * 10, 1))
        while (step := engine.submit()) is not None:
            engine.clock.advance(seconds_of(step))
            engine.collect()
        learned = told(engine)
        if learned is not None and learned not in said:
            said.append(learned)
    assert engine.clock.monotonic_s() < start_s + 1.0
    nums = [each.prompts.num for each in said]
    assert len(nums) >= 3
    assert all(b >= 1.8 * a for a, b in itertools.pairwise(nums))


def test_it_says_something_else_a_second_later_at_the_earliest():
    engine = played(tells=True)
    learned = told(engine)
    engine.scheduler.add(make_request("20-x", [1] * 20, 8))
    engine.clock.advance(0.5)
    step = engine.submit()
    engine.clock.advance(seconds_of(step))
    engine.collect()
    assert told(engine) is learned
    engine.clock.advance(1.0)
    assert told(engine) != learned
