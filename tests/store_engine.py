"""An engine core with a tiny model that has a store among its connectors, turned by the test."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from pdserve.config.schema import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    TransferConfig,
)
from pdserve.engine.loading import load_engine
from pdserve.observe.clock import SystemClock
from pdserve.parallel.place import CorePlace
from pdserve.wire.ids import RequestId
from pdserve.wire.request import GenerateRequest
from pdserve.wire.sampling import SamplingParams
from tests.scheduler.invariants import assert_nothing_held

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pdserve.wire.request import EngineOutput, KVStoreStats
    from tests.lmcache_server import LMCacheServer

NUM_TOKENS = 12
_TIMEOUT_S = 60.0


class StoreEngine:
    """Its own prefix cache is off, unless asked for: what is not computed came from elsewhere.

    Args:
        server: Of the store, if it has one.
        connector: The last one is the store.
        settings: Of the store, by name.
    """

    def __init__(
        self,
        model: Path,
        server: LMCacheServer | None = None,
        *,
        connector: str = "lmcache",
        block_size: int = 16,
        num_blocks: int = 64,
        tp: int = 1,
        prefix_caching: bool = False,
        max_tokens: int = 40,
        max_model_len: int = 256,
        **settings: Any,
    ) -> None:
        if server is not None:
            settings = {"url": server.url, "http_url": server.http_url, **settings}
        store = connector.rpartition(",")[2]
        told = {f"{store}.{name}": value for name, value in settings.items()}
        config = EngineConfig(
            model=ModelConfig(model=str(model), dtype="float32", max_model_len=max_model_len),
            device="cpu",
            cache=CacheConfig(
                num_gpu_blocks_override=num_blocks,
                block_size=block_size,
                enable_prefix_caching=prefix_caching,
            ),
            scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=max_tokens),
            parallel=ParallelConfig(tensor_parallel_size=tp),
            transfer=TransferConfig(kv_connector=connector, settings=told),
        )
        self.core, self.info = load_engine(
            config, place=CorePlace(), clock=SystemClock(), progress=lambda _: None
        )
        self.scheduler = self.core.scheduler
        self.outputs: list[EngineOutput] = []
        self._num_requests = 0

    def add(
        self, prompt: list[int], *, salt: str = "", num_tokens: int = NUM_TOKENS, **fields: Any
    ) -> RequestId:
        """Give it a prompt."""
        self._num_requests += 1
        request_id = RequestId(f"request {self._num_requests}")
        self.scheduler.add(
            GenerateRequest(
                request_id=request_id,
                prompt_token_ids=prompt,
                sampling=SamplingParams(
                    temperature=0.0, seed=0, max_tokens=num_tokens, ignore_eos=True
                ),
                arrival_s=time.monotonic(),
                cache_salt=salt,
                **fields,
            )
        )
        return request_id

    def turn(self) -> None:
        """Once round the core's loop."""
        self.core.step(self.outputs.extend)
        time.sleep(0.0005)

    def until(self, condition: Callable[[], object]) -> None:
        """Turn until something holds."""
        deadline_s = time.monotonic() + _TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline_s, self.stats
            self.turn()

    def finish(self) -> None:
        """Turn until nothing of any request is left."""
        scheduler = self.scheduler
        self.until(lambda: scheduler.is_idle and not scheduler.num_in_flight)
        assert_nothing_held(scheduler)

    def meet(self) -> StoreEngine:
        """Turn until it knows the server."""
        self.until(lambda: self.stats.is_up)
        return self

    def run(
        self, *prompts: list[int], salt: str = "", num_tokens: int = NUM_TOKENS
    ) -> list[list[int]]:
        """The tokens that follow each prompt, all at once."""
        ids = [self.add(prompt, salt=salt, num_tokens=num_tokens) for prompt in prompts]
        self.finish()
        return [self.tokens_of(each) for each in ids]

    def tokens_of(self, request_id: RequestId) -> list[int]:
        """What came out of a request."""
        mine = [output for output in self.outputs if output.request_id == request_id]
        assert not any(output.error for output in mine), mine
        return [token for output in mine for token in output.new_token_ids]

    @property
    def stats(self) -> KVStoreStats:
        """Of the store."""
        stats = self.scheduler.stats().kv_store
        assert stats is not None
        return stats

    @property
    def num_external(self) -> int:
        """Prompt tokens that were not computed, and counted once they had come."""
        return self.scheduler.stats().external_kv_tokens

    def close(self) -> None:
        """End it."""
        self.core.close(5.0)
