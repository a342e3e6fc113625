"""The example store in a whole engine with a model, by its line alone: what it brings is right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pdserve.config.connectors import BUILT_IN
from pdserve.wire.ids import RequestId
from pdserve.wire.transfer import Failed, LoadFailure
from tests.connectors.example_store import KEPT, StoreConnector, StoreWorker
from tests.store_engine import StoreEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path


pytestmark = pytest.mark.slow

BLOCK_SIZE = 16
AGAIN = RequestId("request 2")
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


@pytest.fixture
def make(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., StoreEngine]]:
    """Starts an engine whose connector is a class of some module."""
    KEPT.clear()
    engines: list[StoreEngine] = []

    def new(connector: type[StoreConnector] = StoreConnector) -> StoreEngine:
        line = f"{connector.__module__}:{connector.__name__}"
        monkeypatch.setitem(BUILT_IN, "store", line)  # type: ignore[misc]
        engines.append(StoreEngine(tiny_model, connector="store"))
        return engines[-1]

    yield new
    for engine in engines:
        engine.close()


def test_a_prefix_that_was_saved_layer_by_layer_is_loaded_layer_by_layer(
    make: Callable[..., StoreEngine],
) -> None:
    engine = make()
    longer = [*PROMPT, 5, 6, 7]
    first, alone = engine.run(PROMPT), engine.run(longer, salt="another")
    assert engine.num_external == 0
    assert len(KEPT) == 6
    assert engine.run(longer) == alone
    assert engine.num_external == len(PROMPT)
    # All of it is there, so that only its last token is computed.
    assert engine.run(PROMPT) == first
    assert engine.num_external == 2 * len(PROMPT)
    assert len(set(first[0])) > 3


def test_a_prefix_of_which_a_part_is_lost_on_the_way_gives_the_same_tokens(
    make: Callable[..., StoreEngine],
) -> None:
    engine = make(LosingConnector)
    first = engine.run(PROMPT)
    assert engine.run(PROMPT) == first
    stats = engine.scheduler.stats()
    assert stats.kv_load_failures["digest"] == 1
    assert stats.external_kv_tokens == BLOCK_SIZE


def test_a_layer_that_is_read_before_it_is_waited_for_would_give_other_tokens(
    make: Callable[..., StoreEngine],
) -> None:
    engine = make()
    first = engine.run(PROMPT)
    for layers in KEPT.values():
        layers[0, 1] = layers[0, 1] + 1.0  # as if the second layer were not there yet
    assert engine.run(PROMPT) != first
