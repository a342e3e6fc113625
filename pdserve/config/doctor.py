"""Settings of `pdserve doctor`: one frozen struct and its flags."""

from __future__ import annotations

from typing import Final

import msgspec

from pdserve.config.checks import require_positive, require_url
from pdserve.config.setting import declare
from pdserve.config.tiers import parse_tiers


class DoctorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the doctor checks.

    Attributes:
        peer: Base URLs of running engines to compare with one another.
        host: Address at which the default ports should be free.
        kv_tiers: Value of `pdserve up --kv-tiers`, to check whether it would work.
        kv_server: HTTP address of a running store.
        block_size: Block size of the engines that will use it.
    """

    peer: tuple[str, ...] = ()
    json: bool = False
    host: str = "127.0.0.1"
    kv_tiers: str = ""
    kv_server: str = ""
    block_size: int = 16

    def __post_init__(self) -> None:
        require_positive("block-size", self.block_size)
        for url in self.peer:
            require_url(url, "peer")
        if self.kv_server:
            require_url(self.kv_server, "kv-server")
        if self.kv_tiers:
            parse_tiers(self.kv_tiers)


# fmt: off
DOCTOR_SETTINGS: Final = declare(
    "doctor",
    DoctorConfig,
    "doctor",
    (
        ("peer", "peer", "URL", "running engines to compare with one another"),
        ("json", "json", "", "print one JSON object instead of lines"),
        ("host", "host", "ADDRESS", "address at which the default ports should be free"),
        ("kv-tiers", "kv_tiers", "TIERS", "check whether a KV store with these tiers can run here, written as for `pdserve up`"),
        ("kv-server", "kv_server", "URL", "HTTP address of a running KV store, as http://127.0.0.1:8301"),
        ("block-size", "block_size", "N", "block size of the engines that will use the store"),
    ),
)
# fmt: on
