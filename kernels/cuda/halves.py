"""The feed-forward half of a dense layer, with the activation inside the first product."""

from __future__ import annotations

from torch import Tensor

from pdserve.kernels.cuda.linear import CudaLinear
from pdserve.kernels.cuda.tiles import GATED_ROWS
from pdserve.kernels.ops import Ops
from pdserve.kernels.reference.halves import Mlp, MlpWeights


def make_mlp(ops: Ops, weights: MlpWeights) -> Mlp:
    """Return the feed-forward half, with one launch fewer if gate and up are stored together."""
    gate_up = weights.gate_up
    if isinstance(gate_up, CudaLinear) and gate_up.out_dtype == gate_up.dtype:
        return CudaMlp(ops, weights, gate_up)
    return Mlp(ops, weights)


class CudaMlp(Mlp):
    """The feed-forward half, in three launches for few rows and otherwise in four."""

    def __init__(self, ops: Ops, weights: MlpWeights, gate_up: CudaLinear) -> None:
        super().__init__(ops, weights)
        self._gate_up = gate_up

    def after_norm(self, normed: Tensor) -> Tensor:
        """See `Mlp.after_norm`."""
        if len(normed) > GATED_ROWS:
            return super().after_norm(normed)
        return self._weights.down(self._gate_up.call_gated(normed))
