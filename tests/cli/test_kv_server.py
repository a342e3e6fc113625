"""What tiers need of a machine, and what LMCache's server is told; the server itself is not run."""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import json
import mmap
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace

import pytest

from pdserve.commands import kv_server, tier_checks
from pdserve.commands.findings import Grade
from pdserve.commands.kv_server import arguments_of, make_room
from pdserve.config.tiers import DiskTier, KvServerConfig, RedisTier, Tiers, parse_tiers
from tests.cli.answering import Asked, answering
from tests.cli.process import ROOT, environment, free_ports, pdserve_here

MIB = 1 << 20

SAYS_THAT_IT_IS_FULL = """
import time
from lmcache.logging import init_logger

init_logger("lmcache.tier").warning("%d chunk kept out", 1)
print("serves", flush=True)
time.sleep(60)
"""

HEARS_NO_INTERRUPT = """
while True:
    try:
        print("serves", flush=True)
        while True:
            pass
    except BaseException:
        pass
"""

ENDS_ITSELF = """
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: os._exit(5))
print("serves", flush=True)
time.sleep(60)
"""

SAYS_WHAT_IT_MAY_REPORT = """
import os
print("serves")
print(os.environ["LMCACHE_TRACK_USAGE"], os.environ["DO_NOT_TRACK"], flush=True)
"""

HAS_NO_MEMORY = """
import socket, sys
print("serves", flush=True)
with socket.create_server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1]))) as listener:
    while True:
        listener.accept()
"""


