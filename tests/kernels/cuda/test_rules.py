"""Logits are ruled on CUDA as the reference rules them, to the bit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pdserve.kernels.cuda import rules
from pdserve.kernels.reference import rules as reference
from pdserve.kernels.reference.rules import (
    AVOIDED,
    AVOIDED_AT_FIRST,
    FORBIDDEN,
    IN_PROMPT,
    Ruled,
    RuleTables,
)

VOCAB = 2500
NUM_ROWS = 6
INF = math.inf


def drawn(seed: int) -> tuple[Tensor, RuleTables, Ruled]:
    """Logits of six rows, four of which are ruled by three rows of tables: one follows a draft."""
    generator = torch.Generator().manual_seed(seed)

    def ints(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator, dtype=torch.int32)

    logits = torch.randn(NUM_ROWS, VOCAB, generator=generator) * 4
    logits[1, 3], logits[4, 9], logits[5, 2400] = math.nan, INF, -INF
    words = torch.where(ints(4, 3, VOCAB) == 0, ints(5, 3, VOCAB), 0)
    for bit in (IN_PROMPT, FORBIDDEN, AVOIDED, AVOIDED_AT_FIRST):
        words |= torch.where(ints(5, 3, VOCAB) == 0, bit, 0)
    ruled = Ruled(
        rows=torch.tensor([4, 5, 1, 2], dtype=torch.int32),
        kept=torch.tensor([2, 2, 0, 1], dtype=torch.int32),
        depth=torch.tensor([1, 2, 0, 0], dtype=torch.int32),
        avoided=torch.tensor([AVOIDED, AVOIDED | AVOIDED_AT_FIRST] * 2, dtype=torch.int32),
        repetition=torch.tensor([1.3, 1.3, 1.0, 0.7]),
        frequency=torch.tensor([0.3, 0.3, -0.2, 0.0]),
        presence=torch.tensor([0.0, 0.5, 0.7, 0.0]),
        drafted=ints(VOCAB, NUM_ROWS),
    )
    return logits, RuleTables(words, torch.randn(3, VOCAB, generator=generator)), ruled


@pytest.mark.parametrize(("by_bias", "avoids"), [(False, False), (True, True)])
def test_rows_are_ruled_as_the_reference_rules_them_and_the_others_left_alone(
    by_bias: bool, avoids: bool
) -> None:
    logits, tables, ruled = drawn(1)
    found, wanted = logits.clone(), logits.clone()
    rules.rule(found, tables, ruled, by_bias=by_bias, avoids=avoids)
    reference.rule(wanted, tables, ruled, by_bias=by_bias, avoids=avoids)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found[[0, 3]], logits[[0, 3]])
    drafted = ruled.drafted.tolist()
    assert (found[5, drafted[4:]] != logits[5, drafted[4:]]).all()


def test_what_is_avoided_gives_way_where_nothing_else_is_left() -> None:
    logits, tables, ruled = drawn(2)
    logits[4] = logits[5] = -INF
    logits[4, 2300], logits[5, [3, 2300]] = 1.0, 2.0
    tables.words[2] = AVOIDED
    tables.words[2, 3] = AVOIDED_AT_FIRST
    first = [column[:1] for column in ruled[:-1]]
    second = [column[1:2] for column in ruled[:-1]]
    for one in (first, second):
        one[2].zero_()
        found, wanted = logits.clone(), logits.clone()
        rules.rule(found, tables, Ruled(*one, ruled.drafted), by_bias=False, avoids=True)
        reference.rule(wanted, tables, Ruled(*one, ruled.drafted), by_bias=False, avoids=True)
        assert torch.equal(found[4:], wanted[4:])
        assert torch.equal(found[4:], logits[4:])


def test_tokens_are_counted_where_they_were_sampled_and_none_is_no_token() -> None:
    words = torch.full((3, VOCAB), IN_PROMPT, dtype=torch.int32)
    kept = torch.tensor([2, 0, 0, 0, 1], dtype=torch.int32)
    tokens = torch.tensor([7, 2499, 7, 3, -1])
    rows = torch.tensor([0, 1, 2, 2, 4], dtype=torch.int32)
    wanted = words.clone()
    reference.note(wanted, kept, tokens, rows)
    rules.note(words, kept, tokens, rows)
    assert torch.equal(words, wanted)
    assert (words - IN_PROMPT).nonzero().tolist() == [[0, 7], [0, 2499], [2, 7]]
    assert words[0, 7] == IN_PROMPT + 2
