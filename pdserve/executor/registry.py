"""Chooses the executor that runs the ranks of an engine core."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.errors import ConfigError
from pdserve.imports import large_imports

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.config.schema import EngineConfig
    from pdserve.executor.base import Executor
    from pdserve.parallel.place import CorePlace
    from pdserve.wire.ids import EngineId, Incarnation


def make_executor(
    config: EngineConfig,
    *,
    core: CorePlace,
    engine_id: EngineId,
    incarnation: Incarnation,
    progress: Callable[[str], None],
) -> Executor:
    """The executor that `--distributed-executor-backend` names, not started.

    Args:
        core: Where this engine core sits among those that share a world.

    Raises:
        ConfigError: The backend cannot be used here.
    """
    # Each backend loads what it needs: a core without a worker in it loads no torch.
    if config.parallel.executor_backend == "inline":
        with large_imports():
            from pdserve.executor.inline import InlineExecutor

        make: Callable[..., Executor] = InlineExecutor
    elif config.parallel.executor_backend == "ray":
        try:
            from pdserve.executor.ray import RayExecutor
        except ImportError as error:
            raise ConfigError(
                "--distributed-executor-backend is 'ray', which is not installed: "
                f"pip install 'pdserve[ray]' ({error})",
                param="distributed-executor-backend",
            ) from None

        make = RayExecutor
    else:
        from pdserve.executor.multiprocess import MultiprocessExecutor

        make = MultiprocessExecutor
    return make(config, core=core, engine_id=engine_id, incarnation=incarnation, progress=progress)
