"""Tokens are chosen on CUDA as the reference chooses them, alone and in any company."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING

import pytest
import torch

from pdserve.kernels.cuda import sampling
from pdserve.kernels.reference import sampling as reference
from pdserve.kernels.reference.sampling import Draws, share_of

if TYPE_CHECKING:
    from torch import Tensor

VOCAB = 2500
WHOLE = 1 << 53
INF = math.inf


def logits_of(num_rows: int, *, spread: float = 3.0, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, VOCAB, generator=generator) * spread


def draws_of(*asked: tuple[float, float, int, float, float]) -> Draws:
    """Temperature, min-p, top-k, top-p and the uniform number of each row."""
    columns = list(zip(*asked, strict=True))
    return Draws(
        rows=torch.arange(len(asked), dtype=torch.int32),
        scale=torch.tensor([math.log2(math.e) / t for t in columns[0]]),
        min_p=torch.tensor(columns[1]),
        top_k=torch.tensor(columns[2], dtype=torch.int32),
        top_p=torch.tensor([int(p * WHOLE) for p in columns[3]]),
        uniform=torch.tensor([int(u * WHOLE) for u in columns[4]]),
    )


ASKED = [
    (1.0, 0.0, 0, 1.0, 0.37),
    (0.7, 0.01, 0, 1.0, 0.999999),
    (1.3, 0.0, 40, 1.0, 0.5),
    (1.0, 0.0, 0, 0.9, 0.93),
    (2.0, 0.001, 700, 0.8, 0.61),
    (1.0, 0.0, 1, 1.0, 0.99),
    (1.0, 0.0, 0, 0.0, 0.99),
    (0.1, 0.0, 3, 0.5, 0.0),
]


def drawn(module: object, logits: Tensor, draws: Draws, *, by_k: bool, by_p: bool) -> list[int]:
    tokens, peaks = module.largest(logits)  # type: ignore[attr-defined]
    module.draw(logits, peaks, draws, tokens, by_k=by_k, by_p=by_p)  # type: ignore[attr-defined]
    return tokens.tolist()


def test_the_likeliest_token_is_the_lowest_of_equal_ones() -> None:
    logits = logits_of(9)
    logits[1, 17] = logits[1, 2499] = logits[1, 2100] = 50.0
    logits[2] = 0.0
    logits[3] = -0.0
    logits[3, 1000] = 0.0
    logits[4, 2200] = math.nan
    logits[5, 2200] = INF
    logits[6] = -INF
    logits[7] = -INF
    logits[7, 2499] = -3.0
    logits[8, 5] = -math.nan
    tokens, peaks = sampling.largest(logits)
    wanted, wanted_peaks = reference.largest(logits)
    assert tokens.tolist() == wanted.tolist()
    assert tokens[1:].tolist() == [17, 0, 0, -1, -1, -1, 2499, -1]
    torch.testing.assert_close(peaks, wanted_peaks, rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow
def test_a_token_is_drawn_as_the_reference_draws_it_and_alone_as_in_company() -> None:
    logits, draws = logits_of(2), draws_of(*ASKED[3:5])
    found = drawn(sampling, logits, draws, by_k=True, by_p=True)
    assert found == drawn(reference, logits, draws, by_k=True, by_p=True)
    one = Draws(*(column[1:] for column in draws))._replace(rows=draws.rows[:1])
    assert drawn(sampling, logits[1:], one, by_k=True, by_p=True) == found[1:]


@pytest.mark.matrix
def test_tokens_are_drawn_as_the_reference_draws_them_and_alone_as_in_company() -> None:
    logits, draws = logits_of(len(ASKED)), draws_of(*ASKED)
    found = drawn(sampling, logits, draws, by_k=True, by_p=True)
    assert found == drawn(reference, logits, draws, by_k=True, by_p=True)
    assert found[5:7] == logits[5:7].argmax(-1).tolist()
    assert len(set(found)) > 5
    one = Draws(*(column[4:5] for column in draws))._replace(rows=draws.rows[:1])
    assert drawn(sampling, logits[4:5], one, by_k=True, by_p=True) == found[4:5]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("by_k", "by_p"),
    [(False, False), pytest.param(True, False, marks=pytest.mark.matrix), (False, True)],
)
def test_passes_that_no_row_asks_for_are_left_out(by_k: bool, by_p: bool) -> None:
    asked = [each for each in ASKED if (by_k or not each[2]) and (by_p or each[3] == 1.0)][:3]
    logits, draws = logits_of(len(asked)), draws_of(*asked)
    found = drawn(sampling, logits, draws, by_k=by_k, by_p=by_p)
    assert found == drawn(reference, logits, draws, by_k=True, by_p=True)


def test_only_the_rows_that_are_drawn_change_and_no_token_comes_of_nan() -> None:
    logits = logits_of(4)
    logits[2, 2300] = math.nan
    draws = draws_of(*ASKED[:2])._replace(rows=torch.tensor([3, 2], dtype=torch.int32))
    greedy, _ = reference.largest(logits)
    for module in (sampling, reference):
        found = drawn(module, logits, draws, by_k=False, by_p=False)
        assert found[:3] == greedy[:3].tolist()
        assert found[2] == -1
        assert found[3] != greedy[3]


@pytest.mark.matrix
def test_what_is_masked_is_never_drawn() -> None:
    logits = torch.full((3, VOCAB), -INF)
    logits[:, 2498] = 1.0
    logits[:, 2] = 0.5
    asked = [(1.0, 0.0, 0, 1.0, 0.0), (1.0, 0.0, 10, 0.99, 0.999), (5.0, 0.0, 0, 0.3, 0.9)]
    assert drawn(sampling, logits, draws_of(*asked), by_k=True, by_p=True) == [2, 2498, 2498]


@pytest.mark.matrix
def test_ties_with_the_last_that_is_kept_stay() -> None:
    logits = torch.full((1, VOCAB), -20.0)
    logits[:, [10, 700, 2300]] = 2.0
    asked = [(1.0, 0.0, 2, 1.0, 0.99), (1.0, 0.0, 0, 0.1, 0.99)]
    for draw, by_k in zip(asked, (True, False), strict=True):
        assert drawn(sampling, logits, draws_of(draw), by_k=by_k, by_p=not by_k) == [2300]


def test_the_share_of_a_total_is_exact() -> None:
    generator = torch.Generator().manual_seed(1)
    totals = torch.randint(1 << 58, (300,), generator=generator)
    fractions = torch.randint(WHOLE + 1, (300,), generator=generator)
    totals[0], fractions[0] = (1 << 58) - 1, WHOLE
    totals[1], fractions[1] = (1 << 58) - 1, WHOLE - 1
    wanted = [
        math.floor(Fraction(int(t) * int(f), WHOLE)) for t, f in zip(totals, fractions, strict=True)
    ]
    assert share_of(totals, fractions).tolist() == wanted
