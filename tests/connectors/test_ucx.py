"""UCX without NIXL: what can be said where both are, and its own tests in a process of theirs."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from pdserve.connectors.ucx import UcxSettings
from pdserve.errors import ConfigError
from tests.python import run_python

ROOT = Path(__file__).parents[2]
_NEITHER = """
import sys, types
sys.modules[{loaded!r}] = types.ModuleType({loaded!r})
from pdserve.errors import ConfigError
{load}
"""
_UCX = "from pdserve.connectors.ucx.library import UcxWorker as Make; arguments = ({},)"
_NIXL = "from pdserve.connectors.nixl.agent import NixlAgent as Make; arguments = ('a', ['UCX'])"


@pytest.mark.parametrize(
    ("load", "loaded", "says"),
    [
        (_UCX, "nixl._bindings", "'ucx' cannot run in a process that has loaded NIXL"),
        (_NIXL, "ucxx", "'nixl' cannot run in a process that has loaded ucxx"),
    ],
)
def test_a_second_copy_of_ucx_in_a_process_is_refused(load: str, loaded: str, says: str) -> None:
    program = _NEITHER.format(loaded=loaded, load=load)
    program += "\ntry:\n    Make(*arguments)\nexcept ConfigError as error:\n    print(error)\n"
    assert says in run_python("-c", program).stdout


@pytest.mark.slow
def test_under_nohup_a_closing_terminal_does_not_make_ucx_log_every_transfer() -> None:
    program = f"""
import signal, sys
sys.modules["torch"] = None  # NIXL would import it, to learn its CUDA version
signal.signal(signal.SIGHUP, signal.SIG_IGN)
{_NIXL}
agent = Make(*arguments)
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print("ignored" if int(status["SigIgn"], 16) & 1 else "handled")
"""
    assert run_python("-c", program).stdout == "ignored\n"


@pytest.mark.parametrize("messages", [1, 1 << 40])
def test_too_few_or_too_many_messages_are_refused_by_name(messages: int) -> None:
    says = rf"--kv-transfer-config\.ucx\.messages is {messages}: use 4 to 1024"
    with pytest.raises(ConfigError, match=says):
        UcxSettings(messages=messages)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="pdserve[ucx] is not here")
def test_the_tests_of_ucx_pass_in_a_process_of_their_own() -> None:
    tests = "-m", "pytest", "-q", "-m", "not slow and not chaos", "tests/ucx"
    run_python(*tests, cwd=ROOT, timeout_s=200)
