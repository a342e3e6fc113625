"""Rules and masks of logits on Hopper: no spills, logits and words 16 bytes at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pdserve.kernels.cuda import masks, rules
from pdserve.kernels.reference.masks import num_words
from pdserve.kernels.reference.rules import Ruled, RuleTables
from tests.kernels.cuda import gate


def calls() -> gate.Calls:
    """Rows of the vocabulary of Llama-3.1-8B."""

    def of(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    floats: dict[str, Any] = {"dtype": torch.float32}
    logits = of(64, 128256, **floats)
    tables = RuleTables(of(64, 128256), of(64, 128256, **floats))
    ruled = Ruled(*(of(64) for _ in range(4)), *(of(64, **floats) for _ in range(3)), of(64))
    return {
        "rule": lambda: rules.rule(logits, tables, ruled, by_bias=True, avoids=True),
        "mask": lambda: masks.mask(logits, of(64, num_words(128256))),
        "note": lambda: rules.note(tables.words, of(64), of(64, dtype=torch.int64), of(64)),
    }


@pytest.mark.matrix
def test_on_hopper_nothing_spills_and_words_come_16_bytes_at_once() -> None:
    found = gate.compiled(f"{__name__}:calls")
    assert {name: len(launched) for name, launched in found.items()} == {
        "rule": 2,
        "mask": 1,
        "note": 1,
    }
    for kernel in (one for launched in found.values() for one in launched):
        assert kernel.spilled == 0, kernel
        assert kernel.programs_per_sm() >= 4, kernel
        if kernel.kernel.endswith("block"):
            assert sum(n for name, n in kernel.opcodes.items() if name.startswith("LDG.E.128")), (
                kernel
            )
