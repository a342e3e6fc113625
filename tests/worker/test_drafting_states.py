"""Drafters that read what the model computes: what they are shown, when, and of which rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from pdserve.config.speculative import SpeculativeConfig
from pdserve.worker.drafting.drafts import Drafts
from pdserve.worker.drafting.ngram import NgramDrafter
from tests.worker.driver import GREEDY, TINY, params
from tests.worker.test_model_runner import prompt_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from pdserve.wire.sampling import SamplingParams
    from pdserve.wire.step import NewRequest
    from pdserve.worker.drafting.drafter import StepStates
    from tests.worker.driver import Driver

VOCAB = TINY["vocab_size"]
NUM_LAYERS = TINY["num_hidden_layers"]
NUM_ROWS = 4
DRAFTING = SpeculativeConfig(method="ngram", num_speculative_tokens=NUM_ROWS)


class Witness:
    """Keeps what it is shown of each request by position, and drafts what the test says."""

    def __init__(self, draft: Callable[[str, int], list[int]]) -> None:
        self.aux_layers = (0, 1, NUM_LAYERS)
        self.hidden: dict[str, dict[int, Tensor]] = {}
        self.aux: dict[str, dict[int, tuple[Tensor, ...]]] = {}
        self.followers: dict[str, dict[int, int]] = {}
        self.asked: list[dict[str, int]] = []
        self.num_steps = 0
        self._draft = draft
        self._names: dict[int, str] = {}
        self._num_outputs: dict[int, int] = {}

    def add(self, row: int, request: NewRequest) -> None:
        name = self._names[row] = str(request.request_id)
        self._num_outputs[row] = len(request.output_token_ids)
        for shown in (self.hidden, self.aux, self.followers):
            shown.setdefault(name, {})

    def remove(self, row: int) -> None:
        del self._names[row]

    def note(self, row: int, token_ids: Sequence[int]) -> None:
        self._num_outputs[row] += len(token_ids)

    def propose(self, wanted: Mapping[int, int]) -> dict[int, list[int]]:
        if wanted:
            self.asked.append({self._names[row]: most for row, most in wanted.items()})
        return {row: self._draft(self._names[row], self._num_outputs[row]) for row in wanted}

    def observe(self, states: StepStates) -> None:
        self.num_steps += 1
        assert len(states.hidden) == states.query_start[-1] == len(states.inputs.token_ids)
        for index, row in enumerate(states.rows.tolist()):
            name, tokens = self._names[row], states.sampled[index]
            first, start = int(states.query_start[index]), int(states.start[index])
            num_valid = int(states.num_valid[index])
            for at in range(num_valid):
                position = start + at
                assert states.inputs.positions[first + at] == position
                self.hidden[name][position] = states.hidden[first + at].clone()
                self.aux[name][position] = tuple(each[first + at].clone() for each in states.aux)
            for back, token_id in enumerate(reversed(tokens), 1):
                self.followers[name][start + num_valid - back] = token_id


def witnessed(driver: Driver, draft: Callable[[str, int], list[int]]) -> Witness:
    """Have a worker draft by a witness."""
    witness = Witness(draft)
    runner = driver.worker._runner
    assert runner is not None
    runner._drafts = Drafts(
        NgramDrafter(longest=VOCAB, shortest=VOCAB),
        vocab_size=VOCAB,
        max_tokens=NUM_ROWS,
        in_step=witness,
        reader=witness,
    )
    runner._forward._aux_layers = witness.aux_layers
    return witness


REQUESTS: dict[str, tuple[list[int], SamplingParams]] = {
    "greedy": (prompt_of(60, 1), GREEDY),
    "sampled": (prompt_of(33, 2), params(temperature=0.9, seed=4)),
}


def run(driver: Driver, *, rows: int, finishes: bool = True) -> dict[str, list[int]]:
    """Serve the requests in chunks of 25 tokens, with so many rows for drafts, until 24 are out."""
    for name, (prompt, sampling) in REQUESTS.items():
        driver.add(name, prompt, sampling)
    while running := [name for name in REQUESTS if len(driver.outputs[name]) < 24]:
        num = {name: min(driver.remaining(name), 25) for name in running}
        driver.step(num, {name: rows for name in running if driver.outputs[name] and rows})
        if finishes:
            driver.worker.finish_step()
    return {name: driver.outputs[name][:24] for name in REQUESTS}


@pytest.mark.parametrize("finishes", [True, False])
def test_what_is_shown_of_a_position_is_the_same_whatever_was_drafted(
    make_driver: Callable[..., Driver], finishes: bool
) -> None:
    driver = make_driver(speculative=DRAFTING)
    plain = witnessed(driver, lambda *_: [])
    wanted = run(driver, rows=0)
    for name in REQUESTS:
        driver.drop(name)

    def half_right(name: str, num: int) -> list[int]:
        draft = wanted[name][num : num + NUM_ROWS]
        return [token if (num + at) % 3 else 0 for at, token in enumerate(draft)]

    witness = witnessed(driver, half_right)
    assert run(driver, rows=NUM_ROWS, finishes=finishes) == wanted
    driver.worker.finish_step()
    assert witness.num_steps < plain.num_steps
    for name, (prompt, _) in REQUESTS.items():
        assert list(plain.hidden[name]) == list(range(len(prompt) + 23))
        for position, hidden in plain.hidden[name].items():
            assert torch.equal(witness.hidden[name][position], hidden)
            shown = zip(witness.aux[name][position], plain.aux[name][position], strict=True)
            assert all(torch.equal(one, other) for one, other in shown)
            if position >= len(prompt) - 1:
                token_id = wanted[name][position - len(prompt) + 1]
                assert witness.followers[name][position] == token_id


def test_the_stream_before_the_first_layer_is_the_embedding_and_the_last_is_what_is_normed(
    make_driver: Callable[..., Driver],
) -> None:
    driver = make_driver(speculative=DRAFTING)
    witness = witnessed(driver, lambda *_: [])
    driver.add("r", [5, 6, 5])
    driver.step({"r": 3})
    driver.worker.finish_step()
    first, second, third = (witness.aux["r"][position] for position in range(3))
    assert torch.equal(first[0], third[0])
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(first[1], third[1])
    normed = third[2] / third[2].square().mean().sqrt()
    torch.testing.assert_close(witness.hidden["r"][2], normed, rtol=1e-3, atol=1e-3)


def test_drafts_are_asked_for_where_there_is_room_for_them_and_nowhere_else(
    make_driver: Callable[..., Driver],
) -> None:
    driver = make_driver(speculative=DRAFTING)
    witness = witnessed(driver, lambda *_: [1, 2, 3, 4])
    for name in "abc":
        driver.add(name, prompt_of(9, ord(name)))
    driver.step(dict.fromkeys("abc", 9))
    driver.worker.finish_step()
    driver.step(dict.fromkeys("abc", 1))
    driver.worker.finish_step()
    assert witness.asked == []
    answer = driver.step(dict.fromkeys("abc", 1), {"a": 3, "c": 1})
    assert witness.asked == [{"a": 3, "c": 1}]
    assert answer.num_drafted == {"a": 3, "c": 1}
