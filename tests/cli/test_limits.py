"""What a command does with little: few descriptors, no threads, a full disk, closed streams."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pdserve.cli import main
from pdserve.errors import InternalError, story_of
from tests.cli.process import ROOT, environment

pytestmark = pytest.mark.slow


def test_a_command_may_open_more_descriptors_than_the_shell_gave_it() -> None:
    program = (
        "import resource, pdserve.cli\n"
        "_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))\n"
        "pdserve.cli.main([])\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(hard, 65536))\n"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert answer.stdout.splitlines()[-1] == "True", answer.stderr


@pytest.mark.parametrize("command", ["up", "serve", "bench"])
def test_too_few_descriptors_are_one_error_that_says_how_to_raise_them(command: str) -> None:
    words = {"up": ["up"], "serve": ["serve", "boxed"], "bench": ["bench", "serve"]}[command]
    program = (
        "import resource, sys, pdserve.cli\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))\n"
        f"sys.exit(pdserve.cli.main({words!r}))\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert answer.returncode == 3
    [line] = answer.stderr.splitlines()
    assert "the limit of open files is 32, and at least 128 are needed: raise it" in line


def test_a_working_directory_that_was_deleted_is_one_error_that_says_so(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main(["vllm-flags"]) == 3
    [line] = capfd.readouterr().err.splitlines()
    assert "the working directory was deleted" in line


def test_an_output_for_which_there_is_no_room_ends_a_command_in_one_line() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "pdserve", "vllm-flags"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            cwd=ROOT,
            env=environment(),
        )
    told = "pdserve vllm-flags: the output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, told)


def test_what_the_locale_has_no_characters_for_is_written_as_escapes() -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pdserve", "bench", "serve"),
            *("--base-url", "http://127.0.0.1:1", "--label", "grün"),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=environment(PYTHONIOENCODING="ascii"),
    )
    assert "  label = gr\\xfcn  (command line)" in done.stdout
    assert done.returncode == 4, done.stderr


def test_no_socket_gets_the_descriptor_of_a_standard_stream_that_is_closed(tmp_path: Path) -> None:
    """What a library writes to stderr would go to a peer."""
    found = tmp_path / "found"
    program = (
        "import contextlib, os, socket, sys\n"
        "from pdserve.__main__ import main\n"
        "with contextlib.suppress(SystemExit):\n"
        "    main()\n"
        "opened = socket.socket().fileno()\n"
        "passed_on = [os.get_inheritable(each) for each in range(3)]\n"
        "said = f'{opened > 2} {sys.stdout.isatty()} {passed_on}'\n"
        f"open({str(found)!r}, 'w').write(said)\n"
    )
    closed = 'exec "$@" <&- >&- 2>&-'
    subprocess.run(
        ["sh", "-c", closed, "sh", sys.executable, "-c", program, "--version"],
        check=True,
        timeout=60,
        cwd=ROOT,
        env=environment(),
    )
    assert found.read_text() == "True False [True, True, True]"


@pytest.mark.parametrize(
    "refusal",
    [
        RuntimeError("can't start new thread"),  # CPython's words, where clone() fails
        RuntimeError("Resource temporarily unavailable"),  # gloo's, likewise
        BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),  # fork() likewise
    ],
)
def test_a_process_without_threads_or_children_tells_in_a_line_how_to_get_them(
    refusal: Exception,
) -> None:
    assert "\n" not in story_of(refusal)
    assert story_of(refusal).endswith("docker run --pids-limit")
    dead = InternalError("the KV transfer thread died")
    dead.__cause__ = refusal
    assert story_of(dead) == story_of(refusal)
    assert story_of(KeyError("x")).endswith("KeyError: 'x'\n")


def test_threads_that_the_system_refuses_are_one_line_that_says_how_to_get_them(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def started(*_: object) -> int:
        threading.Thread(target=print).start()
        return 0

    def refused(*_: object) -> None:
        raise RuntimeError("can't start new thread")  # CPython's words, where clone() fails

    monkeypatch.setattr("pdserve.commands.vllm_flags.run", started)
    monkeypatch.setattr("threading._start_new_thread", refused)
    assert main(["vllm-flags"]) == 1
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith(
        "pdserve vllm-flags: can't start new thread: raise the limit of processes"
    )
