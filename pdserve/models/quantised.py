"""Which format of quantised weights a `config.json` names; most are widened as they are read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pdserve.models.compressed_tensors import fp8_schemes, read_block, read_compressed
from pdserve.models.gptq import read_awq, read_gptq
from pdserve.models.mxfp4 import MXFP4
from pdserve.models.quantised_format import QuantisedFormat
from pdserve.models.scaled import SCALE

if TYPE_CHECKING:
    from pdserve.models.config_json import Fields

_METHODS: Final = "fp8, compressed-tensors, gptq, awq and mxfp4"
_REMEDY: Final = f"of quantised checkpoints those of {_METHODS} are served: use one, or one in bf16"


def read_quantised(fields: Fields) -> QuantisedFormat | None:
    """Return how a configuration stores weights; None if they are not quantised.

    Raises:
        ConfigError: They are quantised in another way.
    """
    if (found := fields.get("compression_config")) is not None:
        raise fields.error("compression_config", found, _REMEDY)
    given = fields.section("quantization_config")
    if given is None:
        return None
    match given.get("quant_method"):
        case "mxfp4":
            return MXFP4
        case "fp8":
            return _read_fp8(given)
        case "compressed-tensors":
            return read_compressed(given)
        case "gptq":
            return read_gptq(given)
        case "awq":
            return read_awq(given)
        case method:
            raise given.error("quant_method", method, _REMEDY)


def _read_fp8(given: Fields) -> QuantisedFormat:
    """Read the method in which DeepSeek-V3 and Qwen3-FP8 are published."""
    given.only("fmt", "e4m3", "float8_e4m3fn")
    return QuantisedFormat(
        {"_scale_inv": SCALE, "_scale": SCALE},
        tuple(fp8_schemes(read_block(given, "weight_block_size"))),
        dtypes=("F8_E4M3",),
        unused=(".input_scale", ".activation_scale"),
    )
