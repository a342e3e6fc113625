"""Matrices that are stored as small numbers and their scales.

The scales are those of rows, columns or blocks, and zero points may be subtracted first:
`(numbers - zeros) * scale`, which is rounded once, to the dtype of the rest of the checkpoint. The
engine computes as with such a checkpoint, and uses its memory, except where it keeps FP8. Integers
are packed as compressed-tensors, GPTQ and AWQ do it (`pack_to_int32` of compressed-tensors 0.20;
`pack_block` of GPTQModel; `WQLinear_GEMM.from_linear` of AutoAWQ 0.2.9); 4-bit floats as
compressed-tensors' NVFP4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from pdserve.kernels.fp8 import WHOLE_ROW, Fp8Weight
from pdserve.models.quantised_format import NUMBERS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, dtype

    from pdserve.models.quantised_format import Region
    from pdserve.models.weight_file import StoredTensor

FLOATS: Final = ("F32", "F16", "BF16")
_POSITIVE: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4_VALUES: Final = (*_POSITIVE, *(-each for each in _POSITIVE))
"""Of a 4-bit float, E2M1."""
SCALE: Final = "scale"
ZEROS: Final = "zeros"
GROUPS: Final = "groups"
WHOLE: Final = "whole scale"
_ELEMENT_BITS: Final = {"I32": 32, "I8": 8, "U8": 8, "F8_E4M3": 8}
_CHUNK: Final = 1 << 18
"""Numbers that are widened together: what is made on the way stays in a core's cache."""


