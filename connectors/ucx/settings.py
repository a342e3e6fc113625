"""What only UCX is told, by `--kv-transfer-config.ucx.*`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from pdserve.errors import ConfigError


class UcxSettings(msgspec.Struct, frozen=True, kw_only=True):
    """See the module."""

    tls: Annotated[
        str, Meta(description="UCX transports, in UCX_TLS's form, as tcp or rc,cuda; empty is all")
    ] = ""
    messages: Annotated[
        int, Meta(description="messages of 8 MiB in flight at most, each way, a quarter per peer")
    ] = 16

    def __post_init__(self) -> None:
        if self.messages < 4:
            flag = "kv-transfer-config.ucx.messages"
            raise ConfigError(f"--{flag} is {self.messages}: it must be at least 4", param=flag)