@pytest.mark.parametrize(
    ("installed", "verdict", "says"),
    [
        (None, Grade.FAIL, "KV tiers need LMCache, which is not installed"),
        ("0.5.7", Grade.FAIL, "LMCache 0.5.7 is installed, but 0.5.6 is needed"),
        ("0.5.6", Grade.OK, "LMCache 0.5.6"),
    ],
)
def test_another_version_of_lmcache_is_none(
    installed: str | None, verdict: Grade, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(_: str) -> str:
        if installed is None:
            raise tier_checks.importlib.metadata.PackageNotFoundError
        return installed

    monkeypatch.setattr(tier_checks.importlib.metadata, "version", version)
    finding = tier_checks.installed()
    assert finding.verdict is verdict
    assert says in finding.text
    assert ("pip install" in finding.remedy) == (verdict is Grade.FAIL)


def test_shared_memory_has_to_hold_the_whole_tier(tmp_path: Path) -> None:
    assert tier_checks.shared_memory(MIB, tmp_path).verdict is Grade.OK
    finding = tier_checks.shared_memory(1 << 60, tmp_path)
    assert finding.verdict is Grade.FAIL
    assert f"of {tmp_path}, which has" in finding.text
    [size_gib] = re.findall(r"--shm-size=(\d+)g", finding.remedy)
    assert int(size_gib) << 30 > 1 << 60
    assert f"size={size_gib}G {tmp_path};" in finding.remedy


def test_a_folder_that_will_be_made_is_a_disk_tier(tmp_path: Path) -> None:
    finding = tier_checks.disk(DiskTier(str(tmp_path / "a" / "b"), MIB))
    assert finding.verdict is Grade.OK
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_no_disk_tier(tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("")
    finding = tier_checks.disk(DiskTier(str(tmp_path / "kv"), MIB))
    assert (finding.verdict, finding.text) == (Grade.FAIL, f"{tmp_path / 'kv'} is not a folder")


def test_a_folder_that_cannot_be_written_is_no_disk_tier() -> None:
    finding = tier_checks.disk(DiskTier("/proc/kv", MIB))  # also for root
    assert (finding.verdict, finding.text) == (Grade.FAIL, "/proc is not writable")
    assert str(os.getuid()) in finding.remedy


def test_a_folder_that_cannot_be_looked_at_is_no_disk_tier(tmp_path: Path) -> None:
    finding = tier_checks.disk(DiskTier(str(tmp_path / ("k" * 300)), MIB))
    assert finding.verdict is Grade.FAIL
    assert "cannot be looked at: File name too long" in finding.text


def test_a_file_that_a_running_server_removes_is_not_missed(tmp_path: Path) -> None:
    (tmp_path / "gone.data").symlink_to(tmp_path / "nowhere")  # listed, and then not there
    assert tier_checks.disk(DiskTier(str(tmp_path), MIB)).verdict is Grade.OK


def test_a_disk_that_is_nearly_full_is_told_how_much_room_it_lacks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The room may be more than the tier, whose size is its folder's limit."""
    usage = SimpleNamespace(free=48 * MIB)
    monkeypatch.setattr(tier_checks.shutil, "disk_usage", lambda folder: usage)
    finding = tier_checks.disk(DiskTier(str(tmp_path), 40 * MIB))
    assert finding.verdict is Grade.FAIL
    assert "for at least 64 MiB" in finding.remedy


def test_a_disk_that_is_too_small_is_a_warning(tmp_path: Path) -> None:
    finding = tier_checks.disk(DiskTier(str(tmp_path), 1 << 60))
    assert finding.verdict is Grade.WARN
    assert "computed again" in finding.remedy


class Redis(threading.Thread):
    """Answers one connection, command by command."""

    def __init__(self, *answers: bytes) -> None:
        super().__init__()
        self.heard = b""
        self._answers = answers
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.tier = RedisTier("127.0.0.1", self._listener.getsockname()[1])

    def run(self) -> None:
        with self._listener, self._listener.accept()[0] as connection:
            for answer in self._answers:
                self.heard += connection.recv(512)
                connection.sendall(answer)


@pytest.fixture
def redis(request: pytest.FixtureRequest) -> Iterator[Redis]:
    server = Redis(*request.param)
    server.start()
    yield server
    server.join(10)


@pytest.mark.parametrize("redis", [[b"+PONG\r\n"]], indirect=True)
def test_a_redis_server_that_answers_is_a_tier(redis: Redis) -> None:
    assert tier_checks.redis(redis.tier, {}).verdict is Grade.OK
    redis.join(10)
    assert redis.heard == b"*1\r\n$4\r\nPING\r\n"


@pytest.mark.parametrize("redis", [[b"+OK\r\n", b"+PONG\r\n"]], indirect=True)
def test_a_redis_server_is_told_the_password_of_the_environment(redis: Redis) -> None:
    given = {"LMCACHE_RESP_USERNAME": "me", "LMCACHE_RESP_PASSWORD": "sesame"}
    assert tier_checks.redis(redis.tier, given).verdict is Grade.OK
    redis.join(10)
    assert redis.heard.startswith(b"*3\r\n$4\r\nAUTH\r\n$2\r\nme\r\n$6\r\nsesame\r\n")


@pytest.mark.parametrize("redis", [[b"-NOAUTH Authentication required.\r\n"]], indirect=True)
def test_a_redis_server_that_refuses_is_repeated_in_its_own_words(redis: Redis) -> None:
    finding = tier_checks.redis(redis.tier, {})
    assert finding.verdict is Grade.FAIL
    assert "refuses PING: -NOAUTH Authentication required." in finding.text
    assert "LMCACHE_RESP_PASSWORD" in finding.remedy


def test_a_redis_server_that_is_not_there_is_no_tier() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    finding = tier_checks.redis(RedisTier("127.0.0.1", port), {})
    assert finding.verdict is Grade.FAIL
    assert f"127.0.0.1:{port} does not answer" in finding.text


def test_a_redis_server_that_says_nothing_is_no_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_checks, "_REDIS_TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as hung:
        finding = tier_checks.redis(RedisTier("127.0.0.1", hung.getsockname()[1]), {})
    assert finding.verdict is Grade.FAIL
    assert "timed out" in finding.text


def lmcache(said: dict[str, object]) -> AbstractContextManager[str]:
    """A server that says this, by path."""

    def answer(asked: Asked) -> tuple[int, bytes]:
        is_known = asked.path in said
        return 200 if is_known else 404, json.dumps(said.get(asked.path)).encode()

    return answering(answer)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "chunk_size", "verdict", "says"),
    [
        ("0.5.6-g3e11e108", 64, Grade.OK, "is LMCache 0.5.6 with chunks of 64 tokens"),
        ("0.5.7", 64, Grade.FAIL, "is LMCache 0.5.7 with chunks"),
        (
            "0.5.6",
            40,
            Grade.FAIL,
            "chunks of 40 tokens, which is not a multiple of --block-size 16",
        ),
    ],
)
def test_a_server_that_runs_says_its_version_and_its_chunks(
    version: str, chunk_size: int, verdict: Grade, says: str
) -> None:
    status = {"chunk_size": chunk_size, "is_healthy": True}
    with lmcache({"/version": version, "/status": status}) as url:
        finding = tier_checks.server(url, 16)
    assert finding.verdict is verdict
    assert says in finding.text


def test_what_is_no_lmcache_server_is_said_to_be_none() -> None:
    with lmcache({"/version": "0.5.6", "/status": ["what"]}) as url:
        assert "is not an LMCache server" in tier_checks.server(url, 16).text
    with lmcache({}) as url:
        assert "is not an LMCache server: HTTP 404" in tier_checks.server(url, 16).text
    with socket.create_server(("127.0.0.1", 0)) as taken:
        gone = f"http://127.0.0.1:{taken.getsockname()[1]}"
    finding = tier_checks.server(gone, 16)
    assert (finding.verdict, "cannot be reached" in finding.text) == (Grade.FAIL, True)
    assert "pdserve kv-server" in finding.remedy


def test_the_server_is_told_each_tier_and_listens_on_loopback_alone() -> None:
    tiers = parse_tiers("cpu:512M,disk:/data/kv:4GiB,redis:redis://cache:6380")
    config = KvServerConfig(port=8310, chunk_size=64)
    words = arguments_of(config, tiers, Path("/dev/shm/segment"), disk_bytes=3 << 30)
    told = dict(itertools.pairwise(words))
    assert (told["--host"], told["--port"]) == ("127.0.0.1", "8310")
    assert (told["--chunk-size"], told["--l1-size-gb"]) == ("64", "0.5")
    assert told["--shm-name"] == "segment"
    adapters = [json.loads(b) for a, b in itertools.pairwise(words) if a == "--l2-adapter"]
    assert [each["type"] for each in adapters] == ["fs_native", "resp"]
    assert (adapters[0]["base_path"], adapters[0]["max_capacity_gb"]) == ("/data/kv", 3.0)
    assert adapters[0]["eviction"] == {"eviction_policy": "LRU"}
    assert (adapters[1]["host"], adapters[1]["port"]) == ("cache", 6380)


