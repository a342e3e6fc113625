"""Weights that stay in FP8 on a device: their bytes row by row, and the scales of their runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.kernels.cuda.tiles import FP8_RUN
from pdserve.kernels.fp8 import WHOLE_ROW, Fp8Weight, NotANumberError

_NAN = 0x7F


@dataclass(frozen=True, slots=True, eq=False)
class RunScales:
    """Scales of a weight's rows.

    Attributes:
        values: ``[N, R]`` fp32.
        run: Numbers that share one; 0: all of a row.
    """

    values: Tensor
    run: int

    @staticmethod
    def of(rows: Fp8Weight, num_rows: int, device: torch.device) -> RunScales:
        """Return those, not yet set, of so many rows like these."""
        values = torch.empty((num_rows, rows.scales.shape[1]), dtype=torch.float32, device=device)
        return RunScales(values, run_of(rows))


def can_keep(weight: Tensor | Fp8Weight) -> Fp8Weight | None:
    """Return a weight if it can stay in FP8."""
    if not isinstance(weight, Fp8Weight) or (weight.run % FP8_RUN and weight.run != WHOLE_ROW):
        return None
    return weight


def run_of(rows: Fp8Weight) -> int:
    """Return how many numbers share a scale, as `RunScales` says it."""
    return 0 if rows.run == WHOLE_ROW else rows.run


def write_fp8(rows: Fp8Weight, to: Tensor, scales: Tensor) -> None:
    """Copy rows to the first of a kept weight's.

    Args:
        to: Bytes, ``[n, K]`` of at least as many rows.
        scales: ``[n, R]`` fp32, likewise.

    Raises:
        NotANumberError: A number is NaN.
    """
    numbers = rows.numbers.view(torch.uint8).to(to.device)
    if ((numbers & _NAN) == _NAN).any():
        raise NotANumberError
    to[: len(numbers)] = numbers
    scales[: len(numbers)] = rows.scales
