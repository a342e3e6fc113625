"""Rows of a weight in FP8, as checkpoints have them and as kernels may keep them.

Free of torch, so that servers can read configurations of such checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch
    from torch import Tensor

WHOLE_ROW: Final = 1 << 40
"""A run that is longer than any row."""


class NotANumberError(ValueError):
    """A weight in FP8 has a NaN, which cannot be kept so."""


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Weight:
    """Rows of a weight: each number times its scale, rounded to the dtype of the weight.

    A backend that keeps them so widens them as it multiplies, and gives the bits of a weight that
    was widened before.

    Attributes:
        numbers: ``[N, K]`` float8_e4m3fn.
        scales: ``[N, R]`` fp32, one for each run of a row; the last run may end with the row.
        run: Numbers that share a scale, or `WHOLE_ROW`.
    """

    numbers: Tensor
    scales: Tensor
    run: int

    def widened(self, dtype: torch.dtype) -> Tensor:
        """Return the weight, ``[N, K]``."""
        factors = self.scales
        if factors.shape[1] > 1:
            factors = factors.repeat_interleave(self.run, dim=1)[:, : self.numbers.shape[1]]
        return (self.numbers.float() * factors).to(dtype)


def plain(weight: Tensor | Fp8Weight, dtype: torch.dtype) -> Tensor:
    """Return a weight in a dtype, widened if it is in FP8."""
    return weight.widened(dtype) if isinstance(weight, Fp8Weight) else weight.to(dtype)
