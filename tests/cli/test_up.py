from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.cli.process import ROOT, environment, free_ports
from tests.tiny_models import write_tiny_model

SMALL = ("--kv-cache-memory-bytes", "16MiB")
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("up") / "tiny")


class Up:
    """`pdserve up` as a process, and what it has written so far."""

    def __init__(self, model: Path, folder: Path, *arguments: str) -> None:
        names = ("--port", "--prefill-port", "--decode-port")
        self.ports = free_ports(len(names))
        flags = [word for pair in zip(names, map(str, self.ports), strict=True) for word in pair]
        self._out = folder / "out"
        self._err = folder / "err"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pdserve", "up", str(model), *flags, *arguments, *SMALL],
                stdout=out,
                stderr=err,
                cwd=ROOT,
                env=environment(),
            )
        self.family: dict[int, psutil.Process] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports[0]}"

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def wait_for(self, text: str, timeout_s: float = 150) -> None:
        deadline_s = time.monotonic() + timeout_s
        while text not in self.out:
            assert self.process.poll() is None, self.err
            assert time.monotonic() < deadline_s, self.out + self.err
            self.look()
            time.sleep(0.05)
        self.look()

    def look(self) -> None:
        """Remember every process there is below this one."""
        for process in psutil.Process(self.process.pid).children(recursive=True):
            self.family[process.pid] = process

    def end(self) -> int:
        code = self.process.wait(60)
        _, alive = psutil.wait_procs(list(self.family.values()), timeout=30)
        assert alive == []
        return code


@pytest.fixture
def make(model: Path, tmp_path: Path) -> Iterator[list[Up]]:
    made: list[Up] = []
    yield made
    for up in made:
        # A failed test may leave its children stopped, and deaf to the end of their parent.
        for process in up.family.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        up.process.kill()
        up.process.wait()


def assert_it_shows_where_its_time_went(up: Up, num_tokens: int) -> None:
    summary = re.search(
        rf" in=\d+ cached=\d+ out={num_tokens} total=[\d.]+ms ttft=([\d.]+)ms = ([^|]*)", up.out
    )
    assert summary is not None
    stages = [float(stage) for stage in re.findall(r" ([\d.]+)(?= \+|\s*$| \()", summary[2])]
    assert sum(stages) == pytest.approx(float(summary[1]), abs=0.1 * len(stages))


@pytest.mark.matrix
def test_the_demo_answers_shows_where_its_time_went_and_ends(
    model: Path, tmp_path: Path, make: list[Up]
) -> None:
    up = Up(model, tmp_path, "--once", "--prompt", "Tell me something", "--max-tokens", "12")
    make.append(up)
    up.wait_for("ttft=")
    assert up.end() == 0
    question, answer = up.out.index("Tell me something\n"), up.out.index("ok status=200 ")
    assert answer > question
    assert_it_shows_where_its_time_went(up, 12)


def test_engines_that_cannot_pair_are_an_error(model: Path, tmp_path: Path, make: list[Up]) -> None:
    up = Up(model, tmp_path, "--prefill.dtype", "float32", "--decode.dtype", "bfloat16")
    make.append(up)
    assert up.process.wait(150) == 3, up.out + up.err
    assert up.end() == 3
    assert "dtype float32 and bfloat16" in up.err
    assert "start both with the same model and --dtype" in up.err


@pytest.mark.matrix
def test_a_quiet_demo_still_shows_where_its_time_went(
    model: Path, tmp_path: Path, make: list[Up]
) -> None:
    up = Up(model, tmp_path, "--once", "--max-tokens", "4", "--log-level", "error")
    make.append(up)
    up.wait_for("ttft=")
    assert up.end() == 0
    assert re.search(r"ttft=.* = .*proxy .* \| second token \+.*kv .*handover ", up.out), up.out
    assert up.err == ""


def test_it_serves_the_curl_it_prints_until_ctrl_c(
    model: Path, tmp_path: Path, make: list[Up]
) -> None:
    up = Up(model, tmp_path, "--max-tokens", "4", "--api-key", "sesame")
    make.append(up)
    up.wait_for("/metrics")
    assert_it_shows_where_its_time_went(up, 4)
    printed = re.search(r"  (curl \S+/v1/.*(?:\n .*)*?'\{.*\}')", up.out)
    assert printed is not None
    done = subprocess.run(
        ["bash", "-c", printed[1].replace("curl", "curl -sS", 1)],
        capture_output=True,
        check=True,
        env={**os.environ, "PDSERVE_API_KEY": "sesame"},
    )
    assert json.loads(done.stdout)["usage"]["completion_tokens"] <= 4
    commands = [shlex.join(process.cmdline()) for process in up.family.values()]
    assert not any("sesame" in command for command in commands)
    up.process.send_signal(signal.SIGINT)
    assert up.end() == 130


def test_the_second_of_the_readmes_two_runs_loads_what_the_first_has_left(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    (loop,) = re.findall(r"^for run in 1 2; do\n.*?^done$", readme, re.MULTILINE | re.DOTALL)
    names = ("--port", "--prefill-port", "--decode-port", "--kv-port", "--kv-http-port")
    flags = [word for pair in zip(names, map(str, free_ports(5)), strict=True) for word in pair]
    program = shlex.join([sys.executable, "-m", "pdserve"])
    script = f'pdserve() {{ {program} "$@" {shlex.join([*flags, *SMALL])}; }}\n{loop}'
    done = subprocess.run(
        ["bash", "-c", script.replace("/tmp/kv", str(tmp_path / "kv"))],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env=environment(),
    )
    assert re.findall(r" path=(\S+) ", done.stdout) == ["push", "push+store"], done.stderr
    from_store = re.compile(r"kv from store \d+ of \d+")
    assert from_store.findall(done.stdout) == from_store.findall(readme)


@pytest.mark.matrix
def test_nothing_outlives_it_when_it_is_killed(model: Path, tmp_path: Path, make: list[Up]) -> None:
    up = Up(model, tmp_path)
    make.append(up)
    up.wait_for("ready after")
    up.process.kill()
    assert up.end() == -signal.SIGKILL


@pytest.mark.matrix
def test_a_second_ctrl_c_kills_what_does_not_drain(
    model: Path, tmp_path: Path, make: list[Up]
) -> None:
    up = Up(model, tmp_path, "--max-tokens", "4")
    make.append(up)
    up.wait_for("/metrics")
    for process in psutil.Process(up.process.pid).children(recursive=True):
        process.suspend()
    up.process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        up.process.wait(0.5)
    up.process.send_signal(signal.SIGINT)
    assert up.end() == 130
