"""The gated activation of Gemma, element by element."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.cuda.checks import check_contiguous, same_type
from pdserve.kernels.cuda.launch import Tuning, launch, wait_for_previous
from pdserve.kernels.cuda.sizes import divided_up, empty_rows

BLOCK = 1024
TUNING = Tuning(warps=4, overlaps=True)


@triton.jit
def gelu_row(
    x: tl.tensor,
    out: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Gate a piece of one row; grid (rows, pieces).

    ``gate * (1 + tanh(u)) / 2`` is ``gate * sigmoid(2 * u)``.
    """
    wait_for_previous(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    at = x + row * (2 * WIDTH) + column
    gate = tl.load(at, mask=inside, other=0.0)
    up = tl.load(at + WIDTH, mask=inside, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    steep = 1.5957691216 * wide * (1.0 + 0.044715 * wide * wide)
    gelu = (wide / (1.0 + tl.exp(-steep))).to(gate.dtype).to(tl.float32)
    tl.store(out + row * WIDTH + column, (gelu * up).to(gate.dtype), mask=inside)


def gelu_and_mul(x: Tensor) -> Tensor:
    """See ``reference.activation.gelu_and_mul``; contiguous.

    Raises:
        NotTakenError: The dtype is not supported.
        TypeError: x is strided, or its width is odd.
    """
    same_type(x)
    check_contiguous(x)
    rows, both = x.shape
    width, odd = divmod(both, 2)
    if odd:
        raise TypeError(f"want gate and up of one width, got {both} elements together")
    out = empty_rows(rows, width, x)
    launch(
        gelu_row,
        (rows, divided_up(width, BLOCK)),
        x,
        out,
        tuning=TUNING,
        WIDTH=width,
        BLOCK=BLOCK,
    )
    return out
