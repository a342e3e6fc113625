"""What only NIXL is told, by `--kv-transfer-config.nixl.*`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from pdserve.errors import ConfigError


class NixlSettings(msgspec.Struct, frozen=True, kw_only=True):
    """See the module."""

    lanes: Annotated[
        int, Meta(description="threads that post transfers, each with a NIXL agent of its own")
    ] = 2
    backends: Annotated[tuple[str, ...], Meta(description="NIXL backends, in order")] = ("UCX",)

    def __post_init__(self) -> None:
        if self.lanes < 1:
            flag = "kv-transfer-config.nixl.lanes"
            raise ConfigError(f"--{flag} is {self.lanes}: it must be at least 1", param=flag)
