"""Settings of `pdserve doctor`: one frozen struct and its flags."""

from __future__ import annotations

from typing import Final

import msgspec

from pdserve.config.checks import POSITIVE, require, require_url
from pdserve.config.setting import declare
from pdserve.config.tiers import parse_tiers


class DoctorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the doctor looks at.

    Attributes:
        peer: Base URLs of running engines to compare with one another.
        host: Where the default ports should be free.
        kv_tiers: Those that `pdserve up --kv-tiers` would be given, to see whether they can be had.
        kv_server: HTTP side of a store that runs.
        block_size: Of the engines that are to use it.
    """

    peer: tuple[str, ...] = ()
    json: bool = False
    host: str = "127.0.0.1"
    kv_tiers: str = ""
    kv_server: str = ""
    block_size: int = 16

    def __post_init__(self) -> None:
        require(self.block_size > 0, "block-size", self.block_size, POSITIVE)
        if self.kv_server:
            require_url(self.kv_server, "kv-server")
        if self.kv_tiers:
            parse_tiers(self.kv_tiers)


DOCTOR_SETTINGS: Final = declare(
    "doctor",
    DoctorConfig,
    "doctor",
    (
        ("peer", "peer", "URL", "running engines to compare with one another"),
        ("json", "json", "", "print one JSON object instead of lines"),
        ("host", "host", "ADDRESS", "where the default ports should be free"),
        (
            "kv-tiers",
            "kv_tiers",
            "TIERS",
            "can a store with these run here? written as for `pdserve up`",
        ),
        (
            "kv-server",
            "kv_server",
            "URL",
            "HTTP side of a store that runs, as http://127.0.0.1:8301",
        ),
        ("block-size", "block_size", "N", "of the engines that are to use it"),
    ),
)
