"""How much state machines are run, and that they have met every situation that they are for."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Protocol, cast

from hypothesis import seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

MAX_ROUNDS = 20


def in_ci(num_examples: int, num_steps: int = 40) -> settings:
    """Settings of a machine that is run on so many examples in CI, in proportion elsewhere."""
    share = settings().max_examples / settings.get_profile("ci").max_examples
    return settings(
        max_examples=math.ceil(num_examples * share), stateful_step_count=num_steps, deadline=None
    )


class _Counting(Protocol):
    reached: Counter[str]


def run_until_reached(
    machine: type[RuleBasedStateMachine],
    wanted: Sequence[str],
    *,
    max_examples: int,
    stateful_step_count: int = 40,
    first_seed: int = 0,
) -> None:
    """Run a machine, round after round, until its ``reached`` has counted every wanted name.

    A machine that never gets there would prove nothing.

    Args:
        max_examples: Of a round in CI; of others in proportion.
        first_seed: Of a profile that derandomizes, the first round: it gets there soon.

    Raises:
        AssertionError: An example failed, or some name was not reached in `MAX_ROUNDS`.
    """
    reached = cast("_Counting", machine).reached
    reached.clear()
    options = in_ci(max_examples, stateful_step_count)
    for number in range(first_seed, first_seed + MAX_ROUNDS):
        # Each of another seed: under a profile that derandomizes, they would be the same.
        is_free = number == first_seed and not (number and options.derandomize)
        chosen = machine if is_free else seed(number)(machine)
        run_state_machine_as_test(chosen, settings=options)
        if all(reached[name] for name in wanted):
            return
    missing = [name for name in wanted if not reached[name]]
    raise AssertionError(f"never reached: {missing}; reached: {sorted(reached.items())}")
