from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pdserve.commands import engine
from pdserve.config.boxed import boxed_model_dir
from pdserve.lifeline import heeded_signals
from tests.cli.process import ROOT, environment, free_ports, pdserve
from tests.tiny_models import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("serving") / "tiny")


@contextlib.contextmanager
def started(*arguments: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """A command that serves; it ends with the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pdserve", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=environment(**variables),
    )
    assert process.stdout is not None
    try:
        yield process
    finally:
        process.kill()
        process.stdout.close()
        process.wait()


def read_until(process: subprocess.Popen[str], word: str) -> str:
    """What the process writes, up to the line with `word`."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if word in line:
            return "".join(lines)
    raise AssertionError("".join(lines))


def test_a_percentage_is_logged_only_of_what_takes_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 100.0
    lines: list[str] = []
    monkeypatch.setattr(engine.time, "monotonic", lambda: now_s)
    monkeypatch.setattr(engine.log, "info", lambda text, *args: lines.append(text % args))
    progress = engine._Progress()
    for text, passed_s in [
        ("compiling", 9.0),
        ("weights 10 %", 0.4),
        ("weights 20 %", 0.7),
        ("weights 30 %", 0.1),
        ("KV memory", 5.0),
        ("something 10 %", 0.0),
    ]:
        progress(text)
        now_s += passed_s
    assert lines == ["compiling", "weights 30 %", "KV memory"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 0, marks=pytest.mark.matrix),
        (signal.SIGHUP, 0),
    ],
)
@pytest.mark.usefixtures("hears_hang_ups")
def test_a_proxy_says_what_it_lacks_and_ends_when_told(number: signal.Signals, code: int) -> None:
    (port,) = free_ports(1)
    with started("proxy", "--port", str(port), "--drain-delay", "0") as proxy:
        said = read_until(proxy, "pdserve decode MODEL")
        first, ready, *_ = said.splitlines()
        assert f"Z INFO pdserve.start pdserve proxy 0.1.0: port = {port} (command line), " in first
        assert f"ready url=http://127.0.0.1:{port} " in ready
        assert f"pdserve prefill MODEL --port 8100 --proxy http://127.0.0.1:{port}" in said
        proxy.send_signal(number)
        assert proxy.wait(60) == code


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("boxed", marks=pytest.mark.matrix), "some/model"])
def test_a_proxy_takes_for_its_tokenizer_the_name_that_engines_take_for_their_model(
    name: str, tmp_path: Path
) -> None:
    cache = tmp_path / "models--some--model"
    (cache / "snapshots").mkdir(parents=True)
    (cache / "snapshots" / "main").symlink_to(boxed_model_dir())
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("main")
    flags = ("--port", "0", "--policy", "prefix_sticky", "--tokenizer", name)
    with started("proxy", *flags, HF_HUB_CACHE=str(tmp_path)) as proxy:
        read_until(proxy, "ready url=")


def test_a_hangup_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert heeded_signals() == [signal.SIGINT, signal.SIGTERM]
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("command", "role"),
    [
        ("serve", "both"),
        pytest.param("prefill", "prefill", marks=pytest.mark.matrix),
        pytest.param("decode", "decode", marks=pytest.mark.matrix),
    ],
)
def test_an_engine_serves_under_the_name_it_was_given_until_interrupted(
    command: str, role: str, model: Path
) -> None:
    (port,) = free_ports(1)
    with started(command, str(model), "--port", str(port)) as engine:
        said = read_until(engine, " ready url=")
        assert f": model = {model} (command line), " in said.splitlines()[0]
        assert re.search(r"KV cache: [\d,]+ tokens .*maximum concurrency .* [\d.]+x", said)
        assert re.search(r" ready url=.* kv_tokens=\d+ max_concurrency=[\d.]+", said)
        core = psutil.Process(engine.pid).children()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/pdserve/info") as response:
            info = json.load(response)
        assert (info["models"], info["engine"]["role"]) == ([str(model)], role)
        assert info["engine"]["numerics"]["tp_size"] == 1
        engine.send_signal(signal.SIGINT)
        assert engine.wait(60) == 130
        assert psutil.wait_procs(core, timeout=30)[1] == []


@pytest.mark.e2e
def test_a_model_that_cannot_be_loaded_is_code_3(tmp_path: Path, model: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in model.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    (broken / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    (port,) = free_ports(1)
    done = pdserve("serve", str(broken), "--port", str(port))
    assert done.returncode == 3
    assert "git lfs" in done.stderr.lower()
    assert "Traceback" not in done.stderr
    about = [line for line in done.stderr.splitlines() if "git lfs" in line.lower()]
    assert len(about) == 1, done.stderr
    assert " ERROR pdserve.start pdserve serve: " in about[0]


@pytest.mark.e2e
@pytest.mark.matrix
def test_an_engine_core_that_dies_is_one_error_and_code_1(model: Path) -> None:
    (port,) = free_ports(1)
    with started("serve", str(model), "--port", str(port)) as engine:
        read_until(engine, " ready url=")
        psutil.Process(engine.pid).children()[0].kill()
        assert engine.stdout is not None
        said = engine.stdout.read()
        assert engine.wait(60) == 1
    errors = [line for line in said.splitlines() if "the engine core was killed by SIGKILL" in line]
    assert len(errors) == 1, said
    assert " ERROR pdserve.start pdserve serve: the engine has ended: " in errors[0]


@pytest.mark.slow
def test_as_json_every_line_of_a_proxys_life_is_one_object() -> None:
    (port,) = free_ports(1)
    flags = ("--port", str(port), "--log-format", "json", "--drain-delay", "0")
    with started("proxy", *flags, PDSERVE_PROT="3") as proxy:
        lines = read_until(proxy, '"no decode engine yet"').splitlines()
        proxy.send_signal(signal.SIGTERM)
        assert proxy.stdout is not None
        lines += proxy.stdout.read().splitlines()
        assert proxy.wait(60) == 0
    told = [json.loads(line) for line in lines]
    assert [told[0]["event"], told[2]["event"]] == ["start", "ready"]
    assert told[0]["settings"]["port"] == {"value": str(port), "from": "command line"}
    assert (told[1]["level"], told[1]["event"].partition(":")[0]) == (
        "WARNING",
        "PDSERVE_PROT is not a setting",
    )
    assert told[2]["url"] == f"http://127.0.0.1:{port}"


def test_what_a_proxy_cannot_start_with_is_one_dated_error() -> None:
    done = pdserve("proxy", "--max-concurrent-requests", "0")
    assert done.returncode == 3
    last = done.stderr.splitlines()[-1]
    assert re.match(r"\S+Z ERROR pdserve\.start pdserve proxy: --max-concurrent-requests", last)
    assert done.stderr.count("ERROR") == 1


@pytest.mark.e2e
@pytest.mark.matrix
def test_cuda_without_a_gpu_is_code_3(model: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    (port,) = free_ports(1)
    done = pdserve("serve", str(model), "--port", str(port), "--device", "cuda")
    assert done.returncode == 3
    assert "--device" in done.stderr
    assert "Traceback" not in done.stderr
