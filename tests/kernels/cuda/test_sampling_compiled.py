"""The choice of tokens on Hopper: no spills, logits 16 bytes at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from pdserve.kernels.cuda import sampling
from pdserve.kernels.reference.sampling import Draws
from tests.kernels.cuda import gate

if TYPE_CHECKING:
    from torch import Tensor


def calls() -> gate.Calls:
    """Rows of the vocabulary of Llama-3.1-8B."""

    def of(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    logits, peaks = of(8, 128256), of(8)
    draws = Draws(
        of(5, dtype=torch.int32),
        of(5),
        of(5),
        of(5, dtype=torch.int32),
        of(5, dtype=torch.int64),
        of(5, dtype=torch.int64),
    )
    tokens = of(8, dtype=torch.int64)

    def bounded_by_one_digit() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sampling, "_NUM_DIGITS", 1)
            sampling.draw(logits, peaks, draws, tokens, by_k=False, by_p=True)

    return {
        "largest": lambda: sampling.largest(logits),
        "draw": lambda: sampling.draw(logits, peaks, draws, tokens, by_k=False, by_p=False),
        "bounded": lambda: sampling.draw(logits, peaks, draws, tokens, by_k=True, by_p=True),
        "bounded by one digit": bounded_by_one_digit,
    }


@pytest.mark.matrix
def test_on_hopper_nothing_spills_and_logits_come_16_bytes_at_once() -> None:
    found = gate.compiled(f"{__name__}:calls")
    numbers = {name: len(launched) for name, launched in found.items()}
    assert numbers == {"largest": 2, "draw": 2, "bounded": 14, "bounded by one digit": 3}
    for kernel in (one for launched in found.values() for one in launched):
        assert kernel.spilled == 0, kernel
        assert kernel.programs_per_sm() >= 4, kernel
        if kernel.kernel.endswith("block"):
            wide = sum(n for name, n in kernel.opcodes.items() if name.startswith("LDG.E.128"))
            assert wide >= 2, kernel
