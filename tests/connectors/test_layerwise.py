"""The learned threshold between layer by layer and whole chunks, against modelled machines."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from pdserve.connectors.transfer.pushes import Observation
from pdserve.connectors.transfer.worker import LayerwiseChoice

LENGTHS = (16, 40, 100, 200, 400, 900, 2000, 4000)


@dataclass
class Machine:
    """What a step costs, with noise.

    Layer by layer a post of each of 32 layers slows the step down, and one layer's bytes are
    left at its end; else all of them.
    """

    post_s: float
    token_s: float = 50e-6
    write_s: float = 10e-6
    noise: float = 0.2
    num_layers: int = 32

    def __post_init__(self) -> None:
        self.random = random.Random(7)

    def run(self, num_tokens: int, *, layerwise: bool) -> tuple[float, float]:
        """Seconds of the step, and until the last byte after it."""
        step_s = self.token_s * num_tokens * (1 + self.noise * self.random.random())
        exposed_s = self.write_s * num_tokens
        if not layerwise:
            return step_s, exposed_s
        return step_s + self.num_layers * self.post_s, exposed_s / self.num_layers

    @property
    def threshold(self) -> float:
        """Tokens from which on layer by layer is cheaper."""
        return self.num_layers * self.post_s / (self.write_s * (1 - 1 / self.num_layers))


def teach(machine: Machine, choice: LayerwiseChoice, num_steps: int) -> None:
    for step in range(num_steps):
        num_tokens = LENGTHS[step % len(LENGTHS)]
        way = choice.choose(num_tokens)
        step_s, exposed_s = machine.run(num_tokens, layerwise=way)
        choice.observe(Observation(num_tokens, way, step_s, exposed_s))


@pytest.mark.parametrize("post_s", [10e-6, 80e-6, 500e-6, 5e-3])
def test_it_learns_the_right_side_of_the_threshold_of_a_machine(post_s: float) -> None:
    machine, choice = Machine(post_s), LayerwiseChoice()
    teach(machine, choice, 60 * len(LENGTHS))
    clear = [n for n in LENGTHS if not machine.threshold / 2 < n < machine.threshold * 2]
    assert len(clear) >= 5
    assert [choice.is_better(n) for n in clear] == [n > machine.threshold for n in clear]


def test_short_steps_go_whole_and_long_ones_layer_by_layer_before_anything_is_known() -> None:
    choice = LayerwiseChoice()
    assert [choice.choose(n) for n in (16, 128, 512, 4096)] == [False, False, True, True]


def test_once_it_knows_it_tries_the_other_way_in_one_step_of_sixteen_only() -> None:
    machine, choice = Machine(post_s=1e-6), LayerwiseChoice()
    teach(machine, choice, 20 * len(LENGTHS))
    ways = [choice.choose(2000) for _ in range(160)]
    assert ways.count(False) == 10


def test_it_changes_its_mind_when_the_machine_does() -> None:
    choice = LayerwiseChoice()
    teach(Machine(post_s=1e-6), choice, 60 * len(LENGTHS))
    assert choice.is_better(900)
    teach(Machine(post_s=5e-3), choice, 400 * len(LENGTHS))
    assert not choice.is_better(900)


def test_one_slow_step_does_not_decide() -> None:
    machine, choice = Machine(post_s=1e-6, noise=0.0), LayerwiseChoice()
    teach(machine, choice, 20 * len(LENGTHS))
    choice.observe(Observation(2000, layerwise=True, step_s=30.0, exposed_s=1.0))
    assert choice.is_better(2000)


def test_what_it_answers_follows_from_what_it_has_seen() -> None:
    ways = []
    for _ in range(2):
        machine, choice = Machine(post_s=80e-6), LayerwiseChoice()
        teach(machine, choice, 100)
        ways.append([choice.choose(n) for n in LENGTHS * 20])
    assert ways[0] == ways[1]
