"""A prefill and a decode engine with a store behind both: KV over real NIXL, a tiny model.

The store is LMCache with a real server, or the example of the documentation, whose halves share a
process.
"""

from __future__ import annotations

import itertools
import secrets
import time
from typing import TYPE_CHECKING

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
from pdserve.wire.transfer import EngineRef, KVHandoff, PushTicket
from tests.connectors.example_store import KEPT, StoreConnector
from tests.scheduler.invariants import assert_nothing_held

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pdserve.wire.request import EngineOutput
    from tests.lmcache_server import LMCacheServer

BLOCK_SIZE = 16
PROMPT = [(7 * i + 3) % 200 for i in range(3 * BLOCK_SIZE)]
LONGER = [*PROMPT, *((5 * i + 1) % 200 for i in range(21))]
NUM_TOKENS = 12
TIMEOUT_S = 60.0

_numbers = itertools.count()


class Engine:
    """An engine core over a worker with a tiny model; it has no prefix cache."""

    def __init__(self, model: Path, kv_connector: str, settings: dict[str, str]) -> None:
        config = EngineConfig(
            model=ModelConfig(model=str(model), dtype="float32"),
            device="cpu",
            cache=CacheConfig(
                num_gpu_blocks_override=64, block_size=BLOCK_SIZE, enable_prefix_caching=False
            ),
            scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=128),
            transfer=TransferConfig(
                kv_connector=kv_connector, handshake_timeout_s=30.0, settings=settings
            ),
        )
        self.core, self.info = load_engine(
            config, place=CorePlace(), clock=SystemClock(), progress=lambda _: None
        )
        self.scheduler = self.core.scheduler
        self.outputs: list[EngineOutput] = []

    @property
    def ref(self) -> EngineRef:
        return EngineRef(
            engine_id=self.info.engine_id,
            incarnation=self.info.incarnation,
            endpoints=tuple(self.info.endpoints),
            shape=self.info.kv_shape,
        )

    def add(
        self,
        prompt: list[int],
        *,
        is_prefill: bool = False,
        handoff: KVHandoff | None = None,
        ticket: PushTicket | None = None,
    ) -> None:
        self.scheduler.add(
            GenerateRequest(
                request_id=RequestId(f"r{next(_numbers)}"),
                prompt_token_ids=prompt,
                sampling=SamplingParams(
                    temperature=0.0, seed=0, max_tokens=NUM_TOKENS, ignore_eos=True
                ),
                arrival_s=time.monotonic(),
                remote_decode=is_prefill,
                handoff=handoff,
                ticket=ticket,
            )
        )

    def until(self, condition: Callable[[], object]) -> None:
        """Turn until something holds."""
        until_s = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < until_s
            self.core.step(self.outputs.extend)
            time.sleep(0.0005)

    @property
    def store_is_up(self) -> bool:
        stats = self.scheduler.stats().kv_store
        return stats is not None and stats.is_up

    @property
    def loaded(self) -> dict[str, int]:
        """Tokens by the connector that had them."""
        told = self.scheduler.stats().kv_source_tokens
        assert len(told) > 1
        return {name: number for name, number in told.items() if number}


def run(*engines: Engine) -> list[int]:
    """Step until all is over and nothing is held; the tokens of the last engine."""
    until_s = time.monotonic() + TIMEOUT_S
    while any(not each.scheduler.is_idle or each.scheduler.num_in_flight for each in engines):
        assert time.monotonic() < until_s
        for each in engines:
            each.core.step(each.outputs.extend)
        if len(engines) == 1 and any(each.handoff is not None for each in engines[0].outputs):
            return []
        time.sleep(0.0005)
    for each in engines:
        assert_nothing_held(each.scheduler)
        assert not any(output.error for output in each.outputs)
    return [token for output in engines[-1].outputs for token in output.new_token_ids]


