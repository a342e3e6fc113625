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

STORED: Final = "F8_E4M3"
"""The dtype of such a weight in safetensors."""
UNUSED: Final = (".input_scale", ".activation_scale")
"""Suffixes of names of tensors that are not read."""
_SCALES: Final = ("_scale_inv", "_scale")
"""Suffix of a scale's name after its weight's name."""


class Fp8Format(msgspec.Struct, frozen=True):
    """How a checkpoint's FP8 weights are scaled.

    Attributes:
        block: Rows and columns of a weight that share a scale; None: all or each row share one.
    """

    block: tuple[int, int] | None

    def grid(self, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """The shape of a weight's scale if there is one per block."""
        if self.block is None:
            return None
        return -(-shape[0] // self.block[0]), -(-shape[1] // self.block[1])

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
            scale: Scale of the whole weight, fp32, of a shape that `fits`.
            shape, region: See `Slot`.
        """
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


def scale_names(weight: str) -> tuple[str, ...]:
    """Return the possible names of a weight's scale."""
    return tuple(weight + end for end in _SCALES)


def read_fp8(fields: Fields) -> Fp8Format | None:
    """Return how a configuration stores weights; None if they are not quantised.

    Raises:
        ConfigError: They are quantised in another way.
    """
    remedy = "of quantised checkpoints those in FP8 are served: use one, or one in bf16 or fp16"
    if (found := fields.get("compression_config")) is not None:
        raise fields.error("compression_config", found, remedy)
    given = fields.section("quantization_config")
    if given is None:
        return None
    method, block = given.get("quant_method"), None
    if method == "fp8":
        given.only("fmt", "e4m3")
        block = _block(given, "weight_block_size")
    elif method == "compressed-tensors":
        if (form := given.get("format")) != "float-quantized":
            raise given.error("format", form, remedy)
        given.only("kv_cache_scheme")
        given.only("transform_config", {})
        block = _block_of_groups(given)
    else:
        raise given.error("quant_method", method, remedy)
    return Fp8Format(block)


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
