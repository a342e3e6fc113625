"""LMCache in whole engines with models: what comes from the store gives the tokens of computing."""

from __future__ import annotations

import array
import mmap
import secrets
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.config.connectors import BUILT_IN
from pdserve.connectors.lmcache import LMCacheConnector
from tests.lmcache_server import memory_status
from tests.store_engine import NUM_TOKENS, StoreEngine
from tests.tiny_models import greedy_by_transformers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.lmcache_server import LMCacheServer

pytestmark = pytest.mark.slow

CHUNK = 16
NUM_KV_HEADS = 2
HEADER_BYTES = 64
PROMPTS = [[3 + (17 * i + 5 * n) % 311 for i in range(n)] for n in (5, 16, 33, 100)]
NUM_WHOLE = sum(len(prompt) // CHUNK * CHUNK for prompt in PROMPTS)
LONG = PROMPTS[-1]


class TrustingConnector(LMCacheConnector, frozen=True, kw_only=True):
    """Believes every byte."""

    name: str = "trusting"
    checks_digests: bool = False


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[list[int]]:
    """What transformers writes after the prompts."""
    return greedy_by_transformers(tiny_model, PROMPTS, NUM_TOKENS)


@pytest.fixture
def make(
    tiny_model: Path, lmcache_server: LMCacheServer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., StoreEngine]]:
    """Starts engines that share a namespace of the server."""
    line = f"{TrustingConnector.__module__}:{TrustingConnector.__name__}"
    monkeypatch.setitem(BUILT_IN, "trusting", line)  # type: ignore[misc]
    engines: list[StoreEngine] = []
    namespace = secrets.token_hex(4)
    others = memory_status(lmcache_server.http_url)["active_sessions"]

    def new(**arguments: Any) -> StoreEngine:
        arguments = {"namespace": namespace, **arguments}
        engines.append(StoreEngine(tiny_model, lmcache_server, **arguments).meet())
        return engines[-1]

    yield new
    for engine in engines:
        engine.close()
    assert_no_locks(lmcache_server)
    lmcache_server.until(lambda status: status["active_sessions"] <= others)


def assert_no_locks(server: LMCacheServer) -> None:
    """Nothing is locked at the server, once it has heard the last of it."""
    server.until(lambda status: not status["read_locked_count"] + status["write_locked_count"])


def bodies(server: LMCacheServer) -> Iterator[tuple[mmap.mmap, int]]:
    """Where KV lies behind a header in the server's memory."""
    with server.shm.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        at = memory.find(b"pdserve1")
        while at >= 0:
            yield memory, at + HEADER_BYTES
            at = memory.find(b"pdserve1", at + 1)


def test_cold_warm_and_on_another_engine_the_tokens_are_those_of_transformers(
    make: Callable[..., StoreEngine], expected: list[list[int]]
) -> None:
    engine = make()
    assert engine.run(*PROMPTS) == expected
    assert engine.num_external == 0
    assert engine.run(*PROMPTS) == expected
    assert engine.num_external == engine.stats.num_hit_tokens == NUM_WHOLE
    another = make(block_size=8)
    assert another.run(*PROMPTS) == expected
    assert another.num_external == NUM_WHOLE
    assert another.stats.num_failed_loads == engine.stats.num_failed_loads == 0


def test_tenants_share_nothing(make: Callable[..., StoreEngine], expected: list[list[int]]) -> None:
    engine = make()
    for salt in ("", "one", "another/@"):
        assert engine.run(LONG, salt=salt) == [expected[-1]]
        assert engine.num_external == 0
    assert engine.run(LONG, salt="another/@") == [expected[-1]]
    assert engine.num_external == len(LONG) // CHUNK * CHUNK


def test_answers_are_saved_if_asked_for_and_the_next_turn_finds_them(
    make: Callable[..., StoreEngine], expected: list[list[int]]
) -> None:
    for save, num_found in (("prompt", 32), ("all", 48), ("off", 0)):
        engine = make(save=save, namespace=secrets.token_hex(4))
        prompt = LONG[:40]
        turn = engine.add(prompt, num_tokens=10)
        engine.finish()
        engine.run([*prompt, *engine.tokens_of(turn), 5, 6, 7])
        assert engine.num_external == num_found, save


