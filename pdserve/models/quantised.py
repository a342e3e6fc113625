"""Which format of quantised weights a `config.json` names; they are widened as they are read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.models.fp8 import Fp8Format, read_fp8
from pdserve.models.mxfp4 import Mxfp4Format

if TYPE_CHECKING:
    from pdserve.models.config_json import Fields

_REMEDY = "of quantised checkpoints those in FP8 or MXFP4 are served: use one, or one in bf16"


def read_quantised(fields: Fields) -> Fp8Format | Mxfp4Format | None:
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
            return Mxfp4Format()
        case "fp8" | "compressed-tensors":
            return read_fp8(given, _REMEDY)
        case method:
            raise given.error("quant_method", method, _REMEDY)