def test_without_further_tiers_nothing_is_written_through() -> None:
    words = arguments_of(KvServerConfig(), Tiers(cpu_bytes=64 * MIB), Path("segment"))
    assert "--l2-adapter" not in words


def test_the_oldest_files_make_room_for_what_a_life_of_the_server_writes(tmp_path: Path) -> None:
    tier = DiskTier(str(tmp_path), 1000)
    for age, name in enumerate(("newest", "newer", "old", "oldest")):
        file = tmp_path / f"{name}.data"
        file.write_bytes(bytes(200))
        os.utime(file, (1000 - age, 1000 - age))
    (tmp_path / "readme").write_bytes(bytes(200))
    assert make_room(tier) == 600
    assert {file.name for file in tmp_path.iterdir()} == {"newest.data", "newer.data", "readme"}
    assert make_room(DiskTier(str(tmp_path / "other"), 1000)) == 1000
    assert (tmp_path / "other").is_dir()


def test_all_of_a_stores_memory_is_cleared_piece_by_piece() -> None:
    """A single long madvise would hold up every thread of the server that maps memory."""
    size = 2 * kv_server._CLEARED_BYTES + (1 << 20)
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        segment = Path(file.name)
        assert kv_server._mapped(segment) == []
        file.truncate(size)
        with mmap.mmap(file.fileno(), size):
            ((start, end),) = kv_server._mapped(segment)
            assert end - start == size
            assert os.fstat(file.fileno()).st_blocks == 0
            kv_server._clear(start, end)
        assert os.fstat(file.fileno()).st_blocks * 512 == size


def test_what_it_says_has_the_form_of_every_log() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        flags = ("--kv-tiers", "cpu:64MiB", "--port", port, "--log-format", "json")
        done = pdserve_here("kv-server", *flags)
    assert [json.loads(line)["event"] for line in done.stderr.splitlines()] == ["start", "failed"]
    assert (done.returncode, done.stdout) == (3, "")


@contextlib.contextmanager
def serving(lmcache: str, folder: Path, *more: str) -> Iterator[subprocess.Popen[bytes]]:
    """A KV server that runs a module in place of LMCache's; it has said that it serves."""
    module = folder / "lmcache" / "v1" / "multiprocess" / "http_server.py"
    module.parent.mkdir(parents=True)
    for each in module.parents[:3]:
        (each / "__init__.py").touch()
    installed = importlib.metadata.distribution("lmcache").locate_file("lmcache/logging.py")
    shutil.copy(str(installed), module.parents[2])
    module.write_text(lmcache)
    ports = dict(zip(("--port", "--http-port"), map(str, free_ports(2)), strict=True))
    flags = ("--kv-tiers", "cpu:64MiB", *(word for pair in ports.items() for word in pair), *more)
    process = subprocess.Popen(
        [sys.executable, "-m", "pdserve", "kv-server", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        env=environment(PYTHONPATH=f"{folder}:{ROOT}"),
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"serves\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_what_lmcache_says_has_the_form_of_every_log(tmp_path: Path) -> None:
    with serving(SAYS_THAT_IT_IS_FULL, tmp_path, "--log-format", "json") as process:
        process.terminate()
        said = [json.loads(line) for line in process.communicate(timeout=10)[1].splitlines()]
    assert {"level": "WARNING", "logger": "lmcache.tier", "event": "1 chunk kept out"}.items() <= (
        said[-1].items()
    )


@pytest.mark.slow
def test_lmcache_is_told_to_report_no_usage(tmp_path: Path) -> None:
    with serving(SAYS_WHAT_IT_MAY_REPORT, tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"false 1\n"


@pytest.mark.slow
def test_a_server_ends_whatever_lmcache_does_with_exceptions_while_it_starts(
    tmp_path: Path,
) -> None:
    with serving(HEARS_NO_INTERRUPT, tmp_path) as process:
        process.terminate()
        assert process.wait(10) == 0


@pytest.mark.slow
@pytest.mark.usefixtures("hears_hang_ups")
def test_a_server_ends_when_its_terminal_closes_as_lmcache_ends_it(tmp_path: Path) -> None:
    with serving(ENDS_ITSELF, tmp_path) as process:
        process.send_signal(signal.SIGHUP)
        assert process.wait(10) == 5


@pytest.mark.slow
def test_a_server_that_lmcache_runs_without_shared_memory_ends(tmp_path: Path) -> None:
    with serving(HAS_NO_MEMORY, tmp_path) as process:
        assert process.wait(30) == 3
        assert process.stderr is not None
        assert "64 MiB of shared memory cannot be had: No space" in process.stderr.read().decode()
