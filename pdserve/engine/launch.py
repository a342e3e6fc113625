"""The start message of an engine core's process, and whether cores share a world."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pdserve.config.log import LogConfig
from pdserve.config.schema import EngineConfig
from pdserve.engine.coordinator import Addresses
from pdserve.errors import ConfigError
from pdserve.models.reading import read_arch
from pdserve.parallel.place import CorePlace


class EngineLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """The settings, and the connection to the server.

    Attributes:
        pipe_fd: The inherited descriptor of the core's end of a `CorePipe`.
        log: Settings of the core's log, which goes to standard error.
        core: The core's place.
        coordinator: The coordinator's addresses, if there are several cores.
    """

    parent_pid: int
    log: LogConfig
    config: EngineConfig
    pipe_fd: int
    core: CorePlace = CorePlace()
    coordinator: Addresses | None = None


def require_ranks(config: EngineConfig) -> None:
    """Refuse ranks that have no part of the model, before as many processes start.

    Raises:
        ConfigError: There are such, or the model cannot be read.
    """
    parallel = config.parallel
    if parallel.num_ranks > 1:
        read_arch(Path(config.model.model)).require_ranks(
            tp=parallel.tensor_parallel_size, pp=parallel.pipeline_parallel_size
        )


def shares_experts(config: EngineConfig) -> bool:
    """Return whether the ranks of all engine cores form one world because they share experts.

    Raises:
        ConfigError: The settings share experts but the model has none, or it cannot be read.
    """
    parallel = config.parallel
    if not parallel.enable_expert_parallel:
        return False
    arch = read_arch(Path(config.model.model))
    if arch.moe is None:
        raise ConfigError(
            f"--enable-expert-parallel is set, but {config.model.model!r} ({arch.architecture}) "
            "has no experts: leave it out",
            param="enable-expert-parallel",
        )
    return parallel.data_parallel_size > 1
