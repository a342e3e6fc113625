"""Which tokens are drafted for requests that draw theirs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from pdserve.worker.drafting.guesses import Guesses

if TYPE_CHECKING:
    from numpy.typing import NDArray

LIKELIEST, DRAWN = 5, 7


class Source:
    """Always knows the same two tokens, and counts how often it draws one."""

    def __init__(self) -> None:
        self.num_drawn = 0
        self.asked: list[int] = []

    def __call__(
        self,
        logits: torch.Tensor,
        rows: NDArray[np.int64],
        num_outputs: NDArray[np.int64],
        *,
        draws: bool,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        self.num_drawn += draws
        self.asked += num_outputs.tolist()
        likeliest = np.full(len(rows), LIKELIEST)
        return likeliest, np.full(len(rows), DRAWN) if draws else likeliest


def draft(guesses: Guesses, row: int, num_outputs: int, length: int) -> list[int]:
    rows, outputs = np.array([row]), np.array([num_outputs])
    logits = torch.zeros(1, 9)
    return [int(guesses.choose(logits, rows, outputs, depth)[0]) for depth in range(length)]


def test_each_token_is_drawn_with_the_number_of_its_place() -> None:
    source = Source()
    assert draft(Guesses(source), 3, 11, 4) == [DRAWN] * 4
    assert source.asked == [11, 12, 13, 14]


def test_what_is_right_more_often_is_taken_and_the_other_is_tried_now_and_then() -> None:
    source = Source()
    guesses = Guesses(source)
    for _ in range(3):
        draft(guesses, 0, 0, 2)
        guesses.note(0, [LIKELIEST])
    before = source.num_drawn
    for _ in range(80):
        assert draft(guesses, 0, 0, 2) == [LIKELIEST] * 2
        guesses.note(0, [LIKELIEST] * 3)
    assert source.num_drawn - before == 10
    # A drafter that has become better is found out about.
    for _ in range(400):
        last = draft(guesses, 0, 0, 2)
        guesses.note(0, [DRAWN] * 3)
    assert last == [DRAWN] * 2


@pytest.mark.parametrize("put_out", [[], [1, LIKELIEST], [DRAWN, 1, LIKELIEST]])
def test_tokens_behind_a_wrong_one_prove_nothing(put_out: list[int]) -> None:
    guesses = Guesses(Source())
    for _ in range(50):
        draft(guesses, 0, 0, 3)
        guesses.note(0, put_out)
    assert draft(guesses, 0, 0, 1) == [DRAWN]


def test_a_draft_that_nobody_verified_is_forgotten() -> None:
    guesses = Guesses(Source())
    draft(guesses, 0, 0, 3)
    draft(guesses, 0, 0, 1)
    guesses.note(0, [DRAWN, LIKELIEST])
    assert draft(guesses, 0, 0, 1) == [DRAWN]


def test_columns_of_a_smaller_vocabulary_are_tokens_of_the_models() -> None:
    guesses = Guesses(Source(), torch.arange(9) * 10)
    assert draft(guesses, 0, 0, 1) == [DRAWN + 70]
