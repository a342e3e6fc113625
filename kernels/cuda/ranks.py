"""The sum over the ranks of a group: each element is summed in the order of the ranks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.cuda.checks import check_contiguous, same_type
from pdserve.kernels.cuda.launch import Tuning, launch
from pdserve.kernels.cuda.sizes import divided_up

BLOCK = 1024
TUNING = Tuning(warps=4)
"""It reads what another stream has written, so it does not overlap with the previous kernel."""
_WIDE = 8
"""Elements whose count, if it divides a rank's, keeps each rank's part aligned to 16 bytes."""


@triton.jit(do_not_specialize=["pieces"])
def add_ranks(
    parts: tl.tensor,
    out: tl.tensor,
    pieces: tl.tensor,
    RANKS: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Add a block of elements of every rank; grid (blocks,)."""
    size = pieces.to(tl.int64) * PIECE
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    total = tl.load(parts + at, mask=inside, other=0.0).to(tl.float32)
    for rank in tl.static_range(1, RANKS):
        total += tl.load(parts + rank * size + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


def sum_ranks(parts: Tensor) -> Tensor:
    """See ``reference.ranks.sum_ranks``; contiguous.

    Raises:
        NotTakenError: The dtype is not supported.
        TypeError: The parts are strided.
    """
    same_type(parts)
    check_contiguous(parts)
    ranks, size = parts.shape
    piece = _WIDE if size % _WIDE == 0 else 1
    out = torch.empty_like(parts[0])
    launch(
        add_ranks,
        (divided_up(size, BLOCK),),
        parts,
        out,
        size // piece,
        tuning=TUNING,
        RANKS=ranks,
        PIECE=piece,
        BLOCK=BLOCK,
    )
    return out
