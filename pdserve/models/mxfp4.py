"""MXFP4 weights: how a checkpoint of gpt-oss packs its experts, and how they are widened when read.

A matrix is stored as two tensors: `_blocks`, two 4-bit floats to a byte, the lower half first; and
`_scales`, an exponent for each run of 32 of them (Open Compute Project, Microscaling Formats 1.0).
They are widened to the dtype of the rest of the checkpoint, which holds every such number if it is
bf16 or fp32; the engine computes, and uses memory, as with a bf16 checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from pdserve.models.quantised_format import NUMBERS, QuantisedFormat
from pdserve.models.scaled import FP4_VALUES, SCALE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, dtype

    from pdserve.models.quantised_format import Region
    from pdserve.models.weight_file import StoredTensor

_RUN: Final = 32
"""Numbers that share a scale."""
_BIAS: Final = 127
_EVERYTHING: Final = (slice(None), slice(None), slice(None))


class Mxfp4Stack(msgspec.Struct, frozen=True):
    """A scheme of stacked matrices, `[E, columns, rows]`; see `Scheme`.

    In the file a row lies together: numbers are `[E, rows, columns / 32, 16]`, scales `[E, rows,
    columns / 32]`.
    """

    def fits(self, shape: tuple[int, ...], stored: Mapping[str, StoredTensor]) -> bool:
        """See `Scheme`."""
        if len(shape) != 3 or shape[1] % _RUN:
            return False
        runs = shape[0], shape[2], shape[1] // _RUN
        found = {role: (each.dtype, each.shape) for role, each in stored.items()}
        return found == {NUMBERS: ("U8", (*runs, _RUN // 2)), SCALE: ("U8", runs)}

    def regions(self, shape: tuple[int, ...], region: Region | None) -> dict[str, Region]:
        """See `Scheme`."""
        experts, columns, rows = region or _EVERYTHING
        stop = None if columns.stop is None else -(-columns.stop // _RUN)
        runs = experts, rows, slice((columns.start or 0) // _RUN, stop)
        return {NUMBERS: (*runs, slice(None)), SCALE: runs}

    def widened(
        self,
        tensors: Mapping[str, Tensor],
        *,
        shape: tuple[int, ...],
        region: Region | None,
        to: dtype,
    ) -> Tensor:
        """See `Scheme`: `[E, columns, rows]`, whose rows lie together."""
        weight, scale = tensors[NUMBERS], tensors[SCALE]
        experts, rows, runs, _ = weight.shape
        of_byte = [(FP4_VALUES[byte & 15], FP4_VALUES[byte >> 4]) for byte in range(256)]
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


MXFP4: Final = QuantisedFormat({"_blocks": NUMBERS, "_scales": SCALE}, (Mxfp4Stack(),))
