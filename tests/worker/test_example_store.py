"""The example store under the real scheduler, worker and model: what it brings is right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pdserve.config.schema import CacheConfig, SchedulerConfig
from pdserve.connectors import registry
from pdserve.observe.clock import ManualClock
from pdserve.scheduler.scheduler import Scheduler
from pdserve.scheduler.state import Dimensions
from pdserve.wire.ids import RequestId
from pdserve.wire.request import GenerateRequest
from pdserve.wire.transfer import Failed, LoadFailure
from tests.connectors.example_store import StoreConnector, StoreWorker
from tests.worker.driver import params

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.connectors.base import ConnectorContext
    from pdserve.wire.request import EngineOutput
    from tests.worker.driver import Driver

BLOCK_SIZE = 16
PROMPT = [(7 * i + 3) % 200 for i in range(3 * BLOCK_SIZE)]


class LosingWorker(StoreWorker):
    """Finds of each load only the first block, and leaves what it finds in the others."""

    def start_load_kv(self, metadata: Any) -> None:
        super().start_load_kv(metadata)
        self._lost = [request_id for request_id, _, _ in self._step.loads[1:]]
        del self._step.loads[1:]

    def wait_for_save(self) -> Sequence[Failed]:
        super().wait_for_save()
        return [
            Failed(request_id=each, reason=LoadFailure.DIGEST, num_valid_tokens=BLOCK_SIZE)
            for each in dict.fromkeys(self._lost)
        ]


class RecordedConnector(StoreConnector, frozen=True, kw_only=True):
    """Makes worker halves of a class, and keeps what they are told."""

    halves: type[StoreWorker]
    contexts: list[ConnectorContext] = msgspec.field(default_factory=list)

    def make_worker(self, context: ConnectorContext, wake: Callable[[], None]) -> StoreWorker:
        self.contexts.append(context)
        return self.halves(context, self.stored)


class Engine:
    """A scheduler, a worker with a tiny model, and a store between its requests."""

    def __init__(
        self,
        make_driver: Callable[..., Driver],
        monkeypatch: pytest.MonkeyPatch,
        make_worker: type[StoreWorker] = StoreWorker,
    ) -> None:
        connector = RecordedConnector(halves=make_worker)
        monkeypatch.setattr(registry, "find", lambda *_: connector)
        config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=40)
        cache = CacheConfig(
            num_gpu_blocks_override=64, block_size=BLOCK_SIZE, enable_prefix_caching=False
        )
        driver = make_driver(cache=cache, scheduler=config)
        self.store = connector.stored
        self.worker = driver.worker
        self.scheduler = Scheduler(
            config,
            cache,
            Dimensions(
                num_blocks=64,
                max_model_len=driver.info.max_model_len,
                vocab_size=driver.info.vocab_size,
            ),
            connector.make_scheduler(connector.contexts[0], []),
            ManualClock(),
        )

    def run(self, name: str, prompt: list[int], *, salt: str = "") -> list[int]:
        """The tokens that follow a prompt."""
        self.scheduler.add(
            GenerateRequest(
                request_id=RequestId(name),
                prompt_token_ids=prompt,
                sampling=params(max_tokens=12, ignore_eos=True),
                arrival_s=0.0,
                cache_salt=salt,
            )
        )
        outputs: list[EngineOutput] = []
        while (step := self.scheduler.schedule()) is not None:
            self.scheduler.update(self.worker.execute(step))
            outputs += self.scheduler.drain_outputs()
        self.scheduler.assert_nothing_held()
        assert not any(output.error for output in outputs)
        return [token for output in outputs for token in output.new_token_ids]

    @property
    def num_external(self) -> int:
        return self.scheduler.stats().external_kv_tokens


def test_a_prefix_that_was_saved_layer_by_layer_is_loaded_layer_by_layer(
    make_driver: Callable[..., Driver],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(make_driver, monkeypatch)
    longer = [*PROMPT, 5, 6, 7]
    first, alone = engine.run("first", PROMPT), engine.run("alone", longer, salt="another")
    assert engine.num_external == 0
    assert len(engine.store) == 6
    assert engine.run("again", longer) == alone
    assert engine.num_external == len(PROMPT)
    # All of it is there, so that only its last token is computed.
    assert engine.run("whole", PROMPT) == first
    assert engine.num_external == 2 * len(PROMPT)
    assert len(set(first)) > 3


def test_a_prefix_of_which_a_part_is_lost_on_the_way_gives_the_same_tokens(
    make_driver: Callable[..., Driver],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(make_driver, monkeypatch, LosingWorker)
    first = engine.run("first", PROMPT)
    assert engine.run("again", PROMPT) == first
    stats = engine.scheduler.stats()
    assert stats.kv_load_failures["digest"] == 1
    assert stats.external_kv_tokens == BLOCK_SIZE


def test_a_layer_that_is_read_before_it_is_waited_for_would_give_other_tokens(
    make_driver: Callable[..., Driver],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(make_driver, monkeypatch)
    first = engine.run("first", PROMPT)
    for layers in engine.store.values():
        layers[1] = layers[1] + 1.0  # as if the second layer were not there yet
    assert engine.run("again", PROMPT) != first
