"""Rows of the failure table that are about the store of KV: real engines, LMCache's real server."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from tests.chaos.stage import ENGINES, RECOVERY_S
from tests.chaos.store import STARTED_AGAIN_S, Store, segments, started_with_store
from tests.chaos.streams import wait_until
from tests.cli.process import ROOT, environment, free_ports, pdserve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.chaos.store import StoreStage

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.chaos,
    pytest.mark.timeout(500),
]


@pytest.fixture(scope="module")
def only_stage(
    model_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StoreStage]:
    """One deployment for all faults."""
    directory = tmp_path_factory.mktemp("store")
    with started_with_store(directory, model_of("llama")) as stage:
        yield stage


@pytest.fixture
def stage(only_stage: StoreStage) -> Iterator[StoreStage]:
    """The deployment, whole and empty, with the store up."""
    only_stage.wait_store(is_up=True)
    yield only_stage
    only_stage.store.process.send_signal(signal.SIGCONT)
    only_stage.restore()


def settle(stage: StoreStage, row: str, phase: str, prompts, right, since: float) -> None:
    """Ask all at once; whatever has become of the store, every answer is right."""
    streams = [stage.stream(prompt) for prompt in prompts]
    stage.settle(row, phase, streams, right, since_s=since, bound_s=RECOVERY_S, expect={"finished"})


def test_what_is_stored_survives_the_end_of_every_engine_and_of_the_server(
    stage: StoreStage,
) -> None:
    prompts = [stage.prompt() for _ in range(3)]
    right = stage.keep(prompts)
    for name in ENGINES:
        stage.kill(name)
    stage.store.end()
    stage.store.start()
    stage.restore()
    stage.wait_store(is_up=True)
    before, since = stage.hits(), time.monotonic()
    settle(stage, "all engines and the store restart", "between requests", prompts, right, since)
    assert stage.hits() - before >= 3 * 576, "nine chunks of 64 tokens each, of 640"


def test_the_stores_server_is_killed(stage: StoreStage) -> None:
    prompts = [stage.prompt() for _ in range(6)]
    right = stage.keep(prompts)
    streams = [stage.stream(prompt) for prompt in prompts]
    since = time.monotonic()
    stage.store.kill()
    streams += [stage.stream(prompt) for prompt in prompts]
    stage.settle(
        "the store's server dies",
        "amid 12 requests",
        streams,
        right * 2,
        since_s=since,
        bound_s=RECOVERY_S,
        expect={"finished"},
    )
    stage.wait_store(is_up=False)
    stage.store.start()
    stage.wait_store(is_up=True, timeout_s=STARTED_AGAIN_S)
    stage.forget()
    before = stage.hits()
    assert stage.ask(prompts) == right
    assert stage.hits() > before, "it came back with what was on its disk"


def test_the_stores_server_is_stopped_and_goes_on(stage: StoreStage) -> None:
    prompts = [stage.prompt() for _ in range(4)]
    right = stage.keep(prompts)
    since = time.monotonic()
    stage.store.process.send_signal(signal.SIGSTOP)
    settle(stage, "the store's server is stopped", "before a request", prompts, right, since)
    stage.wait_store(is_up=False)
    stage.store.process.send_signal(signal.SIGCONT)
    stage.wait_store(is_up=True, timeout_s=STARTED_AGAIN_S)
    stage.forget()
    before = stage.hits()
    assert stage.ask(prompts) == right
    assert stage.hits() > before


@pytest.mark.parametrize("what", ["a bit flips", "a file is cut short", "files change places"])
def test_a_chunk_on_the_stores_disk_is_not_what_was_saved(stage: StoreStage, what: str) -> None:
    prompts = [stage.prompt() for _ in range(2)]
    before_files = set(stage.store.files())
    right = stage.keep(prompts)
    files = sorted(set(stage.store.files()) - before_files)
    assert len(files) >= 18
    stage.store.end()
    stage.wait_store(is_up=False)
    for one, other in zip(files[::2], files[1::2], strict=False):
        whole = one.read_bytes()
        if what == "a bit flips":
            one.write_bytes(whole[:-9] + bytes([whole[-9] ^ 4]) + whole[-8:])
        elif what == "a file is cut short":
            one.write_bytes(whole[: len(whole) // 2])
        else:
            one.write_bytes(other.read_bytes())
            other.write_bytes(whole)
    stage.store.start()
    stage.wait_store(is_up=True, timeout_s=STARTED_AGAIN_S)
    before, since = stage.count("pdserve_kv_tier_digest_mismatches_total"), time.monotonic()
    settle(stage, "KV on the store's disk changes", what, prompts, right, since)
    if what != "a file is cut short":  # the server notices that itself
        assert stage.count("pdserve_kv_tier_digest_mismatches_total") > before


def test_nobody_listens_at_the_stores_url_until_later(
    model_of: Callable[[str], Path], tmp_path: Path
) -> None:
    from tests.chaos.store import StoreStage

    stage = StoreStage(tmp_path, model_of("llama"), Store(tmp_path))
    try:
        stage.start()
        prompts = [stage.prompt() for _ in range(2)]
        since = time.monotonic()
        right = [stage.right_answer(prompt) for prompt in prompts]
        settle(stage, "nobody listens at the store's URL", "at start", prompts, right, since)
        log = stage.deployment.processes["prefill"].log
        assert "--kv-transfer-config.lmcache.url" in log
        stage.store.start()
        stage.wait_store(is_up=True, timeout_s=STARTED_AGAIN_S)
        stage.forget()
        stage.keep(prompts)
        before = stage.hits()
        assert stage.ask(prompts) == right
        assert stage.hits() > before
    finally:
        stage.deployment.end()
        stage.store.end()


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs redis-server")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_stores_redis_server_ends_or_hangs(
    number: signal.Signals, model_of: Callable[[str], Path], tmp_path: Path
) -> None:
    (port,) = free_ports(1)
    redis = subprocess.Popen(
        [
            "redis-server",
            "--port",
            str(port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--dir",
            tmp_path,
        ],
        stdout=subprocess.DEVNULL,
    )
    try:
        time.sleep(0.5)
        with started_with_store(
            tmp_path, model_of("llama"), f",redis:redis://127.0.0.1:{port}"
        ) as stage:
            prompts = [stage.prompt() for _ in range(4)]
            right = stage.keep(prompts)
            more = [stage.prompt() for _ in range(4)]
            right += [stage.right_answer(prompt) for prompt in more]
            since = time.monotonic()
            redis.send_signal(number)
            what = "ends" if number is signal.SIGKILL else "hangs"
            settle(stage, "the store's Redis server is gone", what, prompts + more, right, since)
            assert stage.count("pdserve_kv_tier_server_up") == len(ENGINES)
    finally:
        redis.send_signal(signal.SIGCONT)
        redis.kill()
        redis.wait()


@pytest.mark.short_form("")
@pytest.mark.parametrize(
    ("tiers", "says"),
    [
        ("cpu:900TiB".replace("TiB", "000GiB"), "the cpu tier takes 921,600,000 MiB of /dev/shm"),
        ("cpu:64MiB,disk:/proc/kv:1GiB", "/proc cannot be written; give it to user"),
        ("cpu:64MiB,redis:redis://127.0.0.1:1", "127.0.0.1:1 does not answer"),
    ],
)
def test_a_store_that_cannot_be_had_is_refused_at_start(tiers: str, says: str) -> None:
    ports = dict(zip(("--port", "--http-port"), map(str, free_ports(2)), strict=True))
    done = pdserve("kv-server", "--kv-tiers", tiers, *(w for pair in ports.items() for w in pair))
    assert done.returncode == 3, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_no_shared_memory_is_left_when_supervisor_and_server_are_killed(tmp_path: Path) -> None:
    ports = free_ports(5)
    flags = ("--port", "--prefill-port", "--decode-port", "--kv-port", "--kv-http-port")
    before = segments()
    log = (tmp_path / "log").open("wb")
    up = subprocess.Popen(
        [
            *(sys.executable, "-m", "pdserve", "up", "boxed", "--kv-tiers", "cpu:64MiB"),
            *("--kv-cache-memory-bytes", "16MiB"),
            *(word for pair in zip(flags, map(str, ports), strict=True) for word in pair),
        ],
        stdout=log,
        stderr=log,
        cwd=ROOT,
        env=environment(),
    )
    try:
        wait_until(lambda: segments() > before, 120.0)
    finally:
        up.kill()
        up.wait()
        log.close()
    # The server ends with its supervisor, and takes its memory along.
    wait_until(lambda: segments() <= before, 30.0)