class ScaledMatrix(msgspec.Struct, frozen=True):
    """A scheme of matrices `[rows, columns]`; see `Scheme`.

    Attributes:
        numbers: Dtype of the tensor of numbers. `I32` is packed, `U8` has two 4-bit floats.
        block: Rows and columns that share a scale; None: all.
        bits: Of each number.
        scales: Dtypes that scales may have.
        zeros: Dtype of the tensor of zero points, if there is one: like the scales, or `I32`, whose
            elements have those of several rows.
        zero: The zero point of all numbers, if it is not 0; zero points that are stored are this,
            or one less.
        zero_step: What is added to a zero point that is stored.
        has_groups: Whether a tensor says for each column whose scales it has, instead of its place.
        is_transposed: Whether tensors are stored as `[columns, rows]`.
        is_interleaved: Whether an element has the numbers of several rows, the even ones first, and
            not of columns.
    """

    numbers: str
    block: tuple[int | None, int | None]
    bits: int = 8
    scales: tuple[str, ...] = FLOATS
    zeros: str | None = None
    zero: int = 0
    zero_step: int = 0
    has_groups: bool = False
    is_transposed: bool = False
    is_interleaved: bool = False

    def fits(self, shape: tuple[int, ...], stored: Mapping[str, StoredTensor]) -> bool:
        """See `Scheme`. Trailing dims of size 1 make no difference."""
        if len(shape) != 2:
            return False
        dtypes = {
            NUMBERS: (self.numbers,),
            SCALE: self.scales,
            ZEROS: (self.zeros,),
            GROUPS: ("I32", "I64"),
            WHOLE: ("F32",),
        }
        sizes = {
            role: tuple(part.stop for part in region)
            for role, region in self.regions(shape, None).items()
        }
        return sizes.keys() == stored.keys() and all(
            stored[role].dtype in dtypes[role]
            and len(stored[role].shape) <= 2
            and _stripped(stored[role].shape) == _stripped(size)
            for role, size in sizes.items()
        )

    def regions(self, shape: tuple[int, ...], region: Region | None) -> dict[str, Region]:
        """See `Scheme`."""
        rows, columns = _spans(shape, region)
        high, wide = self._block(shape)
        in_groups = _coarse(range(shape[1]) if self.has_groups else columns, wide)
        of_numbers = rows, _coarse(columns, self._per_element)
        if self.is_interleaved:
            of_numbers = _coarse(rows, self._per_element), columns
        found = {NUMBERS: of_numbers, SCALE: (_coarse(rows, high), in_groups)}
        if self.zeros is not None:
            per_zero = self._per_element if self.zeros == "I32" else high
            found[ZEROS] = _coarse(rows, per_zero), in_groups
        slices = {role: (_slice(a), _slice(b)) for role, (a, b) in found.items()}
        regions: dict[str, Region] = dict(slices)
        if self.is_transposed:
            regions = {role: (b, a) for role, (a, b) in slices.items()}
        if self.has_groups:
            regions[GROUPS] = (_slice(columns),)
        if self.numbers == "U8":
            regions[WHOLE] = (slice(0, 1),)
        return regions

    def run(self, region: Region | None) -> int | None:
        """Return how many numbers of a row of a region share a scale, as `Fp8Weight` says it.

        None: such a region cannot be an `Fp8Weight`.
        """
        wide, is_plain = (
            self.block[1],
            self.zeros is None and not (self.has_groups or self.is_transposed),
        )
        if self.numbers != "F8_E4M3" or not is_plain:
            return None
        if wide is None:
            return WHOLE_ROW
        first = 0 if region is None else region[1].start or 0
        return None if first % wide else wide

    def kept(
        self, tensors: Mapping[str, Tensor], *, shape: tuple[int, ...], region: Region | None
    ) -> Fp8Weight:
        """Return a region that has a `run` as it is stored; arguments as of `widened`."""
        rows, _ = _spans(shape, region)
        high, _ = self._block(shape)
        run = self.run(region)
        assert run is not None
        factors = self._oriented(SCALE, tensors[SCALE]).float()
        blocks = factors.new_tensor([row // high - rows.start // high for row in rows]).long()
        return Fp8Weight(tensors[NUMBERS], factors.index_select(0, blocks), run)

    def widened(
        self,
        tensors: Mapping[str, Tensor],
        *,
        shape: tuple[int, ...],
        region: Region | None,
        to: dtype,
    ) -> Tensor:
        """See `Scheme`: `[rows, columns]`, contiguous."""
        import torch

        rows, columns = _spans(shape, region)
        high, wide = self._block(shape)
        stored = {role: self._oriented(role, each) for role, each in tensors.items()}
        factors = stored[SCALE].float()
        if WHOLE in stored:
            factors = factors / stored[WHOLE]
        zeros = self._zeros(stored[ZEROS], rows) if ZEROS in stored else None
        of_columns = self._groups(stored, columns, wide) if GROUPS in stored else None

        def spread(values: Tensor) -> Tensor:
            """Repeat values of groups, `[n, groups]`, for their columns."""
            if values.shape[1] == 1:
                return values
            if of_columns is not None:
                return values.index_select(1, of_columns)
            first = columns.start % wide
            repeated = values[..., None].expand(-1, -1, wide).flatten(1)
            return repeated[:, first : first + len(columns)]

        first_block = rows.start // high
        blocks = torch.arange(rows.start, rows.stop).floor_divide_(high).sub_(first_block)
        found = torch.empty(len(rows), len(columns), dtype=to)
        step = max(1, _CHUNK // max(1, len(columns)))
        for first in range(0, len(rows), step):
            part = range(first, min(first + step, len(rows)))
            numbers = self._numbers(stored[NUMBERS], rows, columns, part)
            where = blocks[part.start : part.stop]
            if self.zero:
                numbers.sub_(self.zero)
            elif zeros is not None:
                numbers.sub_(spread(zeros[where]))
            found[part.start : part.stop] = numbers.mul_(spread(factors[where]))
        return found

    @property
    def _per_element(self) -> int:
        return _ELEMENT_BITS[self.numbers] // self.bits

    def _block(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Rows and columns that share a scale; at most all."""
        high, wide = (min(a or b, b) for a, b in zip(self.block, shape, strict=True))
        return high, wide

    def _oriented(self, role: str, tensor: Tensor) -> Tensor:
        """Return a tensor as `[rows, columns]`, if it has these."""
        if role in (GROUPS, WHOLE):
            return tensor
        tensor = tensor.reshape(*tensor.shape, *[1] * (2 - tensor.ndim))
        return tensor.t() if self.is_transposed else tensor

    def _numbers(self, stored: Tensor, rows: range, columns: range, part: range) -> Tensor:
        """Return `[part, columns]` fp32 of what `regions` has of rows and columns.

        Args:
            part: Of the rows, counted from the first of them.
        """
        import torch

        if self.is_interleaved:
            first = rows.start % self._per_element
            inner = range(first + part.start, first + part.stop)
            return self._unpacked_rows(stored, inner).float()
        first = columns.start % self._per_element
        inner = range(first, first + len(columns))
        found = self._unpacked(stored[part.start : part.stop], inner)
        if self.numbers != "U8":
            return found.float()
        values = found.new_tensor(FP4_VALUES, dtype=torch.float32)
        return values.index_select(0, found.flatten().int()).view(found.shape)

    def _zeros(self, stored: Tensor, rows: range) -> Tensor:
        """Return zero points as fp32, in the shape of the scales."""
        if self.zeros != "I32":
            return stored.float() + self.zero_step
        first = rows.start % self._per_element
        zeros = self._unpacked_rows(stored, range(first, first + len(rows)))
        if self.zero and not bool(((zeros == self.zero) | (zeros == self.zero - 1)).all()):
            raise ValueError("zero points differ, though sym says that all are the same")
        return (zeros + self.zero_step).bitwise_and_((1 << self.bits) - 1).float()

    def _groups(self, stored: Mapping[str, Tensor], columns: range, wide: int) -> Tensor:
        """Return the group of each column."""
        groups, num_groups = stored[GROUPS].int(), stored[SCALE].shape[1]
        if bool((groups == -1).all()):  # compressed-tensors: by place
            groups = groups.new_tensor(columns).div_(wide, rounding_mode="floor")
        if len(groups) and not 0 <= int(groups.min()) <= int(groups.max()) < num_groups:
            raise ValueError(f"its columns are in groups that are not among its {num_groups}")
        return groups

    def _unpacked_rows(self, words: Tensor, part: range) -> Tensor:
        """Return numbers of which each word has those of several rows.

        Args:
            words: `[n, columns]` int32.
            part: Which rows, counted from the first of the first words.

        Returns:
            `[part, columns]` int32.
        """
        per, bits = self._per_element, self.bits
        half = per // 2
        places = [row // 2 + half * (row % 2) if self.is_interleaved else row for row in range(per)]
        words = words[part.start // per : -(-part.stop // per)].contiguous()
        shifts = words.new_tensor([bits * place for place in places])[:, None]
        numbers = (words[:, None] >> shifts).bitwise_and_((1 << bits) - 1).flatten(0, 1)
        first = part.start % per
        return numbers[first : first + len(part)]

    def _unpacked(self, elements: Tensor, part: range) -> Tensor:
        """Return the numbers in rows of elements, lowest bits first.

        Args:
            elements: `[n, elements]`, of the stored dtype.
            part: Which numbers of each row, counted from those of the first element.

        Returns:
            `[n, part]`: uint8, or of the stored dtype if an element is a number.
        """
        import torch

        per = self._per_element
        elements = elements[:, part.start // per : -(-part.stop // per)]
        if per == 1:
            return elements
        numbers = elements.clone(memory_format=torch.contiguous_format).view(torch.uint8)
        for bits in (4, 2):
            if bits >= self.bits:  # each byte becomes two, with half of its bits
                pairs = numbers.short()
                pairs |= pairs << (8 - bits)
                numbers = pairs.bitwise_and_(((1 << bits) - 1) * 0x0101).view(torch.uint8)
        first = part.start % per
        return numbers[:, first : first + len(part)]


def _spans(shape: tuple[int, ...], region: Region | None) -> tuple[range, range]:
    rows, columns = region or (slice(None), slice(None))
    return range(shape[0])[rows], range(shape[1])[columns]


def _coarse(span: range, size: int) -> range:
    """Return which runs of `size` a span touches."""
    return range(span.start // size, -(-span.stop // size))


def _slice(span: range) -> slice:
    return slice(span.start, span.stop)


def _stripped(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape without its last dims of size 1."""
    while shape and shape[-1] == 1:
        shape = shape[:-1]
    return shape