def test_a_prompt_with_more_chunks_than_may_wait_is_saved_as_far_as_they_may(
    make: Callable[..., StoreEngine], expected: list[list[int]]
) -> None:
    engine = make(max_pending_chunks=4)
    for num_saved, num_dropped in ((4, 2), (6, 2)):
        assert engine.run(LONG) == [expected[-1]]
        assert engine.stats.num_saved_chunks == num_saved * NUM_KV_HEADS
        assert engine.stats.num_dropped_chunks == num_dropped
    assert engine.num_external == 4 * CHUNK


def test_a_local_prefix_is_not_loaded_again_even_if_it_ends_inside_a_chunk(
    make: Callable[..., StoreEngine], expected: list[list[int]]
) -> None:
    make().run(LONG)
    engine = make(block_size=8, prefix_caching=True, save="off")
    engine.run(LONG[:25])  # chunk 0 is loaded, 8 tokens of chunk 1 are computed
    assert engine.num_external == 16
    assert engine.run(LONG) == [expected[-1]]
    assert engine.num_external == 16 + 96 - 24
    assert engine.stats.num_failed_loads == 0


def test_wrong_bytes_are_a_miss_that_is_counted_and_replaced(
    make: Callable[..., StoreEngine], lmcache_server: LMCacheServer, expected: list[list[int]]
) -> None:
    engine = make(timeout_s=20.0)
    engine.run(LONG)
    for memory, at in bodies(lmcache_server):
        memory[at + 100] ^= 1
    assert engine.run(LONG) == [expected[-1]]
    assert engine.num_external == 0
    assert engine.stats.num_wrong_chunks == 1
    assert engine.stats.num_replaced_chunks == 1


def test_without_digests_wrong_bytes_would_give_other_tokens(
    make: Callable[..., StoreEngine], lmcache_server: LMCacheServer, expected: list[list[int]]
) -> None:
    engine = make(connector="trusting")
    assert engine.run(LONG) == [expected[-1]]
    assert engine.run(LONG) == [expected[-1]]
    for memory, at in bodies(lmcache_server):
        words = array.array("I", memory[at : at + 4096])
        words.reverse()
        memory[at : at + 4096] = words.tobytes()
    assert engine.run(LONG) != [expected[-1]]
    assert engine.num_external == 2 * (len(LONG) // CHUNK * CHUNK)


def test_a_request_that_is_aborted_at_any_moment_leaves_nothing_behind(
    make: Callable[..., StoreEngine], lmcache_server: LMCacheServer, expected: list[list[int]]
) -> None:
    engine = make(save="all")
    engine.run(LONG)
    for num_turns in range(24):
        request_id = engine.add(LONG, num_tokens=40)
        for _ in range(num_turns):
            engine.turn()
        engine.scheduler.abort([request_id])
        engine.finish()
    assert engine.run(LONG) == [expected[-1]]
    assert_no_locks(lmcache_server)


@pytest.mark.parametrize("tp", [1, 2])
def test_no_session_of_the_server_outlives_a_load(
    make: Callable[..., StoreEngine], lmcache_server: LMCacheServer, tp: int
) -> None:
    """It begins one anew for what comes after its end, and keeps that for ten minutes."""

    def num_sessions() -> int:
        engine.turn()
        return int(memory_status(lmcache_server.http_url)["active_sessions"])

    engine = make(tp=tp)
    engine.run(LONG)
    before = num_sessions()
    for _ in range(20):
        engine.run(LONG, num_tokens=1)
    engine.until(lambda: num_sessions() <= before)
    assert engine.num_external


def test_requests_that_are_preempted_write_the_tokens_of_transformers(
    make: Callable[..., StoreEngine], tiny_model: Path
) -> None:
    prompts = [LONG[:60], LONG[20:80]]
    wanted = greedy_by_transformers(tiny_model, prompts, 60)
    engine = make(num_blocks=10, save="all", max_tokens=200, max_model_len=144)
    assert engine.run(*prompts, num_tokens=60) == wanted
    assert engine.scheduler.stats().num_preemptions > 0
    assert engine.run(*prompts, num_tokens=60) == wanted
    assert engine.num_external > 0
