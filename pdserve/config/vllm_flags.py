"""Settings of `pdserve vllm-flags`: one frozen struct and its flags."""

from __future__ import annotations

from typing import Final

import msgspec

from pdserve.config.setting import declare


class VllmFlagsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Which rows of the table are shown.

    Attributes:
        filters: Rows that have each of these words, in any case.
    """

    filters: tuple[str, ...] = ()


VLLM_FLAGS_SETTINGS: Final = declare(
    "vllm_flags",
    VllmFlagsConfig,
    "output",
    (("filters", "filters", "FILTER", "words that a row must have"),),
)
