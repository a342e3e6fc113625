"""What an engine core's process is told when it starts."""

from __future__ import annotations

import msgspec

from pdserve.config.schema import EngineConfig


class EngineLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """The settings, and where the server listens.

    Attributes:
        log_level: As in `logging`; the core logs to standard error.
    """

    parent_pid: int
    log_level: int
    config: EngineConfig
    inputs_address: str
    outputs_address: str
