"""The tiers of LMCache and their trouble: what outlives whom, wrong files, a lost server."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.lmcache_server import LMCacheServer, free_port
from tests.store_engine import NUM_TOKENS, StoreEngine
from tests.tiny_models import greedy_by_transformers, write_tiny_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

pytestmark = pytest.mark.slow

CHUNK = 64
PROMPTS = [[3 + (17 * i + 5 * n) % 311 for i in range(n)] for n in (70, 200, 128)]
NUM_CHUNKS = sum(len(prompt) // CHUNK for prompt in PROMPTS)
LATE_S = 1.0


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[list[int]]:
    """What transformers writes after the prompts."""
    return greedy_by_transformers(tiny_model, PROMPTS, NUM_TOKENS)


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server keeps what its memory has not."""
    return tmp_path_factory.mktemp("tier")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, disk: Path) -> Iterator[LMCacheServer]:
    """One with a tier on disk; tests may end it, and leave it running."""
    log = tmp_path_factory.mktemp("lmcache") / "server.log"
    with LMCacheServer(log, chunk_tokens=CHUNK, disk=disk) as running:
        yield running


@pytest.fixture
def make(
    tiny_model: Path, server: LMCacheServer, request: pytest.FixtureRequest
) -> Iterator[Callable[..., StoreEngine]]:
    """Starts engines that share a namespace of the server."""
    engines: list[StoreEngine] = []

    def new(model: Path = tiny_model, at: LMCacheServer = server, **arguments: Any) -> StoreEngine:
        engines.append(StoreEngine(model, at, namespace=request.node.name[:40], **arguments))
        return engines[-1].meet()

    yield new
    for engine in engines:
        engine.close()


def files(disk: Path, num_chunks: int = NUM_CHUNKS) -> list[Path]:
    """Those of so many chunks with two KV heads, once they are there; smallest names first."""
    deadline_s = time.monotonic() + 20.0
    while len(found := sorted(disk.rglob("*.data"))) < 2 * num_chunks:
        assert time.monotonic() < deadline_s, found
        time.sleep(0.02)
    return found


def restart(server: LMCacheServer) -> None:
    """As after a crash: its memory is gone."""
    server.close()
    server.start()


def flip(found: Sequence[Path]) -> None:
    """One bit of each."""
    for path in found:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.write_bytes(data)


def swap(found: Sequence[Path]) -> None:
    """The bytes of each with those of another."""
    contents = [path.read_bytes() for path in found]
    for path, data in zip(found, contents[1:] + contents[:1], strict=True):
        path.write_bytes(data)


def truncate(found: Sequence[Path]) -> None:
    """To the half."""
    for path in found:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(disk: Path) -> None:
    for path in disk.rglob("*.data"):
        path.unlink()


def test_what_is_on_disk_outlives_a_server_that_dies_and_its_engine_and_wrong_files_are_misses(
    make: Callable[..., StoreEngine],
    server: LMCacheServer,
    disk: Path,
    expected: list[list[int]],
) -> None:
    empty(disk)
    writer = make(block_size=16, heartbeat_s=0.3)
    assert writer.run(*PROMPTS) == expected
    found = files(disk)
    server.kill()
    began_s = time.monotonic()
    assert writer.run(*PROMPTS) == expected
    assert time.monotonic() - began_s < LATE_S + 4.0  # on a machine that does much else
    writer.until(lambda: not writer.stats.is_up)
    num_lookups = writer.stats.num_lookups
    assert writer.run(*PROMPTS) == expected
    assert writer.stats.num_lookups == num_lookups  # nobody waits for it any more
    restart(server)
    writer.until(lambda: writer.stats.is_up)
    num_before = writer.num_external
    assert writer.run(*PROMPTS) == expected
    assert writer.num_external == num_before + NUM_CHUNKS * CHUNK
    writer.close()
    reader = make(block_size=64, num_blocks=20, save="off")
    assert reader.run(*PROMPTS) == expected
    assert reader.num_external == NUM_CHUNKS * CHUNK
    assert reader.stats.num_failed_loads == 0
    for harm in (flip, swap, truncate):
        saved = [path.read_bytes() for path in found]
        harm(found)
        before = reader.num_external, reader.stats.num_wrong_chunks
        assert reader.run(*PROMPTS) == expected, harm
        assert reader.num_external == before[0]
        # A file of another length is none to the server already.
        assert (reader.stats.num_wrong_chunks > before[1]) == (harm is not truncate)
        server.until(lambda status: not status["total_object_count"])
        for path, data in zip(found, saved, strict=True):
            path.write_bytes(data)
    assert reader.run(*PROMPTS) == expected
    assert reader.num_external == 2 * NUM_CHUNKS * CHUNK
    flip(found)
    mender = make()
    for num_times in range(2):  # what was computed instead is in the server's memory then
        assert mender.run(*PROMPTS) == expected
        assert mender.num_external == num_times * NUM_CHUNKS * CHUNK


