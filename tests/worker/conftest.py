"""Workers with tiny random models."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.config.schema import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from pdserve.config.speculative import SpeculativeConfig
from tests.worker.driver import TINY, workers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.worker.driver import Driver


@pytest.fixture
def make_driver(tmp_path: Path) -> Iterator[Callable[..., Driver]]:
    """Start a worker with a tiny random model, or that of a directory, and a driver for it."""
    with workers() as begin:

        def make(
            *,
            arch: dict[str, Any] | None = None,
            cache: CacheConfig | None = None,
            scheduler: SchedulerConfig | None = None,
            speculative: SpeculativeConfig | None = None,
            num_threads: int = 1,
            directory: Path | None = None,
            **model: Any,
        ) -> Driver:
            if directory is None:
                (tmp_path / "config.json").write_text(json.dumps({**TINY, **(arch or {})}))
                model = {"load_format": "dummy", **model}
            scheduler = scheduler or SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=512)
            return begin(
                EngineConfig(
                    model=ModelConfig(model=str(directory or tmp_path), **model),
                    device="cpu",
                    cache=cache or CacheConfig(num_gpu_blocks_override=128),
                    scheduler=scheduler,
                    parallel=ParallelConfig(num_threads=num_threads),
                    speculative=speculative or SpeculativeConfig(),
                )
            )

        yield make
