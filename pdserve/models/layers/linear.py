"""Linear layers, some of them merged of several matrices of the checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.kernels.ops import PackedLinear
from pdserve.models.weights import Slot

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import Tensor

    from pdserve.models.layers.parameter import Placement


class Linear:
    """`x @ weight.T + bias`, its rows stacked from one or several matrices of the checkpoint.

    Matrices that read the same input (q, k and v; gate and up) are merged, so that a step
    passes over the input once. The merged matrix is allocated when its first part arrives
    and packed when its last has.

    Args:
        in_features: Columns.
        parts: Rows of each part, by its name in the checkpoint, in stacking order.
        bias: Whether every part has one.
        out_dtype: Dtype of the results; None means the placement's.
    """

    packed: PackedLinear
    """`x [M, in_features] -> [M, sum of parts]`; there once every part is loaded."""

    def __init__(
        self,
        in_features: int,
        parts: dict[str, int],
        placement: Placement,
        *,
        bias: bool = False,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        self._in_features = in_features
        self._parts = parts
        self._placement = placement
        self._has_bias = bias
        self._out_dtype = out_dtype
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None
        self._num_waiting = len(parts) * (2 if bias else 1)

    def slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        """Yield how each part is loaded, by its full name (`prefix` + part + field)."""
        start = 0
        for name, rows in self._parts.items():
            yield f"{prefix}{name}.weight", self._weight_slot(start, rows)
            if self._has_bias:
                yield f"{prefix}{name}.bias", self._bias_slot(start, rows)
            start += rows

    def _weight_slot(self, start: int, rows: int) -> Slot:
        def load(tensor: Tensor) -> None:
            if self._weight is None:
                self._weight = self._placement.empty(sum(self._parts.values()), self._in_features)
            self._weight[start : start + rows] = tensor
            self._part_loaded()

        return Slot((rows, self._in_features), load)

    def _bias_slot(self, start: int, rows: int) -> Slot:
        def load(tensor: Tensor) -> None:
            if self._bias is None:
                self._bias = self._placement.empty(sum(self._parts.values()))
            self._bias[start : start + rows] = tensor
            self._part_loaded()

        return Slot((rows,), load)

    def _part_loaded(self) -> None:
        self._num_waiting -= 1
        if self._num_waiting == 0 and self._weight is not None:
            self.packed = PackedLinear(self._weight, self._bias, out_dtype=self._out_dtype)
            self._weight = self._bias = None