@pytest.fixture
def make(
    tiny_model: Path, lmcache_server: LMCacheServer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Engine]]:
    """Starts an engine with connectors; those that have LMCache find one another's KV."""
    KEPT.clear()
    monkeypatch.setitem(BUILT_IN, "store", f"{StoreConnector.__module__}:StoreConnector")  # type: ignore[misc]
    engines: list[Engine] = []
    at = {"url": lmcache_server.url, "namespace": secrets.token_hex(4), "save": "all"}
    told = {f"lmcache.{name}": value for name, value in at.items()}

    def new(kv_connector: str) -> Engine:
        settings = told if "lmcache" in kv_connector else {}
        engines.append(engine := Engine(tiny_model, kv_connector, settings))
        if settings:
            engine.until(lambda: engine.store_is_up)
        return engine

    yield new
    for engine in engines:
        engine.core.close(5.0)
    lmcache_server.until(lambda status: not status["read_locked_count"])


def pulled(p: Engine, d: Engine, prompt: list[int]) -> list[int]:
    """P computes and leases, D reads."""
    p.add(prompt, is_prefill=True)
    run(p)
    (handoff,) = [each.handoff for each in p.outputs if each.handoff is not None]
    d.add(prompt, handoff=handoff)
    return run(p, d)


def pushed(p: Engine, d: Engine, prompt: list[int]) -> list[int]:
    """P writes while it computes."""
    ticket = PushTicket(nonce=f"push {next(_numbers)}", prefill=p.ref, decode=d.ref)
    d.add(prompt, ticket=ticket)
    p.add(prompt, is_prefill=True, ticket=ticket)
    return run(p, d)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hand_over", "store"), [(pulled, "store"), (pushed, "store"), (pushed, "lmcache")]
)
def test_p_loads_from_the_store_and_d_gets_all_of_it_from_p(
    make: Callable[[str], Engine],
    hand_over: Callable[[Engine, Engine, list[int]], list[int]],
    store: str,
) -> None:
    alone = make("null")
    alone.add(LONGER)
    right = run(alone)
    assert len(set(right)) > 3
    first, p, d = (make(f"nixl,{store}") for _ in range(3))
    first.add(PROMPT)
    run(first)
    assert first.loaded == {}
    assert hand_over(p, d, LONGER) == right
    assert p.loaded == {store: len(PROMPT)}
    assert d.loaded == {"nixl": len(LONGER)}
    assert p.scheduler.stats().local_compute_tokens == len(LONGER) - len(PROMPT)
    assert p.scheduler.stats().lease_ends["read"] == 1


@pytest.mark.slow
def test_ds_answer_is_saved_so_the_next_turn_loads_it_wherever_it_lands(
    make: Callable[[str], Engine],
) -> None:
    p, d, alone, landed = (
        make(each) for each in ("nixl,lmcache", "nixl,lmcache", "null", "lmcache")
    )
    answer = pulled(p, d, LONGER)
    turn = [*LONGER, *answer, *range(40, 60)]
    alone.add(turn)
    landed.add(turn)
    assert run(landed) == run(alone)
    # The newest token of the answer was never computed, so its KV is nowhere.
    num_whole = (len(LONGER) + len(answer) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert num_whole > len(LONGER)
    assert landed.scheduler.stats().external_kv_tokens == num_whole


@pytest.mark.slow
def test_a_store_that_lies_about_the_prefix_changes_ds_answer_so_it_came_from_there(
    make: Callable[[str], Engine],
) -> None:
    first, p, d = (make("nixl,store") for _ in range(3))
    first.add(LONGER)
    right = run(first)
    for layers in KEPT.values():
        for name in layers:
            layers[name] = layers[name] + 1.0
    assert pushed(p, d, LONGER) != right


@pytest.mark.slow
@pytest.mark.parametrize("hand_over", [pulled, pushed])
@pytest.mark.parametrize("store", ["store", "lmcache"])
def test_a_prompt_that_the_store_has_whole_is_handed_over_like_any_other(
    make: Callable[[str], Engine],
    hand_over: Callable[[Engine, Engine, list[int]], list[int]],
    store: str,
) -> None:
    alone = make("null")
    alone.add(PROMPT)
    right = run(alone)
    first, p, d = (make(f"nixl,{store}") for _ in range(3))
    first.add(PROMPT)
    run(first)
    assert hand_over(p, d, PROMPT) == right
    assert p.loaded == {store: len(PROMPT)}
    assert d.loaded == {"nixl": len(PROMPT)}
    assert p.scheduler.stats().lease_ends["read"] == 1
