"""Tokens are drawn and described on the host as by the reference, alone and in any company."""

from __future__ import annotations

import math

import pytest
import torch

from pdserve.errors import InternalError
from pdserve.kernels.backend import REFERENCE
from pdserve.kernels.reference import sampling as reference
from pdserve.kernels.reference.sampling import Draws
from tests.kernels.builds import KERNELS, needs_native
from tests.kernels.cuda.test_sampling import ASKED, INF, drawn, draws_of

pytestmark = needs_native

HERE = KERNELS.sampling


def random_draws(num: int, seed: int) -> Draws:
    rng = torch.Generator().manual_seed(seed)

    def one_of(*values: float) -> float:
        return values[int(torch.randint(len(values), (), generator=rng))]

    return draws_of(
        *(
            (
                one_of(0.2, 0.7, 1.0, 3.0),
                one_of(0.0, 0.0, 0.01, 0.3),
                int(one_of(0, 0, 1, 20, 900, 5000)),
                one_of(1.0, 1.0, 0.95, 0.5, 0.0),
                float(torch.rand((), generator=rng)),
            )
            for _ in range(num)
        )
    )


@pytest.mark.parametrize("vocab_size", [5, 64, 1000, 1025, 5003])
@pytest.mark.parametrize("spread", [0.01, 3.0, 12.0])
def test_tokens_are_drawn_as_the_reference_draws_them(vocab_size: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(60, vocab_size, generator=generator) * spread
    logits[::7, ::3] = -INF
    draws = random_draws(60, vocab_size)
    draws = draws._replace(top_k=draws.top_k.clamp(max=vocab_size))
    wanted = drawn(REFERENCE.sampling, logits, draws, by_k=True, by_p=True)
    found = drawn(HERE, logits, draws, by_k=True, by_p=True)
    # Powers are exact to two units in the last place: close to a border, others may be drawn.
    assert sum(a != b for a, b in zip(found, wanted, strict=True)) <= 1
    for row in (3, 17):
        alone = Draws(*(column[row : row + 1] for column in draws))
        alone = alone._replace(rows=torch.zeros(1, dtype=torch.int32))
        one = drawn(HERE, logits[row : row + 1].clone(), alone, by_k=True, by_p=True)
        assert one == found[row : row + 1]


def test_only_the_rows_that_are_drawn_change_and_no_token_comes_of_nan() -> None:
    logits = torch.randn(4, 400, generator=torch.Generator().manual_seed(1))
    logits[2, 200] = math.nan
    draws = draws_of(*ASKED[:2])._replace(rows=torch.tensor([3, 2], dtype=torch.int32))
    greedy, _ = reference.largest(logits)
    found = drawn(HERE, logits, draws, by_k=False, by_p=False)
    assert found[:2] == greedy[:2].tolist()
    assert found[2] == -1
    assert found[3] != greedy[3]


def test_ties_with_the_last_that_is_kept_stay_and_what_is_masked_is_never_drawn() -> None:
    logits = torch.full((3, 3000), -INF)
    logits[:, [10, 700, 2900]] = 2.0
    asked = [(1.0, 0.0, 2, 1.0, 0.99), (1.0, 0.0, 0, 0.1, 0.99), (9.0, 0.0, 0, 1.0, 0.0)]
    assert drawn(HERE, logits, draws_of(*asked), by_k=True, by_p=True) == [2900, 2900, 10]


@pytest.mark.parametrize("row", [-1, 2])
def test_a_row_that_is_not_there_is_refused(row: int) -> None:
    draws = draws_of(ASKED[0])._replace(rows=torch.tensor([row], dtype=torch.int32))
    logits, tokens = torch.zeros(2, 9), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(InternalError, match="an id is outside"):
        HERE.draw(logits, torch.zeros(2), draws, tokens, by_k=False, by_p=False)


@pytest.mark.parametrize("vocab_size", [1, 5, 64, 1000, 1025, 5003])
def test_tokens_are_described_as_the_reference_describes_them(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    spreads = torch.tensor([0.0, 0.01, 1.0, 4.0, 30.0, 200.0]).repeat(4)[:, None]
    logits = torch.randn(24, vocab_size, generator=generator) * spreads
    logits[6:12] = logits[6:12].round()  # many are equal
    logits[12:18, 1::2] = -INF
    logits[18:].copy_(logits[18:].sort().values)
    logits[-1] = -logits[-1].abs().sort().values
    tokens = torch.randint(vocab_size, (24,), generator=generator)
    num_top = torch.randint(min(vocab_size, 50) + 1, (24,), generator=generator).int()
    num_top[7] = vocab_size
    wanted = REFERENCE.sampling.describe(logits, tokens, num_top)
    found = HERE.describe(logits, tokens, num_top)
    assert found.normalisers.tolist() == pytest.approx(wanted.normalisers.tolist(), abs=2e-9)
    assert torch.equal(found.ranks, wanted.ranks)
    for row, num in enumerate(num_top.tolist()):
        assert torch.equal(found.top[row, :num], wanted.top[row, :num])
        alone = HERE.describe(logits[row : row + 1], tokens[row : row + 1], num_top[row : row + 1])
        assert torch.equal(alone.normalisers, found.normalisers[row : row + 1])
        assert torch.equal(alone.top[0], found.top[row, :num])


@pytest.mark.parametrize("lost", [math.nan, INF])
def test_what_is_told_of_a_row_that_is_not_finite_is_not_a_number(lost: float) -> None:
    logits, tokens = torch.randn(3, 70), torch.tensor([0, 1, 2])
    alone = HERE.describe(logits[:1], tokens[:1], torch.ones(1, dtype=torch.int32))
    logits[1, 69], logits[2] = lost, -INF
    found = HERE.describe(logits, tokens, torch.ones(3, dtype=torch.int32))
    assert found.normalisers.isnan().tolist() == [False, True, True]
    assert torch.equal(found.normalisers[0], alone.normalisers[0])


@pytest.mark.parametrize("token", [-1, 9])
def test_a_token_that_is_not_in_the_vocabulary_is_refused(token: int) -> None:
    with pytest.raises(InternalError, match="an id is outside"):
        HERE.describe(torch.zeros(1, 9), torch.tensor([token]), torch.zeros(1, dtype=torch.int32))
