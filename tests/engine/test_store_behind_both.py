"""A prefill and a decode engine with a store behind both: KV over real NIXL, a tiny model.

The store is LMCache with a real server, or the example of the documentation, whose halves share a
process.
"""

from __future__ import annotations

import itertools
import secrets
import time
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.config.connectors import BUILT_IN
from pdserve.wire.transfer import EngineRef, PushTicket
from tests.connectors.example_store import KEPT, StoreConnector
from tests.scheduler.invariants import assert_nothing_held
from tests.store_engine import StoreEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.lmcache_server import LMCacheServer

BLOCK_SIZE = 16
NUM_KV_HEADS = 2
PROMPT = [(7 * i + 3) % 200 for i in range(3 * BLOCK_SIZE)]
LONGER = [*PROMPT, *((5 * i + 1) % 200 for i in range(21))]
TIMEOUT_S = 60.0

_numbers = itertools.count()


def ref(engine: StoreEngine) -> EngineRef:
    return EngineRef(
        engine_id=engine.info.engine_id,
        incarnation=engine.info.incarnation,
        endpoints=tuple(engine.info.endpoints),
        shape=engine.info.kv_shape,
    )


def loaded(engine: StoreEngine) -> dict[str, int]:
    """Tokens by the connector that had them."""
    told = engine.scheduler.stats().kv_source_tokens
    assert len(told) > 1
    return {name: number for name, number in told.items() if number}


def run(*engines: StoreEngine) -> list[int]:
    """Turn until all is over and nothing is held; the tokens of the last engine."""
    until_s = time.monotonic() + TIMEOUT_S
    while any(not each.scheduler.is_idle or each.scheduler.num_in_flight for each in engines):
        assert time.monotonic() < until_s
        for each in engines:
            each.turn()
        if len(engines) == 1 and any(each.handoff is not None for each in engines[0].outputs):
            return []
    for each in engines:
        assert_nothing_held(each.scheduler)
        assert not any(output.error for output in each.outputs)
    return [token for output in engines[-1].outputs for token in output.new_token_ids]


@pytest.fixture
def make(
    tiny_model: Path, lmcache_server: LMCacheServer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., StoreEngine]]:
    """Starts an engine with connectors; those that have LMCache find one another's KV."""
    KEPT.clear()
    monkeypatch.setitem(BUILT_IN, "store", f"{StoreConnector.__module__}:StoreConnector")  # type: ignore[misc]
    engines: list[StoreEngine] = []
    namespace = secrets.token_hex(4)

    def new(connector: str) -> StoreEngine:
        kind: dict[str, Any] = {"connector": connector, "max_tokens": 128}
        if "lmcache" in connector:
            kind |= {"server": lmcache_server, "namespace": namespace, "save": "all"}
        engines.append(engine := StoreEngine(tiny_model, **kind))
        return engine.meet() if "lmcache" in connector else engine

    yield new
    for engine in engines:
        engine.close()
    lmcache_server.until(lambda status: not status["read_locked_count"])


def pulled(p: StoreEngine, d: StoreEngine, prompt: list[int]) -> list[int]:
    """P computes and leases, D reads."""
    p.add(prompt, remote_decode=True)
    run(p)
    (handoff,) = [each.handoff for each in p.outputs if each.handoff is not None]
    d.add(prompt, handoff=handoff)
    return run(p, d)


def pushed(p: StoreEngine, d: StoreEngine, prompt: list[int]) -> list[int]:
    """P writes while it computes."""
    ticket = PushTicket(nonce=f"push {next(_numbers)}", prefill=ref(p), decode=ref(d))
    d.add(prompt, ticket=ticket)
    p.add(prompt, remote_decode=True, ticket=ticket)
    return run(p, d)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hand_over", "store"), [(pulled, "store"), (pushed, "store"), (pushed, "lmcache")]
)
def test_p_loads_from_the_store_and_d_gets_all_of_it_from_p(
    make: Callable[[str], StoreEngine],
    hand_over: Callable[[StoreEngine, StoreEngine, list[int]], list[int]],
    store: str,
) -> None:
    alone = make("null")
    alone.add(LONGER)
    right = run(alone)
    assert len(set(right)) > 3
    first, p, d = (make(f"nixl,{store}") for _ in range(3))
    first.add(PROMPT)
    run(first)
    assert loaded(first) == {}
    assert hand_over(p, d, LONGER) == right
    assert loaded(p) == {store: len(PROMPT)}
    assert loaded(d) == {"nixl": len(LONGER)}
    assert p.scheduler.stats().local_compute_tokens == len(LONGER) - len(PROMPT)
    if store == "lmcache":
        # The one whole chunk that it has computed; D, which has it too, may be first.
        assert p.stats.num_saved_chunks + p.stats.num_refused_chunks == NUM_KV_HEADS
    assert p.scheduler.stats().lease_ends["read"] == 1


@pytest.mark.slow
def test_ds_answer_is_saved_so_the_next_turn_loads_it_wherever_it_lands(
    make: Callable[[str], StoreEngine],
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
    make: Callable[[str], StoreEngine],
) -> None:
    first, p, d = (make("nixl,store") for _ in range(3))
    first.add(LONGER)
    right = run(first)
    for layers in KEPT.values():
        for name in layers:
            layers[name] = layers[name] + 1.0
    assert pushed(p, d, LONGER) != right


@pytest.mark.covering(1)
@pytest.mark.slow
@pytest.mark.parametrize("hand_over", [pulled, pushed])
@pytest.mark.parametrize("store", ["store", "lmcache"])
def test_a_prompt_that_the_store_has_whole_is_handed_over_like_any_other(
    make: Callable[[str], StoreEngine],
    hand_over: Callable[[StoreEngine, StoreEngine, list[int]], list[int]],
    store: str,
) -> None:
    alone = make("null")
    alone.add(PROMPT)
    right = run(alone)
    first, p, d = (make(f"nixl,{store}") for _ in range(3))
    first.add(PROMPT)
    run(first)
    assert hand_over(p, d, PROMPT) == right
    assert loaded(p) == {store: len(PROMPT)}
    assert loaded(d) == {"nixl": len(PROMPT)}
    assert p.scheduler.stats().lease_ends["read"] == 1
