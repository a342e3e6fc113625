"""FP8 weights: how a checkpoint scales them, and how they are widened when read.

They are widened to the dtype of the rest of the checkpoint, so the engine computes, and uses
memory, as with a bf16 checkpoint. Two formats have them: `fp8`, in which DeepSeek-V3 and Qwen3-FP8
are published, and `compressed-tensors` with float weights. Activations are not rounded to FP8 here,
and their scales are not read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from torch import Tensor, dtype

    from pdserve.models.config_json import Fields

_SCALES: Final = ("_scale_inv", "_scale")
"""Suffix of a scale's name after its weight's name."""


class Fp8Format(msgspec.Struct, frozen=True):
    """How a checkpoint's FP8 weights are scaled.

    Attributes:
        block: Rows and columns of a weight that share a scale; None: all or each row share one.
        stored: The dtype of such a weight in safetensors.
        scale_dtypes: Those that scales may have.
        has_small_scales: Whether all are read before any weight: a file is not opened for each.
        unused: Suffixes of names of tensors that are not read.
    """

    block: tuple[int, int] | None
    stored: str = "F8_E4M3"
    scale_dtypes: tuple[str, ...] = ("F32", "F16", "BF16")
    has_small_scales: bool = True
    unused: tuple[str, ...] = (".input_scale", ".activation_scale")

    def scale_names(self, weight: str) -> tuple[str, ...]:
        """Return the possible names of a weight's scale."""
        return tuple(weight + end for end in _SCALES)

    def grid(self, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """The shape of a weight's scale if there is one per block."""
        if self.block is None:
            return None
        return -(-shape[0] // self.block[0]), -(-shape[1] // self.block[1])

    def weight_region(self, region: tuple[slice, ...] | None) -> tuple[slice, ...] | None:
        """Return what is read of a weight for a region of it."""
        return region

    def scale_region(self, _: tuple[slice, ...] | None) -> None:
        """Return what is read of its scale: all."""

    def fits(self, scale: tuple[int, ...], shape: tuple[int, ...]) -> bool:
        """Whether a scale of this shape can belong to a weight `[rows, columns]`."""
        if len(shape) != 2:
            return False
        by_row = (shape[0],), (shape[0], 1)
        return scale in ((), (1,), *by_row, self.grid(shape))

    def widened(
        self,
        weight: Tensor,
        scale: Tensor,
        *,
        shape: tuple[int, ...],
        region: tuple[slice, ...] | None,
        to: dtype,
    ) -> Tensor:
        """Return a region of a weight multiplied by its scale, rounded once.

        Args:
            weight: The region, in FP8.
            scale: Scale of the whole weight, of a shape that `fits`.
            shape, region: See `Slot`.
        """
        scale = scale.float()
        if scale.numel() == 1:
            return (weight.float() * scale.reshape(())).to(to)
        whole = slice(None), slice(None)
        rows, columns = (
            range(size)[part] for size, part in zip(shape, region or whole, strict=True)
        )
        if self.block is None or scale.shape != self.grid(shape):
            of_rows = scale.reshape(-1, 1)[rows.start : rows.stop]
            return (weight.float() * of_rows).to(to)
        high, wide = self.block[0], min(self.block[1], shape[1])
        found = weight.new_empty(weight.shape, dtype=to)
        for block in range(rows.start // high, -(-rows.stop // high)):
            first, last = max(rows.start, block * high), min(rows.stop, (block + 1) * high)
            factors = scale[block].repeat_interleave(wide)[columns.start : columns.stop]
            here = slice(first - rows.start, last - rows.start)
            found[here] = weight[here].float() * factors
        return found


def read_fp8(given: Fields, remedy: str) -> Fp8Format:
    """Read a `quantization_config` of one of the two methods.

    Args:
        remedy: What to do if `compressed-tensors` has something else than floats.

    Raises:
        ConfigError: It has, or is not as described.
    """
    if given.get("quant_method") == "fp8":
        given.only("fmt", "e4m3")
        return Fp8Format(_block(given, "weight_block_size"))
    if (form := given.get("format")) != "float-quantized":
        raise given.error("format", form, remedy)
    given.only("kv_cache_scheme")
    given.only("transform_config", {})
    return Fp8Format(_block_of_groups(given))


def _block_of_groups(given: Fields) -> tuple[int, int] | None:
    """Read the groups of layers of `compressed-tensors`, which must have one kind of block."""
    groups, found = given.section("config_groups"), set()
    if groups is None:
        return None
    for name in sorted(groups.names()):
        group = groups.section(name)
        weights = None if group is None else group.section("weights")
        if weights is None:
            continue
        weights.only("num_bits", 8)
        weights.only("type", "float")
        weights.only("strategy", "tensor", "channel", "block")
        if weights.get("strategy") == "block":
            found.add(_block(weights, "block_structure"))
    if len(found) > 1:
        raise given.error("config_groups", sorted(map(str, found)), "one kind of block is needed")
    return found.pop() if found else None


def _block(fields: Fields, name: str) -> tuple[int, int] | None:
    value: Any = fields.get(name)
    if value is None:
        return None
    if not (
        isinstance(value, list)
        and len(value) == 2
        and all(isinstance(each, int) and each > 0 for each in value)
    ):
        raise fields.error(name, value, "two positive integers are needed")
    return value[0], value[1]
