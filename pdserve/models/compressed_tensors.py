"""Reads a `quantization_config` of compressed-tensors, in which llm-compressor publishes.

Weights of FP8, of packed or plain integers and of NVFP4 are served, in groups of layers of
different schemes, too. Which layers a group has, and which none, is not read: a scheme is seen from
what is stored. Activations are not rounded here, and their scales are not read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pdserve.models.quantised_format import NUMBERS, QuantisedFormat
from pdserve.models.scaled import GROUPS, SCALE, WHOLE, ZEROS, ScaledMatrix

if TYPE_CHECKING:
    from pdserve.models.config_json import Fields

_ROLES: Final = {
    ".weight_packed": NUMBERS,
    ".weight_scale": SCALE,
    ".weight_zero_point": ZEROS,
    ".weight_g_idx": GROUPS,
    ".weight_global_scale": WHOLE,
}
_OF_ACTIVATIONS: Final = tuple(
    f".{side}_{what}"
    for side in ("input", "output")
    for what in ("scale", "zero_point", "global_scale")
)
_PACKED, _INT, _FLOAT, _NAIVE = (f"{each}-quantized" for each in ("pack", "int", "float", "naive"))
_NVFP4 = "nvfp4-pack-quantized"
_MIXED = "mixed-precision"
_FORMATS: Final = (_PACKED, _INT, _FLOAT, _NAIVE, _NVFP4)


def fp8_schemes(block: tuple[int, int] | None) -> list[ScaledMatrix]:
    """Return the schemes of FP8: by block if there is one, by row, and by tensor."""
    blocks: list[tuple[int | None, int | None]] = [(1, None), (None, None)]
    if block is not None:
        blocks.insert(0, block)
    return [ScaledMatrix("F8_E4M3", each) for each in blocks]


def read_compressed(given: Fields) -> QuantisedFormat:
    """Read the groups of layers.

    Raises:
        ConfigError: One of them has weights that are not served.
    """
    given.only("kv_cache_scheme")
    given.only("transform_config", {})
    if (sparsity := given.section("sparsity_config")) is not None:
        sparsity.only("format", "dense")
    form = given.get("format")
    if form not in (*_FORMATS, _MIXED):
        raise given.error("format", form, f"only {', '.join((*_FORMATS, _MIXED))} are supported")
    groups = given.section("config_groups")
    if groups is None:
        raise given.error("config_groups", None, "groups of layers are needed")
    schemes: list[ScaledMatrix] = []
    for name in sorted(groups.names()):
        group = groups.section(name)
        weights = None if group is None else group.section("weights")
        if group is None or weights is None:
            continue
        its = group.get("format") or form
        if its not in _FORMATS:
            raise group.error("format", its, f"only {', '.join(_FORMATS)} are supported")
        schemes += _schemes(weights, its)
    return QuantisedFormat(
        _ROLES,
        tuple(schemes),
        dtypes=("F8_E4M3", "I8"),
        stem=".weight",
        unused=(".weight_shape", *_OF_ACTIVATIONS),
    )


def _schemes(weights: Fields, form: str) -> list[ScaledMatrix]:
    if form == _NAIVE:
        form = _FLOAT if weights.get("type") == "float" else _INT
    if form == _FLOAT:
        weights.only("num_bits", 8)
        weights.only("type", "float")
        weights.only("strategy", "tensor", "channel", "block")
        is_block = weights.get("strategy") == "block"
        return fp8_schemes(read_block(weights, "block_structure") if is_block else None)
    if form == _NVFP4:
        weights.only("num_bits", 4)
        weights.only("type", "float")
        weights.only("strategy", "tensor_group")
        weights.only("group_size", 16)
        weights.only("symmetric", True)
        return [ScaledMatrix("U8", (1, 16), bits=4, scales=("F8_E4M3",))]
    return _integers(weights, is_packed=form == _PACKED)


def _integers(weights: Fields, *, is_packed: bool) -> list[ScaledMatrix]:
    weights.only("type", "int")
    bits = weights.count("num_bits", 8)
    if bits > 8 or (is_packed and bits not in (2, 4, 8)):
        raise weights.error("num_bits", bits, "only 2, 4 and 8 are supported")
    block = _block_of_strategy(weights)
    is_symmetric = weights.flag("symmetric", default=True)
    weights.only("actorder", False, "weight", "static", True, "group", "dynamic")
    middle = 1 << (bits - 1) if is_packed else 0
    # Zero points of tensors, and those that early versions wrote, are not packed.
    zeros = [None] if is_symmetric else ["I8", *(["I32"] if is_packed and block[0] else [])]
    return [
        ScaledMatrix(
            "I32" if is_packed else "I8",
            block,
            bits=bits if is_packed else 8,
            zeros=each,
            zero=middle if is_symmetric else 0,
            zero_step=middle if each == "I8" else 0,
            has_groups=weights.get("actorder") in (True, "group", "dynamic"),
        )
        for each in zeros
    ]


def _block_of_strategy(weights: Fields) -> tuple[int | None, int | None]:
    size = weights.get("group_size")
    match weights.get("strategy"):
        case "group":
            return 1, weights.count("group_size")
        case "channel":
            return 1, None
        case "tensor":
            return None, None
        case None if size is None:
            return None, None
        case None:
            return 1, None if size == -1 else weights.count("group_size")
        case strategy:
            raise weights.error(
                "strategy", strategy, "only group, channel and tensor are supported"
            )


def read_block(fields: Fields, name: str) -> tuple[int, int] | None:
    """Read the rows and columns that share a scale; None if they are absent.

    Raises:
        ConfigError: They are not two positive integers.
    """
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
