"""The store's conformance kit on LMCache: a real server, both halves, shapes of all kinds."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from functools import partial
from multiprocessing import Pipe, get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch

from pdserve.config.tiers import LMCACHE_SILENT
from pdserve.connectors.base import KVConnectorBase
from pdserve.connectors.conformance import Engine, make_shape, prompt_of
from pdserve.connectors.conformance.pull import PullConformance
from pdserve.connectors.conformance.push import PushConformance
from pdserve.connectors.conformance.store import StoreConformance
from pdserve.connectors.lmcache import LMCacheConnector
from pdserve.connectors.lmcache.client import StoreClient, StoreGoneError
from pdserve.connectors.lmcache.scheduler import LMCacheScheduler, _Tracked
from pdserve.connectors.lmcache.settings import LMCacheSettings
from pdserve.connectors.lmcache.slots import ChunkMemory, StoreLayout, lock
from pdserve.connectors.multi import MultiConnector
from pdserve.connectors.nixl import NixlConnector
from pdserve.errors import ConfigError
from pdserve.wire.ids import BlockId
from pdserve.wire.request import FinishReason
from tests.cli.answering import answering
from tests.connectors.engines import context, layout
from tests.lmcache_server import LMCacheServer, free_port
from tests.waiting import wait_until

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from pdserve.connectors.base import ConnectorContext
    from pdserve.connectors.conformance.engines import KitRequest
    from pdserve.connectors.views import RequestView
    from pdserve.wire.transfer import KVShape

pytestmark = pytest.mark.slow


class LMCacheConformance(StoreConformance):
    """Each test has a namespace of its own in the server that all of them share."""

    url: ClassVar[str]

    def make_connector(self) -> KVConnectorBase:
        namespace = secrets.token_hex(4)
        return LMCacheConnector(settings=LMCacheSettings(url=self.url, namespace=namespace))

    def look_up(self, engine: Engine) -> KitRequest:
        """Have what was saved locked for a request."""
        request = self._arrive(engine)
        assert self._match(engine, request).num_tokens
        return request

    def new(self, name: str, **arguments: Any) -> Engine:
        engine = super().new(name, **arguments)
        engine.until(lambda: engine.scheduler.store_stats.is_up)
        return engine


@pytest.fixture(autouse=True, scope="module")
def _server(lmcache_server: LMCacheServer) -> None:
    LMCacheConformance.url = lmcache_server.url


class LockingRuntime:
    """CUDA's runtime, as far as it locks memory: at most so many bytes, and none twice."""

    def __init__(self, max_bytes: int) -> None:
        self.locked: dict[int, int] = {}
        self._max_bytes = max_bytes

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        assert flags == 3, "mapped, in every context"
        if sum(self.locked.values()) + num_bytes > self._max_bytes:
            return 2
        self.locked[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0

    def cudaGetErrorString(self, status: int) -> str:
        return {2: "out of memory"}[status]


def client_of(server: LMCacheServer, runtime: LockingRuntime) -> StoreClient:
    return StoreClient(
        LMCacheSettings(url=server.url, namespace=secrets.token_hex(4)),
        StoreLayout(context("P"), ""),
        engine="P",
        instance_id=secrets.randbits(48),
        reach=partial(lock, runtime=runtime),
    )


def test_a_device_reaches_the_servers_memory_until_it_is_mapped_anew_or_the_client_is_closed(
    lmcache_server: LMCacheServer,
) -> None:
    num_bytes = lmcache_server.shm.stat().st_size
    runtime = LockingRuntime(max_bytes=num_bytes)
    client = client_of(lmcache_server, runtime)
    for _ in range(2):  # as if the server had been away: there is no room for two
        client.connect()
        assert list(runtime.locked.values()) == [num_bytes]
    client.close(is_up=True)
    assert not runtime.locked


def test_a_servers_memory_is_there_before_it_is_saved_to_and_copied_to_files(
    lmcache_server: LMCacheServer,
) -> None:
    """A file gets bytes of memory that is not mapped 64 KiB at a time, with as much clearing."""
    size = rf" {lmcache_server.shm}\nSize: +(\d+) kB\n"
    of_segment = re.compile(rf"{size}(?:.+\n)*?Rss: +(\d+) kB\n")

    def is_mapped() -> bool:
        found = of_segment.findall(Path(f"/proc/{lmcache_server.pid}/smaps").read_text())
        return [size for size, _ in found] == [size for _, size in found] != []

    wait_until(is_mapped, 10.0)


def test_memory_that_the_driver_does_not_lock_is_refused_with_what_to_do(
    lmcache_server: LMCacheServer,
) -> None:
    client = client_of(lmcache_server, LockingRuntime(max_bytes=1 << 20))
    with pytest.raises(ConfigError, match=r"\(out of memory\).*`ulimit -l unlimited`.*cpu:SIZE"):
        client.connect()
    client.close(is_up=True)


def test_a_server_that_comes_back_with_other_chunks_is_refused(
    lmcache_server: LMCacheServer,
) -> None:
    client = client_of(lmcache_server, LockingRuntime(max_bytes=1 << 40))
    client.connect()
    client.chunk_tokens = 32
    with pytest.raises(ConfigError, match=r"chunks of 16 tokens .* instead of 32: restart the eng"):
        client.connect()
    client.close(is_up=True)


@pytest.mark.matrix
def test_a_store_without_room_takes_no_save_which_is_counted_and_stalls_nobody(
    tmp_path: Path,
) -> None:
    shape = make_shape(num_layers=32, num_kv_heads=8, head_dim=128, num_blocks=8)
    prompt, blocks = prompt_of(40), [BlockId(block) for block in range(3)]
    with LMCacheServer(tmp_path / "log", cpu_bytes=64 << 20) as server:
        connector = LMCacheConnector(settings=LMCacheSettings(url=server.url))
        engine = Engine(connector, "P", shape=shape)
        half = engine.scheduler
        engine.until(lambda: half.store_stats.is_up)

        def look_up(salt: int) -> tuple[KitRequest, int]:
            request = engine.new_request(prompt, cache_salt=str(salt))
            engine.arrive(request)
            engine.until(lambda: half.get_num_new_matched_tokens(request, 0) is not None)
            return request, half.get_num_new_matched_tokens(request, 0).num_tokens

        def save(salt: int) -> None:
            request, num_found = look_up(salt)
            assert not num_found
            half.update_state_after_alloc(request, blocks, 0, generations=[1] * 3)
            end(request, blocks)

        def end(request: KitRequest, blocks: list[BlockId]) -> None:
            request.output_token_ids.append(1)
            request.finish_reason = FinishReason.LENGTH
            hold = half.request_finished(request, blocks, [1] * len(blocks))
            engine.until(lambda: not hold or hold.hold_id in [s.nonce for s in engine.settled], 2.0)
            engine.step()

        locked = []
        for salt in range(7):  # of 8 MiB
            save(salt)
            locked.append(look_up(salt))
        assert {num_found for _, num_found in locked} == {32}
        assert not half.store_stats.num_refused_chunks
        for salt in range(7, 10):
            save(salt)
        assert half.store_stats.num_refused_chunks >= 2 * 2 * 8, "of two prompts all there is"
        assert not half.store_stats.num_dropped_chunks
        locked.append(look_up(9))
        assert not locked[-1][1]
        for request, _ in locked:
            end(request, [])
        server.until(lambda status: not status["read_locked_count"])
        num_saved = half.store_stats.num_saved_chunks
        for salt in range(10, 100):  # until the server has evicted some
            save(salt)
            if half.store_stats.num_saved_chunks > num_saved:
                break
            time.sleep(0.1)
        assert half.store_stats.num_saved_chunks > num_saved
        engine.close()


@pytest.mark.matrix
def test_a_server_without_shared_memory_is_refused_with_what_it_lacks() -> None:
    port, http_port = free_port(), free_port()
    words = [sys.executable, "-m", "lmcache.v1.multiprocess.http_server", "--host", "127.0.0.1"]
    words += ["--port", str(port), "--http-host", "127.0.0.1", "--http-port", str(http_port)]
    words += ["--chunk-size", "16", "--l1-size-gb", "0.07", "--eviction-policy", "LRU"]
    words += ["--supported-transfer-mode", "engine_driven"]
    process = subprocess.Popen(words, env={**os.environ, **LMCACHE_SILENT})
    client = StoreClient(
        LMCacheSettings(url=f"tcp://127.0.0.1:{port}"),
        StoreLayout(context("P"), ""),
        engine="P",
        instance_id=1,
    )
    try:
        with pytest.raises(ConfigError, match=r"has no shared memory: start it with .*--shm-name"):
            wait_until(lambda: _is_connected(client), 60.0)
    finally:
        client.close(is_up=True)
        process.kill()
        process.wait()


def _is_connected(client: StoreClient) -> bool:
    with contextlib.suppress(StoreGoneError):
        client.connect()
        return True
    return False


def test_a_worker_that_the_server_cannot_serve_is_refused_and_closed_once(
    lmcache_server: LMCacheServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[bool] = []
    close = StoreClient.close

    def closing(client: StoreClient, *, is_up: bool) -> None:
        waited.append(is_up)
        close(client, is_up=is_up)

    monkeypatch.setattr(StoreClient, "close", closing)
    shape = layout(block_size=32)
    connector = LMCacheConnector(settings=LMCacheSettings(url=lmcache_server.url))
    worker = connector.make_worker(context("P", shape=shape), lambda: None)
    kv = torch.zeros(shape.num_blocks, 2, 2, 2, shape.block_size, 8)
    with pytest.raises(ConfigError, match=r"chunks of 16 tokens .* multiple of --block-size 32"):
        worker.register_kv_caches(kv, shape)
    worker.close(1.0)
    assert waited == [True], "else the server finds nobody to answer, with a traceback"


def test_an_engine_whose_kv_is_not_taken_for_its_stages_is_named_once(
    lmcache_server: LMCacheServer, caplog: pytest.LogCaptureFixture
) -> None:
    settings = LMCacheSettings(
        url=lmcache_server.url, http_url=lmcache_server.http_url, namespace=secrets.token_hex(4)
    )
    engines = []
    for name, pp in (("first", 1), ("like it", 1), ("other", 2)):
        assert "other pipeline stages" not in caplog.text
        connector = LMCacheConnector(settings=settings)
        engines.append(Engine(connector, name, shape=make_shape(pp=pp)))
    lines = [line for line in caplog.messages if "other pipeline stages" in line]
    assert len(lines) == 1
    assert "there=0-4 here=0-2-4" in lines[0]
    for engine in engines:
        engine.close()


def test_a_server_of_another_version_is_named(
    lmcache_server: LMCacheServer, caplog: pytest.LogCaptureFixture
) -> None:
    with answering(lambda asked: (200, b'"0.5.5-g05a013b2"')) as http_url:
        for url in (lmcache_server.http_url, http_url):
            assert "another version" not in caplog.text
            settings = LMCacheSettings(url=lmcache_server.url, http_url=url)
            Engine(LMCacheConnector(settings=settings), "P").close()
    (line,) = (each for each in caplog.messages if "another version" in each)
    assert "there=0.5.5 here=0.5.6" in line


class Killed(LMCacheConformance):
    """An engine that is killed, beside one that looks up and loads the same."""

    def test_its_locks_are_given_back_and_no_others(self, lmcache_server: LMCacheServer) -> None:
        p = self.new("P")
        self._save(p)
        request = self.look_up(p)
        ours, theirs = Pipe()
        arguments = (type(self), self.connector, theirs)
        process = get_context("spawn").Process(target=looks_up, args=arguments, daemon=True)
        process.start()
        assert ours.poll(30.0), "it has looked up"
        process.kill()
        process.join()
        time.sleep(2.0)  # nothing says when the server has given them back
        blocks = self.p_blocks(1)
        p.fill(blocks, 9)
        num_tokens = self._load(p, request, blocks)
        assert p.holds(blocks, 1, 0, num_tokens), "it was still locked, and is loaded"
        request.finish_reason = FinishReason.ABORT
        p.scheduler.request_finished(request, self.ids(blocks), [1] * len(blocks))
        p.step()
        lmcache_server.until(lambda status: not status["read_locked_count"], 5.0)


def looks_up(
    bench: type[LMCacheConformance], connector: LMCacheConnector, says: Connection
) -> None:
    """Look up what another engine has saved, twice, and wait for the end."""
    kit = bench()
    kit.url = connector.settings.url  # type: ignore[misc]
    kit.setup_method()
    kit.connector = connector
    engine = kit.new("P")
    for _ in range(2):
        kit.look_up(engine)
    says.send("looked up")
    signal.pause()


class TestLayersThatTakeTime(LMCacheConformance):
    @pytest.fixture(autouse=True)
    def _late(self, monkeypatch: pytest.MonkeyPatch) -> None:
        load = ChunkMemory.load_layer

        def load_late(*arguments: Any) -> int:
            time.sleep(0.003)
            return load(*arguments)

        monkeypatch.setattr(ChunkMemory, "load_layer", load_late)


class TestOneRank(Killed):
    prefill_shape: ClassVar[KVShape] = make_shape()


class TestFourRanks(LMCacheConformance):
    prefill_shape: ClassVar[KVShape] = make_shape(tp=2, pp=2)


class TestMoreRanksThanHeads(LMCacheConformance):
    prefill_shape: ClassVar[KVShape] = make_shape(tp=4, num_kv_heads=2, num_layers=3)


@pytest.mark.matrix
class TestBesideNixl(PullConformance):
    """Real NIXL, with the store told of every request."""

    def make_connector(self) -> KVConnectorBase:
        namespace = secrets.token_hex(4)
        settings = LMCacheSettings(url=LMCacheConformance.url, namespace=namespace)
        return MultiConnector.of([NixlConnector(), LMCacheConnector(settings=settings)])


class SavingScheduler(LMCacheScheduler):
    """Looks nothing up: the kit says whose KV a prompt has, and writes several."""

    def _track(self, request: RequestView) -> None:
        self._tracked[request.request_id] = _Tracked(request)


class SavingConnector(LMCacheConnector, frozen=True, kw_only=True):
    def make_scheduler(self, context: ConnectorContext, endpoints: Any) -> SavingScheduler:
        return SavingScheduler(context, self.settings)


@pytest.mark.matrix
class TestPushesBesideNixl(PushConformance):
    """Real NIXL, with a store that saves from the blocks that are pushed."""

    def make_connector(self) -> KVConnectorBase:
        settings = LMCacheSettings(url=LMCacheConformance.url, namespace=secrets.token_hex(4))
        return MultiConnector.of([NixlConnector(), SavingConnector(settings=settings)])


class TestBesideNixlAsAStore(LMCacheConformance):
    def make_connector(self) -> KVConnectorBase:
        return MultiConnector.of([NixlConnector(), super().make_connector()])


class TestLatent(Killed):
    prefill_shape: ClassVar[KVShape] = make_shape(tp=2, num_planes=1, num_kv_heads=1, head_dim=12)
