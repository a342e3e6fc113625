"""Reads a `quantization_config` of GPTQ or AWQ.

Both store `qweight`, `scales` and `qzeros` as `[columns, rows]`. GPTQ packs columns of a row, and
zero points less one, unless the format is `gptq_v2` (GPTQModel, `_correct_gptq_v1_qzeros`); `g_idx`
has each column's group. AWQ packs rows of a column, in an order of its own. Which modules are not
quantised is seen from what is stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pdserve.models.quantised_format import NUMBERS, QuantisedFormat
from pdserve.models.scaled import GROUPS, SCALE, ZEROS, ScaledMatrix

if TYPE_CHECKING:
    from pdserve.models.config_json import Fields

_ROLES: Final = {".qweight": NUMBERS, ".scales": SCALE, ".qzeros": ZEROS, ".g_idx": GROUPS}
_OVERRIDES: Final = {"bits", "group_size", "desc_act"}


def read_gptq(given: Fields) -> QuantisedFormat:
    """Read that of GPTQ.

    Raises:
        ConfigError: Its weights are stored in a way that is not served.
    """
    for name in ("checkpoint_format", "format"):
        given.only(name, "gptq", "gptq_v2")
    given.only("pack_dtype", "int32")
    given.only("is_marlin_format", False)
    given.only("adapter")
    given.only("rotation")
    form = given.get("checkpoint_format") or given.get("format")
    is_symmetric = given.flag("sym", default=True)
    schemes = []
    for fields in (given, *_overrides(given)):
        bits = fields.count("bits", given.get("bits"))
        if bits not in (2, 4, 8):
            raise fields.error("bits", bits, "only 2, 4 and 8 are supported")
        size = _group_size(fields if "group_size" in fields else given)
        is_ordered = fields.flag("desc_act", default=given.flag("desc_act", default=False))
        schemes += [
            ScaledMatrix(
                "I32",
                (1, size),
                bits=bits,
                zeros="I32",
                zero=1 << (bits - 1) if is_symmetric else 0,
                zero_step=0 if form == "gptq_v2" else 1,
                has_groups=has_groups,
                is_transposed=True,
            )
            for has_groups in ((True,) if is_ordered else (True, False))
        ]
    return QuantisedFormat(_ROLES, tuple(schemes), stem=".weight")


def _overrides(given: Fields) -> list[Fields]:
    """Read what `dynamic` says for modules that are not as the others; `-:` skips some."""
    dynamic, found = given.section("dynamic"), []
    if dynamic is None:
        return []
    for name in sorted(dynamic.names()):
        if not name.startswith("-:") and (fields := dynamic.section(name)) is not None:
            for field in sorted(fields.names() - _OVERRIDES):
                raise fields.error(
                    field, fields.get(field), "this is supported for all modules only"
                )
            found.append(fields)
    return found


def read_awq(given: Fields) -> QuantisedFormat:
    """Read that of AWQ.

    Raises:
        ConfigError: Its weights are stored in a way that is not served.
    """
    for name in ("version", "format", "checkpoint_format"):
        given.only(name, "gemm", "GEMM")
    for name in ("bits", "w_bit"):
        given.only(name, 4)
    given.only("zero_point", True)
    if (backend := given.get("backend")) == "llm-awq":
        raise given.error("backend", backend, "only AutoAWQ's layout is supported")
    scheme = ScaledMatrix(
        "I32",
        (1, _group_size(given)),
        bits=4,
        zeros="I32",
        is_transposed=True,
        is_interleaved=True,
    )
    return QuantisedFormat(_ROLES, (scheme,), stem=".weight")


def _group_size(fields: Fields) -> int | None:
    """Columns of a row that share a scale; None: all."""
    return None if fields.get("group_size") == -1 else fields.count("group_size", 128)
