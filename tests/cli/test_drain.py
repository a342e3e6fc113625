"""`pdserve drain`: which proxies are asked, and what is told."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.cli import main
from tests.cli.answering import Asked, answering
from tests.cli.process import ROOT, environment, free_ports

if TYPE_CHECKING:
    from collections.abc import Iterator

ENGINE = "http://127.0.0.1:8200"


@contextmanager
def proxy(status: int = 200, **answer: Any) -> Iterator[tuple[str, list[tuple[str, dict]]]]:
    """Yield the URL of one that answers so, and what it was asked."""
    asked: list[tuple[str, dict]] = []

    def told(request: Asked) -> tuple[int, bytes]:
        asked.append((f"{request.method} {request.path}", json.loads(request.body)))
        return status, json.dumps(answer).encode()

    with answering(told) as url:
        yield url, asked


def report(*, is_empty: bool = True, num_left: int = 0) -> dict[str, Any]:
    return {
        "url": ENGINE, "is_empty": is_empty, "seconds": 2.14, "num_finished": 3, "num_moved": 1,
        "num_left": num_left,
    }  # fmt: skip


@pytest.mark.slow
def test_every_proxy_is_asked_and_what_became_of_the_requests_is_told(capsys):
    with proxy(**report()) as (one, asked_one), proxy(**report()) as (other, asked_other):
        assert main(["drain", ENGINE, "--proxy", one, other, "--deadline", "7"]) == 0
    assert asked_one == asked_other == [("POST /drain", {"url": ENGINE, "deadline_s": 7.0})]
    lines = capsys.readouterr().out.splitlines()
    told = "that ran there, 3 finished and 1 moved to other engines"
    assert lines == [
        f"{ENGINE} is empty after 2.1 s: of the requests of {url} {told}" for url in (one, other)
    ]


@pytest.mark.parametrize(
    ("num_left", "told"), [(2, "still has 2 requests after 2.1 s"), (0, "or KV that another")]
)
def test_an_engine_that_is_not_empty_is_no_success_and_what_it_has_is_told(capsys, num_left, told):
    with proxy(**report(is_empty=False, num_left=num_left)) as (url, _):
        assert main(["drain", ENGINE, "--proxy", url]) == 1
    assert told in capsys.readouterr().out


@pytest.mark.slow
def test_ctrl_c_ends_it_before_its_deadline():
    asked, is_over = threading.Event(), threading.Event()

    def hold(_: Asked) -> tuple[int, bytes]:
        asked.set()
        is_over.wait(60.0)
        return 200, b"{}"

    with answering(hold) as url:
        words = (sys.executable, "-m", "pdserve", "drain", ENGINE, "--proxy", url)
        command = subprocess.Popen((*words, "--deadline", "60"), cwd=ROOT, env=environment())
        try:
            assert asked.wait(60.0)
            command.send_signal(signal.SIGINT)
            assert command.wait(20.0) == 130
        finally:
            is_over.set()
            command.kill()
            command.wait()


def test_requests_are_sent_there_again(capsys):
    with proxy() as (url, asked):
        assert main(["drain", ENGINE, "--proxy", url, "--resume"]) == 0
    assert asked[0][0] == "DELETE /drain"
    assert capsys.readouterr().out == f"{ENGINE} receives requests again\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "code", "told"),
    [(404, 3, "no such engine"), (401, 3, "--api-key"), (500, 4, "no such engine")],
)
def test_what_a_proxy_refuses_is_told(capsys, status, code, told):
    error = {"message": "no such engine", "type": "t", "param": None, "code": "c"}
    with proxy(status, error=error) as (url, _):
        assert main(["drain", ENGINE, "--proxy", url]) == code
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        ((), 3, "ENGINE is missing"),
        (("8200",), 3, "pdserve drain: ENGINE is '8200': write it as http"),
        ((ENGINE, "--deadline", "-1"), 3, "--deadline"),
    ],
)
def test_what_cannot_be_asked_is_told_before_anybody_is(capsys, words, code, told):
    assert main(["drain", *words]) == code
    assert told in capsys.readouterr().err


def test_nobody_at_the_url_is_told_with_what_to_give(capsys):
    (port,) = free_ports(1)
    assert main(["drain", ENGINE, "--proxy", f"http://127.0.0.1:{port}"]) == 4
    assert "--proxy" in capsys.readouterr().err


@pytest.mark.parametrize("words", [(), ("--resume",)])
def test_what_one_proxy_did_is_told_although_others_cannot_be_asked(capsys, words):
    gone = [f"http://127.0.0.1:{port}" for port in free_ports(2)]
    with proxy(**report()) as (url, _):
        assert main(["drain", ENGINE, "--proxy", gone[0], url, gone[1], *words]) == 4
    told = capsys.readouterr()
    [line] = told.out.splitlines()
    assert line.startswith(f"{ENGINE} ")
    assert f" of {url}" in line
    assert [word in told.err for word in (url, *gone)] == [False, True, True]
