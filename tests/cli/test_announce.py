from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from pdserve.commands.proxy import _tell_ready
from pdserve.config.http import ProxyConfig
from tests.cli.process import ROOT, environment
from tests.python import run_python

PROBE = "from pdserve.commands.announce import program; print(program())"


def _called_as(script: str, *, path: str) -> str:
    """What `program` says in a process that was called as `script`."""
    code = f"import sys; sys.argv[0] = {script!r}; {PROBE}"
    return run_python("-c", code, cwd=ROOT, env=environment(PATH=path)).stdout.strip()


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "pdserve"
    file.touch(mode=0o755)
    return file


def test_a_command_to_copy_is_called_by_its_name_if_the_shell_finds_it(script: Path) -> None:
    path = f"{script.parent}{os.pathsep}/usr/bin"
    assert _called_as(str(script), path=path) == "pdserve"


def test_a_command_to_copy_is_called_by_its_path_if_the_shell_does_not_find_it(
    script: Path,
) -> None:
    assert _called_as(str(script), path="/usr/bin") == str(script)


def test_a_command_to_copy_is_called_as_a_module_if_this_one_was() -> None:
    module = str(ROOT / "pdserve" / "__main__.py")
    assert _called_as(module, path="/usr/bin") == f"{sys.executable} -m pdserve"


def test_a_url_with_and_without_a_slash_at_its_end_is_one_engine(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine, other = "http://127.0.0.1:1", "http://127.0.0.1:2"
    with caplog.at_level("INFO", "pdserve"):
        _tell_ready(ProxyConfig(prefill=(engine, f"{engine}/"), decode=(other,)), "http://here")
    assert caplog.messages == ["ready url=http://here prefill=1 decode=1"]
