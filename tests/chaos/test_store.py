"""Rows of the failure table that are about the store of KV: real engines, LMCache's real server."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from typing import TYPE_CHECKING

import psutil
import pytest
from safetensors.torch import load_file, save_file

from tests.chaos.stage import ENGINES, RECOVERY_S
from tests.chaos.store import STARTED_AGAIN_S, Store, listens, segments, started_with_store
from tests.chaos.store_storm import storm
from tests.chaos.streams import Stream
from tests.cli.process import ROOT, environment, free_ports, pdserve
from tests.tiny_models import write_tiny_model
from tests.waiting import wait_until

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
    stage.settle(row, phase, streams, right, since_s=since, bound_s=RECOVERY_S)


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


def test_the_stores_server_p_and_a_d_are_killed_in_a_storm_of_streams(stage: StoreStage) -> None:
    storm(stage, 36)


def test_engines_of_another_model_or_layout_share_a_store_and_find_nothing(
    stage: StoreStage, model_of: Callable[[str], Path], tmp_path: Path
) -> None:
    prompts = [stage.prompt() for _ in range(2)]
    right = stage.keep(prompts)
    alike = write_tiny_model(tmp_path / "alike", tie_word_embeddings=True)
    weights = load_file(alike / "model.safetensors")
    weights["model.embed_tokens.weight"] += 0.1
    save_file(weights, alike / "model.safetensors", {"format": "pt"})
    others = {"weights": (alike, "float32"), "layout": (model_of("llama"), "bfloat16")}
    deployment = stage.deployment
    try:
        for name, (model, dtype) in others.items():
            deployment.start(
                name,
                *("serve", str(model), "--dtype", dtype, "--num-threads", "1"),
                *("--host", "127.0.0.1", "--port", "0"),
                *("--num-gpu-blocks-override", "640", "--max-num-batched-tokens", "256"),
                *("--kv-transfer-config.kv-connector", "lmcache"),
                env=stage.environment(name),
            )
        deployment.wait(*others)
        for name in others:
            wait_until(partial(metric, stage, name, "pdserve_kv_tier_server_up"), 90.0)
            answers = [stage.right_answer(prompt, engine=name) for prompt in prompts]
            since = time.monotonic()
            stage.settle(
                "a store with KV of another model or layout",
                f"other {name}",
                [Stream(deployment.url(name), prompt) for prompt in prompts],
                answers,
                since_s=since,
                bound_s=RECOVERY_S,
                alive=(*ENGINES, name),
            )
            assert metric(stage, name, "vllm:external_prefix_cache_queries_total") == 4 * 640
            assert metric(stage, name, "vllm:external_prefix_cache_hits_total") == 0
    finally:
        for name in others:
            deployment.processes.pop(name).kill()
    before = stage.hits()
    assert stage.ask(prompts) == right
    assert stage.hits() - before >= 2 * 576


def metric(stage: StoreStage, name: str, series: str) -> float:
    """A series of one engine, labels apart."""
    found = stage.deployment.metrics(name)
    return sum(value for each, value in found.items() if each.partition("{")[0] == series)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """The store's folder, on a file system of its own."""
    if os.geteuid() != 0:
        pytest.skip("a file system of a size needs root")
    folder = tmp_path / "kv"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128m", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_the_stores_disk_fills_while_it_runs(
    small_disk: Path, model_of: Callable[[str], Path], tmp_path: Path
) -> None:
    with started_with_store(tmp_path, model_of("llama")) as stage:
        others = small_disk / "of somebody else"
        with others.open("wb") as file:  # they leave room for the KV of a few prompts
            os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(small_disk).free - (2 << 20))
        prompts = [stage.prompt() for _ in range(8)]
        right = stage.keep(prompts)
        assert shutil.disk_usage(small_disk).free < 1 << 18, "it is full"
        row, before, since = "the store's disk fills", stage.hits(), time.monotonic()
        settle(stage, row, "all is in memory", prompts, right, since)
        assert stage.hits() - before >= 8 * 576
        others.unlink()
        stage.restart_store()
        stage.forget()
        before, since = stage.hits(), time.monotonic()
        settle(stage, row, "some is on disk", prompts, right, since)
        assert 0 < stage.hits() - before < 8 * 576
        more = [stage.prompt()]
        right = stage.keep(more)
        stage.restart_store()
        stage.forget()
        before = stage.hits()
        assert stage.ask(more) == right
        assert stage.hits() - before >= 576, "it is written to again"


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


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A Redis server that keeps nothing on disk: its process and its port."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("needs redis-server")
    (port,) = free_ports(1)
    words = (program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", tmp_path)
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    wait_until(partial(listens, port), 10.0)
    yield process, port
    process.send_signal(signal.SIGCONT)
    process.kill()
    process.wait()


@pytest.mark.parametrize(
    ("number", "row"),
    [
        (signal.SIGKILL, "the store's Redis server is gone"),
        (signal.SIGSTOP, "the store's Redis server hangs"),
    ],
)
def test_the_stores_redis_server_ends_or_hangs(
    number: signal.Signals,
    row: str,
    redis: tuple[subprocess.Popen[bytes], int],
    model_of: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    process, port = redis
    tiers = f",redis:redis://127.0.0.1:{port}"
    with started_with_store(tmp_path, model_of("llama"), tiers) as stage:
        prompts, more = ([stage.prompt() for _ in range(4)] for _ in range(2))
        right = stage.keep(prompts)
        process.send_signal(number)
        before, since = stage.hits(), time.monotonic()
        settle(stage, row, "all is in memory", prompts, right, since)
        if number is signal.SIGKILL:  # else LMCache waits for Redis, for what it has as well
            assert stage.hits() - before >= 4 * 576
        right = [stage.right_answer(prompt) for prompt in more]
        since = time.monotonic()
        settle(stage, row, "unknown prompts", more, right, since)
        assert stage.count("pdserve_kv_tier_server_up") == len(ENGINES)


@pytest.mark.short_form("")
@pytest.mark.parametrize(
    ("command", "tiers", "says"),
    [
        (
            *("kv-server", "cpu:900000GiB"),
            "the cpu tier takes 921,600,000 MiB of /dev/shm",
        ),
        ("kv-server", "cpu:64MiB,disk:/proc/kv:1GiB", "/proc is not writable; give it to user"),
        ("kv-server", "cpu:64MiB,redis:redis://127.0.0.1:1", "127.0.0.1:1 does not answer"),
        ("up", "cpu:64MiB,disk:/proc/kv:1GiB", "/proc is not writable; give it to user"),
    ],
)
def test_a_store_that_cannot_be_had_is_refused_at_start(
    command: str, tiers: str, says: str
) -> None:
    names = {
        "kv-server": ("--port", "--http-port"),
        "up": ("--port", "--prefill-port", "--decode-port", "--kv-port", "--kv-http-port"),
    }[command]
    ports = zip(names, map(str, free_ports(len(names))), strict=True)
    done = pdserve(command, "--kv-tiers", tiers, *(word for pair in ports for word in pair))
    assert done.returncode == 3, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_the_stores_disk_is_full_at_start(small_disk: Path) -> None:
    with (small_disk / "of somebody else").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(small_disk).free - (2 << 20))
    ports = dict(zip(("--port", "--http-port"), map(str, free_ports(2)), strict=True))
    tiers = f"cpu:64MiB,disk:{small_disk}:1GiB"
    done = pdserve("kv-server", "--kv-tiers", tiers, *(w for pair in ports.items() for w in pair))
    assert done.returncode == 3, done.stderr
    assert "make room for at least 64 MiB" in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("kv-server", "--kv-tiers", "cpu:64MiB"),
        ("serve", "boxed", "--port", "0", "--kv-transfer-config.kv-connector", "lmcache"),
    ],
    ids=lambda words: words[0],
)
def test_another_version_of_lmcache_is_refused_at_start(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    about = tmp_path / "lmcache-0.5.7.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: lmcache\nVersion: 0.5.7\n")
    done = pdserve(*words, variables={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 3, done.stderr
    assert re.search("lmcache 0.5.7 is installed", done.stderr, re.IGNORECASE)
    assert "pip install 'pdserve[lmcache]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("what", ["supervisor alone", "supervisor and server"])
def test_no_shared_memory_is_left_when_supervisor_and_server_are_killed(
    what: str, tmp_path: Path
) -> None:
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
        wait_until(lambda: segments() - before, 120.0)
        (server,) = psutil.Process(up.pid).children()
        if what == "supervisor and server":
            os.killpg(server.pid, signal.SIGKILL)
    finally:
        up.kill()
        up.wait()
        log.close()
    wait_until(lambda: not server.is_running() and segments() <= before, 30.0)
