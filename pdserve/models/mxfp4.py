"""MXFP4 weights: how a checkpoint of gpt-oss packs its experts, and how they are widened when read.

A matrix is stored as two tensors: `_blocks`, two 4-bit floats to a byte, the lower half first; and
`_scales`, an exponent for each run of 32 of them (Open Compute Project, Microscaling Formats 1.0).
They are widened to the dtype of the rest of the checkpoint, which holds every such number if it is
bf16 or fp32; the engine computes, and uses memory, as with a bf16 checkpoint.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from torch import Tensor, dtype

    from pdserve.models.weight_file import StoredTensor

_BLOCKS: Final = "_blocks"
_SCALES: Final = "_scales"
_RUN: Final = 32
"""Numbers that share a scale."""
_BIAS: Final = 127
_POSITIVE: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES: Final = (*_POSITIVE, *(-each for each in _POSITIVE))
_EVERYTHING: Final = (slice(None), slice(None), slice(None))


class Mxfp4Format(msgspec.Struct, frozen=True):
    """MXFP4 of stacked matrices, `[E, columns, rows]`, as `Fp8Format` is of single ones.

    In the file a row lies together: blocks are `[E, rows, columns / 32, 16]`, scales `[E, rows,
    columns / 32]`.

    Attributes:
        stored: The dtype of such a weight, as `named` says it.
        scale_dtypes, has_small_scales, unused: As there.
    """

    stored: str = "MXFP4"
    scale_dtypes: tuple[str, ...] = ("U8",)
    has_small_scales: bool = False
    unused: tuple[str, ...] = ()

    def named(self, tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
        """Return tensors by the names and with the shapes of the weights that blocks stand for."""
        return dict(self._weight(name, each) for name, each in tensors.items())

    def _weight(self, name: str, each: StoredTensor) -> tuple[str, StoredTensor]:
        is_packed = each.dtype == "U8" and len(each.shape) == 4 and 2 * each.shape[3] == _RUN
        if not name.endswith(_BLOCKS) or not is_packed:
            return name, each
        experts, rows, num_runs, _ = each.shape
        shape = experts, num_runs * _RUN, rows
        return name.removesuffix(_BLOCKS), replace(each, dtype=self.stored, shape=shape)

    def scale_names(self, weight: str) -> tuple[str, ...]:
        """Return the possible names of a weight's scales."""
        return (weight + _SCALES,)

    def fits(self, scale: tuple[int, ...], shape: tuple[int, ...]) -> bool:
        """Whether scales of this shape can belong to a weight of this one."""
        experts, columns, rows = shape
        return scale == (experts, rows, columns // _RUN)

    def weight_region(self, region: tuple[slice, ...] | None) -> tuple[slice, ...]:
        """Return where the blocks of a region of a weight lie."""
        return *self.scale_region(region), slice(None)

    def scale_region(self, region: tuple[slice, ...] | None) -> tuple[slice, ...]:
        """Return where its scales lie."""
        experts, columns, rows = region or _EVERYTHING
        stop = None if columns.stop is None else -(-columns.stop // _RUN)
        return experts, rows, slice((columns.start or 0) // _RUN, stop)

    def widened(
        self,
        weight: Tensor,
        scale: Tensor,
        *,
        shape: tuple[int, ...],
        region: tuple[slice, ...] | None,
        to: dtype,
    ) -> Tensor:
        """Return a region of a weight, `[E, columns, rows]`, whose rows lie together.

        Args:
            weight: Its blocks, `[E, rows, runs, 16]` uint8.
            scale: Its scales, `[E, rows, runs]` uint8.
            shape, region: See `Slot`.
        """
        experts, rows, runs, _ = weight.shape
        of_byte = [(_VALUES[byte & 15], _VALUES[byte >> 4]) for byte in range(256)]
        pairs = weight.new_tensor(of_byte, dtype=to).bfloat16()
        ones = scale.new_ones(scale.shape[1:]).float()
        found = weight.new_empty((experts, rows, runs, _RUN), dtype=to)
        for expert in range(experts):  # what is made on the way is as large as one of them
            index = weight[expert].flatten().int()
            # A pair is looked up as one number; bf16 has every product of a value and a power of 2.
            numbers = pairs.view(index.dtype).flatten().index_select(0, index).view(pairs.dtype)
            factors = ones.ldexp(scale[expert].int() - _BIAS).bfloat16()
            found[expert] = numbers.view(rows, runs, _RUN).mul_(factors[..., None])
        columns = range(shape[1])[(region or _EVERYTHING)[1]]
        first = columns.start % _RUN
        return found.flatten(2)[..., first : first + len(columns)].transpose(1, 2)
