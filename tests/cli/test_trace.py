"""`pdserve trace` as users run it: what it prints, and how it fails."""

from __future__ import annotations

import gzip
import json
import resource
from typing import TYPE_CHECKING

import msgspec
import pytest

from pdserve.wire.trace import Collection, Missing, Part
from tests.cli.answering import Asked, answering
from tests.cli.process import free_ports, pdserve_here
from tests.observe.test_chrome_trace import UNTIL_S, decoded, front, prefilled, process
from tests.observe.trace_checks import check

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

pytestmark = pytest.mark.slow

COLLECTION = Collection(
    seconds=10.0,
    until_s=UNTIL_S,
    wall_s=5000.0,
    processes=[
        process(Part.PROXY, "", [front()]),
        process(Part.CORE, "prefill", prefilled()),
        process(Part.CORE, "decode", decoded(990.0 - 7.0), offset_s=7.0, num_dropped=3),
    ],
    missing=[Missing(who="http://127.0.0.1:1", reason="cannot connect")],
)


def tracing(status: int, body: bytes) -> AbstractContextManager[str]:
    """A server that gives one answer to those who have the key `k`."""

    def answer(asked: Asked) -> tuple[int, bytes]:
        is_known = asked.headers["Authorization"] == "Bearer k"
        error = {"error": {"message": "the API key is missing or wrong"}}
        return (status, body) if is_known else (401, json.dumps(error).encode())

    return answering(answer)


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_the_file_is_a_trace_and_what_is_printed_says_what_it_holds(tmp_path, name):
    path = tmp_path / name
    with tracing(200, msgspec.json.encode(COLLECTION)) as url:
        done = pdserve_here("trace", "--url", url, "-o", str(path), "--api-key", "k")
    assert done.returncode == 0, done.stderr
    data = path.read_bytes()
    checked = check(json.loads(gzip.decompress(data) if name.endswith("gz") else data))
    assert len(checked.arrows) == 1
    for told in (
        "3 processes: proxy, prefill-1 engine, decode-1 engine",
        "1 request, 3 steps, 1 handoff between engines",
        "clocks aligned within 1.000 ms",
        "3 events were dropped",
        "missing: http://127.0.0.1:1: cannot connect",
        "https://ui.perfetto.dev",
    ):
        assert told in done.stdout


def test_a_deployment_that_was_idle_leaves_no_file_and_is_told(tmp_path):
    path = tmp_path / "t.json"
    idle = msgspec.structs.replace(
        COLLECTION, processes=[process(Part.PROXY, "", []), process(Part.CORE, "prefill", [])]
    )
    with tracing(200, msgspec.json.encode(idle)) as url:
        done = pdserve_here("trace", "--url", url, "-o", str(path), "--api-key", "k")
    assert done.returncode == 1
    assert "nothing ran in the last 10 s" in done.stderr
    assert "missing: http://127.0.0.1:1: cannot connect" in done.stderr
    assert not path.exists()


def test_a_disk_without_room_is_told_and_no_part_of_a_trace_is_left(tmp_path):
    path = tmp_path / "t.json"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with tracing(200, msgspec.json.encode(COLLECTION)) as url:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        try:
            done = pdserve_here("trace", "--url", url, "-o", str(path), "--api-key", "k")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert done.returncode == 3
    assert "which cannot be written: File too large" in done.stderr
    assert not path.exists()


def test_nobody_at_the_url_is_told_with_what_to_give():
    (port,) = free_ports(1)
    done = pdserve_here("trace", "--url", f"http://127.0.0.1:{port}")
    assert done.returncode == 4
    assert "cannot be reached" in done.stderr
    assert "--url" in done.stderr


def test_a_wrong_key_is_told_with_the_flag_that_gives_another():
    with tracing(200, b"{}") as url:
        done = pdserve_here("trace", "--url", url, "--api-key", "wrong")
    assert done.returncode == 3
    assert "--api-key" in done.stderr


@pytest.mark.parametrize("body", [b"<html>", b'{"seconds": "\xff"}'])
def test_an_answer_that_is_no_trace_is_told_as_that(body):
    with tracing(200, body) as url:
        done = pdserve_here("trace", "--url", url, "--api-key", "k")
    assert done.returncode == 4
    assert "did not answer with a trace of pdserve" in done.stderr


def test_more_seconds_than_are_kept_are_refused_before_anybody_is_asked():
    done = pdserve_here("trace", "--seconds", "500")
    assert done.returncode == 3
    assert "--seconds is 500.0: use at most 120" in done.stderr


def test_a_directory_that_is_not_there_is_told_before_anybody_is_asked(tmp_path):
    done = pdserve_here("trace", "-o", str(tmp_path / "none" / "t.json"))
    assert done.returncode == 3
    assert "--output is" in done.stderr
