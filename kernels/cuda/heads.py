"""Products with one matrix per head, such as those of latent attention."""

from __future__ import annotations

from torch import Tensor

from pdserve.kernels.cuda.checks import check_float
from pdserve.kernels.cuda.linear import multiply
from pdserve.kernels.cuda.tiles import heads_tile
from pdserve.kernels.reference.mla import PackedHeads


class CudaHeads(PackedHeads):
    """One matrix per head, all in one launch.

    Raises:
        NotTakenError: The dtype is none of bf16, fp16 and fp32.
    """

    def _lay_out(self, weight: Tensor) -> None:
        check_float(weight.dtype)
        self._weight = weight.contiguous()

    def _multiply(self, x: Tensor, out: Tensor) -> None:
        if x.stride(2) != 1 or out.stride(2) != 1 or x.dtype != out.dtype:
            raise TypeError(f"got {x.dtype} {x.stride()} for {out.dtype} {out.stride()}")
        multiply(x, self._weight, None, out, heads_tile(len(x), x.dtype))
