"""Linear layers by cuBLAS for numbers of rows at which it is faster, else by the CUDA kernels.

cuBLAS chooses a tile, and whether to split K, by the number of rows, which therefore affects a
row's last bits. This includes graphs with that number of rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdserve.kernels.cuda.linear import CudaLinear

LEAST_ROWS = 65
MOST_ROWS = 1024
"""On an H100, of an 8B's layers (benchmarks/results/2026-11-26-h100-gpu-all.json), cuBLAS takes
0.92 to 1.08 of our time for 128 rows, 0.77 to 0.94 for 256, and 0.73 to 0.82 for 512; for 64 rows
1.01 to 1.09, for 2048 0.97 to 1.05."""


class FastLinear(CudaLinear):
    """A linear layer; weight, arguments and errors as in `CudaLinear`."""

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """See `PackedLinear.__call__`."""
        if not self._is_for_cublas(len(x)):
            return super().__call__(x, out)
        self._check(x, out)
        if self._bias is None:
            return torch.mm(x, self._weight.T, out=out)
        return torch.addmm(self._bias, x, self._weight.T, out=out)

    def _is_for_cublas(self, num_rows: int) -> bool:
        """Whether measurements show it: not in fp32 or FP8, nor from one dtype to another."""
        return (
            LEAST_ROWS <= num_rows <= MOST_ROWS
            and self.dtype != torch.float32
            and self.out_dtype == self.dtype
            and self._weight.dtype == self.dtype
        )
