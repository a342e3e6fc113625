"""The example store in a whole engine with a model, by its line alone: what it brings is right."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.config.connectors import BUILT_IN
from pdserve.config.schema import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    TransferConfig,
)
from pdserve.engine.loading import load_engine
from pdserve.observe.clock import SystemClock
from pdserve.parallel.place import CorePlace
from pdserve.wire.ids import RequestId
from pdserve.wire.request import GenerateRequest
from pdserve.wire.sampling import SamplingParams
from pdserve.wire.transfer import Failed, LoadFailure
from tests.connectors.example_store import KEPT, StoreConnector, StoreWorker
from tests.scheduler.invariants import assert_nothing_held

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from pdserve.wire.request import EngineOutput

pytestmark = pytest.mark.slow

BLOCK_SIZE = 16
AGAIN = RequestId("again")
PROMPT = [(7 * i + 3) % 200 for i in range(3 * BLOCK_SIZE)]


class LosingWorker(StoreWorker):
    """Finds of each load only the first block, and leaves what it finds in the others."""

    def start_load_kv(self, metadata: Any) -> bool:
        is_layerwise = super().start_load_kv(metadata)
        self._has_lost = len(self._loads) > 1
        del self._loads[1:]
        return is_layerwise

    def wait_for_save(self) -> Sequence[Failed]:
        failed = Failed(request_id=AGAIN, reason=LoadFailure.DIGEST, num_valid_tokens=BLOCK_SIZE)
        return [failed] if self._has_lost else []


class LosingConnector(StoreConnector):
    def make_worker(self, context: Any, wake: Callable[[], None]) -> LosingWorker:
        return LosingWorker(context.rank)


class Engine:
    """An engine core over a worker with a tiny model, and the store between its requests."""

    def __init__(self, model: Path) -> None:
        config = EngineConfig(
            model=ModelConfig(model=str(model)),
            device="cpu",
            cache=CacheConfig(
                num_gpu_blocks_override=64, block_size=BLOCK_SIZE, enable_prefix_caching=False
            ),
            scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=40),
            transfer=TransferConfig(kv_connector="store"),
        )
        self.core, _ = load_engine(
            config, place=CorePlace(), clock=SystemClock(), progress=lambda _: None
        )
        self.scheduler = self.core.scheduler

    def run(self, name: str, prompt: list[int], *, salt: str = "") -> list[int]:
        """The tokens that follow a prompt."""
        self.scheduler.add(
            GenerateRequest(
                request_id=RequestId(name),
                prompt_token_ids=prompt,
                sampling=SamplingParams(temperature=0.0, seed=0, max_tokens=12, ignore_eos=True),
                arrival_s=0.0,
                cache_salt=salt,
            )
        )
        outputs: list[EngineOutput] = []
        while not self.scheduler.is_idle or self.scheduler.num_in_flight:
            self.core.step(outputs.extend)
            time.sleep(0.0005)
        assert_nothing_held(self.scheduler)
        assert not any(output.error for output in outputs)
        return [token for output in outputs for token in output.new_token_ids]

    @property
    def num_external(self) -> int:
        return self.scheduler.stats().external_kv_tokens


@pytest.fixture
def make(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    """Starts an engine whose connector is a class of some module."""
    KEPT.clear()
    engines: list[Engine] = []

    def new(connector: type[StoreConnector] = StoreConnector) -> Engine:
        line = f"{connector.__module__}:{connector.__name__}"
        monkeypatch.setitem(BUILT_IN, "store", line)  # type: ignore[misc]
        engines.append(Engine(tiny_model))
        return engines[-1]

    yield new
    for engine in engines:
        engine.core.close(5.0)


def test_a_prefix_that_was_saved_layer_by_layer_is_loaded_layer_by_layer(
    make: Callable[..., Engine],
) -> None:
    engine = make()
    longer = [*PROMPT, 5, 6, 7]
    first, alone = engine.run("first", PROMPT), engine.run("alone", longer, salt="another")
    assert engine.num_external == 0
    assert len(KEPT) == 6
    assert engine.run("again", longer) == alone
    assert engine.num_external == len(PROMPT)
    # All of it is there, so that only its last token is computed.
    assert engine.run("whole", PROMPT) == first
    assert engine.num_external == 2 * len(PROMPT)
    assert len(set(first)) > 3


def test_a_prefix_of_which_a_part_is_lost_on_the_way_gives_the_same_tokens(
    make: Callable[..., Engine],
) -> None:
    engine = make(LosingConnector)
    first = engine.run("first", PROMPT)
    assert engine.run("again", PROMPT) == first
    stats = engine.scheduler.stats()
    assert stats.kv_load_failures["digest"] == 1
    assert stats.external_kv_tokens == BLOCK_SIZE


def test_a_layer_that_is_read_before_it_is_waited_for_would_give_other_tokens(
    make: Callable[..., Engine],
) -> None:
    engine = make()
    first = engine.run("first", PROMPT)
    for layers in KEPT.values():
        layers[0, 1] = layers[0, 1] + 1.0  # as if the second layer were not there yet
    assert engine.run("again", PROMPT) != first
