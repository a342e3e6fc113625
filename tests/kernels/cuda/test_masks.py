"""Rows are masked on CUDA as the reference masks them, which allows what has a bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from pdserve.kernels.cuda import masks
from pdserve.kernels.reference.masks import HEAD, mask, num_words

NUM_ROWS = 5


@pytest.mark.parametrize("vocab_size", [37, 64, 2500, 4096])
def test_what_has_a_bit_is_allowed_and_other_rows_are_left_alone(vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    logits = torch.from_numpy(rng.standard_normal((NUM_ROWS, vocab_size), dtype=np.float32))
    logits[1, 3] = math.nan
    is_allowed = rng.random((3, vocab_size)) < 0.3
    given = np.zeros((3, num_words(vocab_size)), dtype=np.int32)
    given[:, 0], given[:, 1] = (4, 0, 1), (0, 1, 0)
    packed = np.packbits(is_allowed, axis=1, bitorder="little")
    given[:, HEAD:].view(np.uint8)[:, : packed.shape[1]] = packed
    given[:, HEAD:].view(np.uint8)[:, packed.shape[1] :] = 255  # behind the vocabulary
    wanted = logits.clone()
    for row, is_even, allowed in ((4, False, is_allowed[0]), (0, True, is_allowed[1])):
        wanted[row][torch.from_numpy(~allowed)] = -math.inf
        if is_even:
            wanted[row][torch.from_numpy(allowed)] = 0.0
    wanted[1][torch.from_numpy(~is_allowed[2])] = -math.inf
    for function in (mask, masks.mask):
        found = logits.clone()
        function(found, torch.from_numpy(given))
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
