"""FP8 weights: how a checkpoint scales them, and how they are widened as they are read.

They are widened to the dtype that the rest of the checkpoint has, so that the engine computes as
with a bf16 one, and they take as much memory. Two formats have them: `fp8`, as DeepSeek-V3 and
Qwen3-FP8 are published, and `compressed-tensors` where weights are float. Activations are not
rounded to FP8 here, and their scales are not read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from torch import Tensor, dtype

    from pdserve.models.config_json import Fields

STORED: Final = "F8_E4M3"
"""What safetensors call such a weight's dtype."""
UNUSED: Final = (".input_scale", ".activation_scale")
"""How names of tensors end that are not read."""
_SCALES: Final = ("_scale_inv", "_scale")
"""What is behind a weight's name in that of its scale."""


class Fp8Format(msgspec.Struct, frozen=True):
    """How a checkpoint's FP8 weights are scaled.

    Attributes:
        block: Rows and columns of a weight that have one scale; None: all have one, or each row.
    """

    block: tuple[int, int] | None

    def grid(self, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """The shape of a weight's scale, if it is by blocks."""
        if self.block is None:
            return None
        return -(-shape[0] // self.block[0]), -(-shape[1] // self.block[1])

    def fits(self, scale: tuple[int, ...], shape: tuple[int, ...]) -> bool:
        """Whether a scale of one shape can be that of a weight `[rows, columns]`."""
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
        """Return a region of a weight times its scale, rounded once.

        Args:
            weight: The region, in FP8.
            scale: The whole weight's, fp32, of a shape that `fits`.
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
        high, wide = self.block
        found = weight.new_empty(weight.shape, dtype=to)
        for block in range(rows.start // high, -(-rows.stop // high)):
            first, last = max(rows.start, block * high), min(rows.stop, (block + 1) * high)
            factors = scale[block].repeat_interleave(wide)[columns.start : columns.stop]
            here = slice(first - rows.start, last - rows.start)
            found[here] = weight[here].float() * factors
        return found


def scale_names(weight: str) -> tuple[str, ...]:
    """Return the names that the scale of a weight may have."""
    return tuple(weight + end for end in _SCALES)


def read_fp8(fields: Fields) -> Fp8Format | None:
    """Return how a configuration says that weights are stored; None: they are not quantised.

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
    elif method == "compressed-tensors" and given.get("format") == "float-quantized":
        given.only("kv_cache_scheme")
        block = _block_of_groups(given)
    else:
        raise fields.error("quantization_config", method, remedy)
    return Fp8Format(block)


def _block_of_groups(given: Fields) -> tuple[int, int] | None:
    """Read what `compressed-tensors` says of each group of layers; they have one kind of block."""
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
