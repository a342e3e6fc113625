"""Sampling rules on CUDA: the values of the reference on the host, for vocabularies as they are."""

from __future__ import annotations

import pytest
import torch

from pdserve.kernels.reference import rules as reference
from pdserve.kernels.reference.masks import mask, num_words
from pdserve.kernels.reference.rules import AVOIDED, FORBIDDEN, IN_PROMPT, Ruled, RuleTables
from pdserve.kernels.registry import kernels_on

pytestmark = pytest.mark.gpu

NUM_ROWS = 33


@pytest.mark.parametrize("vocab_size", [211, 128256, 151936])
def test_logits_are_ruled_as_the_reference_rules_them(cuda: torch.device, vocab_size: int) -> None:
    ops = kernels_on(cuda).sampling
    generator = torch.Generator().manual_seed(1)

    def ints(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=generator, dtype=torch.int32)

    logits = torch.randn(NUM_ROWS, vocab_size, generator=generator) * 4
    words = torch.where(ints(4, 9, vocab_size) == 0, ints(5, 9, vocab_size), 0)
    for bit in (IN_PROMPT, FORBIDDEN, AVOIDED):
        words |= torch.where(ints(5, 9, vocab_size) == 0, bit, 0)
    tables = RuleTables(words, torch.randn(9, vocab_size, generator=generator))
    rows = torch.arange(2, NUM_ROWS, 3, dtype=torch.int32)
    ruled = Ruled(
        rows=rows,
        kept=ints(9, len(rows)),
        depth=ints(3, len(rows)),
        avoided=torch.full_like(rows, AVOIDED),
        repetition=torch.rand(len(rows), generator=generator) + 0.5,
        frequency=torch.randn(len(rows), generator=generator),
        presence=torch.randn(len(rows), generator=generator),
        drafted=ints(vocab_size, NUM_ROWS),
    )
    there, found = Ruled(*(each.to(cuda) for each in ruled)), logits.to(cuda)
    kept = RuleTables(*(each.to(cuda) for each in tables))
    ops.rule(found, kept, there, by_bias=True, avoids=True)
    reference.rule(logits, tables, ruled, by_bias=True, avoids=True)
    assert torch.equal(found.cpu(), logits)
    tokens = ints(vocab_size, NUM_ROWS).long() - 1
    ops.note(kept.words, there.kept, tokens.to(cuda), there.rows)
    reference.note(tables.words, ruled.kept, tokens, ruled.rows)
    assert torch.equal(kept.words.cpu(), tables.words)


@pytest.mark.parametrize("vocab_size", [211, 128256, 151936])
def test_rows_are_masked_as_the_reference_masks_them(cuda: torch.device, vocab_size: int) -> None:
    ops = kernels_on(cuda).sampling
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(NUM_ROWS, vocab_size, generator=generator)
    shape = 16, num_words(vocab_size)
    drawn = torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int64).int()
    drawn[:, 0], drawn[:, 1] = torch.arange(1, 33, 2), torch.arange(16) % 2
    found = logits.to(cuda)
    ops.mask(found, drawn.to(cuda))
    mask(logits, drawn)
    assert torch.equal(found.cpu(), logits)