@pytest.mark.matrix
def test_a_server_that_is_killed_at_any_moment_costs_no_token(
    make: Callable[..., StoreEngine], server: LMCacheServer, expected: list[list[int]]
) -> None:
    engine = make(heartbeat_s=0.3, save="all")
    engine.run(*PROMPTS)
    for num_turns in (1, 3, 6):
        ids = [engine.add(prompt) for prompt in PROMPTS]
        for _ in range(num_turns):
            engine.turn()
        server.kill()
        engine.finish()
        assert [engine.tokens_of(each) for each in ids] == expected
        restart(server)
        engine.until(lambda: engine.stats.is_up)


def test_a_server_that_is_stopped_is_late_once_and_its_locks_are_given_back(
    make: Callable[..., StoreEngine], server: LMCacheServer, expected: list[list[int]]
) -> None:
    engine = make(heartbeat_s=0.3)
    engine.run(*PROMPTS)
    server.signal(signal.SIGSTOP)
    try:
        assert engine.run(*PROMPTS) == expected
        assert engine.stats.num_late_lookups > 0
    finally:
        server.signal(signal.SIGCONT)
    engine.until(lambda: engine.stats.is_up)
    server.until(lambda status: not status["read_locked_count"] + status["write_locked_count"])
    before = engine.num_external
    assert engine.run(*PROMPTS) == expected
    assert engine.num_external == before + NUM_CHUNKS * CHUNK


def test_a_server_that_is_stopped_behind_lookups_is_told_that_what_they_found_is_not_read(
    make: Callable[..., StoreEngine], server: LMCacheServer, expected: list[list[int]]
) -> None:
    """One load hears nothing, another one then waits for nothing, and a third finds no room."""
    engine, order = make(heartbeat_s=0.3, num_blocks=17), (0, 2, 1)
    engine.run(*PROMPTS)
    ids = [engine.add(PROMPTS[each]) for each in order]
    engine.turn()
    server.until(lambda status: status["read_locked_count"] == 2 * NUM_CHUNKS)
    time.sleep(0.5)  # until the engine's thread has heard of it
    server.signal(signal.SIGSTOP)
    try:
        engine.finish()
    finally:
        server.signal(signal.SIGCONT)
    assert [engine.tokens_of(each) for each in ids] == [expected[each] for each in order]
    assert (engine.stats.num_failed_loads, engine.stats.num_late_lookups) == (2, 0)
    engine.until(lambda: engine.stats.is_up)
    server.until(lambda status: not status["read_locked_count"])


def test_what_two_ranks_saved_one_loads_and_the_other_way_round(
    make: Callable[..., StoreEngine], expected: list[list[int]]
) -> None:
    two = make(tp=2)
    assert two.run(*PROMPTS[:2]) == expected[:2]
    one = make()
    assert one.run(*PROMPTS) == expected
    assert one.num_external == sum(len(prompt) // CHUNK * CHUNK for prompt in PROMPTS[:2])
    assert two.run(*PROMPTS) == expected
    assert two.num_external == NUM_CHUNKS * CHUNK


@pytest.mark.matrix
def test_the_latent_of_mla_comes_from_the_store(
    make: Callable[..., StoreEngine], tmp_path: Path
) -> None:
    model = write_tiny_model(tmp_path / "mla", "deepseek_v2")
    wanted = greedy_by_transformers(model, PROMPTS, NUM_TOKENS)
    engine = make(model)
    for num_times in range(2):
        assert engine.run(*PROMPTS) == wanted
        assert engine.num_external == num_times * NUM_CHUNKS * CHUNK


@contextlib.contextmanager
def redis() -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """A redis-server on loopback that keeps nothing on disk: its port, and its process."""
    program = shutil.which("redis-server")
    assert program is not None, "apt-get install redis-server"
    port = free_port()
    arguments = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    process = subprocess.Popen([program, *arguments], stdout=subprocess.DEVNULL)
    try:
        yield port, process
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()


@pytest.mark.matrix
def test_redis_behind_the_server_keeps_what_its_memory_loses_and_may_hang(
    make: Callable[..., StoreEngine], tmp_path: Path, expected: list[list[int]]
) -> None:
    with (
        redis() as (port, process),
        LMCacheServer(tmp_path / "log", chunk_tokens=CHUNK, redis_port=port) as own,
    ):
        engine = make(at=own, heartbeat_s=0.3)
        assert engine.run(*PROMPTS) == expected
        time.sleep(1.0)  # nothing says when the second tier has it
        own.close()
        engine.until(lambda: not engine.stats.is_up)
        own.start()
        engine.until(lambda: engine.stats.is_up)
        assert engine.run(*PROMPTS) == expected
        assert engine.num_external == NUM_CHUNKS * CHUNK
        process.send_signal(signal.SIGSTOP)
        others = [[5 + each % 300 for each in prompt] for prompt in PROMPTS]
        engine.run(*others)
        assert engine.stats.num_late_lookups == len(others)
        began_s = time.monotonic()
        engine.run(*([7, *prompt] for prompt in others))
        assert time.monotonic() - began_s < LATE_S  # only the first ones have waited for so long
        process.send_signal(signal.SIGCONT)
        own.until(lambda status: not status["read_locked_count"])
        before = engine.num_external
        assert engine.run(*PROMPTS) == expected
        assert engine.num_external == before + NUM_CHUNKS * CHUNK
