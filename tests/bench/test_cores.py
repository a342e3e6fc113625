"""Who used the cores, by what /proc says at two moments, and which processes serve a URL."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from pdserve.bench.cores import (
    CLIENT,
    PROXY,
    SERVERS,
    STORE,
    CpuReading,
    Watched,
    read_cpu,
    serving,
    used_cores,
)
from pdserve.bench.records import CoresUsed
from tests.bench.scripted import scripted_server
from tests.cli.process import pdserve

ME = os.getpid()
# Of a process: its parent, ticks of its own, ticks of its children that have ended.
Ticks = tuple[int, int, int]


def reading(at_s: float, core: str, processes: Mapping[int, Ticks], tmp_path: Path) -> CpuReading:
    """What is read of a machine with one core and these processes."""
    proc = tmp_path / str(at_s)
    proc.mkdir()
    (proc / "stat").write_text(f"cpu  {core}\ncpu0 {core}\nintr 1 2\n")
    for pid, (parent, own, ended) in processes.items():
        (proc / str(pid)).mkdir()
        told = f"{pid} (a (b) c) S {parent} 1 1 0 -1 0 0 0 0 0 {own} 0 {ended} 0 20 0 1 0 9\n"
        (proc / str(pid) / "stat").write_text(told)
    return read_cpu(proc)._replace(at_s=at_s)


def used(
    tmp_path: Path,
    before: Mapping[int, Ticks],
    after: Mapping[int, Ticks],
    *,
    core: str = "0 0 0 0 0 0 0 0 0 0",
    watched: Mapping[int, str] | None = None,
) -> CoresUsed:
    """In ten seconds, the core's ticks being those at their end."""
    found = used_cores(
        reading(0.0, "0 0 0 0 0 0 0 0 0 0", before, tmp_path),
        reading(10.0, core, after, tmp_path),
        Watched(watched or {}, [0]),
    )
    assert found is not None
    return found


def test_a_server_and_what_it_has_started_are_told_apart(tmp_path: Path) -> None:
    before = {ME: (1, 50, 0), 70: (1, 100, 0), 71: (70, 500, 0), 80: (1, 0, 0), 90: (1, 7, 0)}
    after = {ME: (1, 150, 0), 70: (1, 200, 0), 71: (70, 900, 0), 80: (1, 50, 0), 90: (1, 9, 0)}
    found = used(tmp_path, before, after, watched={70: SERVERS, 80: PROXY})
    assert found.parts == {"client": 0.1, "API servers": 0.1, "engines": 0.4, "proxy": 0.05}


def test_a_client_that_has_ended_still_counts_and_only_for_the_run(tmp_path: Path) -> None:
    before = {ME: (1, 0, 0), 71: (ME, 500, 0)}
    after = {ME: (1, 0, 600)}  # with what the process had used before, which is no part of the run
    assert used(tmp_path, before, after).parts == {CLIENT: 0.1}


def test_what_nobody_of_the_run_has_used_is_others_and_the_greediest_is_named(
    tmp_path: Path,
) -> None:
    before: dict[int, Ticks] = {ME: (1, 0, 0), 1: (0, 0, 0), 90: (1, 50, 0)}
    after: dict[int, Ticks] = {ME: (1, 100, 0), 1: (0, 10, 0), 90: (1, 350, 0)}
    # user nice system idle iowait irq softirq steal guest guest_nice
    found = used(tmp_path, before, after, core="200 0 200 300 100 10 90 0 100 0")
    assert found.others == 0.4
    assert (found.greediest, found.greediest_cores) == ("process 90, a (b) c", 0.3)
    assert found.hypervisor == 0.0


def test_what_a_program_used_before_the_run_counts_for_nobody_when_it_ends(tmp_path: Path) -> None:
    before = {ME: (1, 0, 0), 90: (1, 0, 0), 91: (90, 4000, 0), 92: (91, 800, 0)}
    after = {ME: (1, 0, 0), 90: (1, 0, 4900)}
    found = used(tmp_path, before, after, core="100 0 0 0 0 0 0 0 0 0")
    assert (found.others, found.greediest_cores) == (0.1, 0.1)


def test_what_the_hypervisor_took_is_told_apart(tmp_path: Path) -> None:
    found = used(tmp_path, {}, {ME: (1, 100, 0)}, core="100 0 0 700 0 0 0 200 0 0")
    assert (found.hypervisor, found.others, found.total) == (0.2, 0.0, pytest.approx(0.3))


def test_a_run_of_less_than_a_second_says_nothing_of_cores(tmp_path: Path) -> None:
    two = [reading(at_s, "0 0 0 0 0 0 0 0 0 0", {}, tmp_path) for at_s in (0.0, 0.9)]
    assert used_cores(two[0], two[1], Watched({}, [0])) is None


def test_without_proc_nothing_is_known(tmp_path: Path) -> None:
    nothing = read_cpu(tmp_path / "none")
    assert used_cores(nothing, nothing._replace(at_s=1e9), Watched({}, [0])) is None


LISTEN = "s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True)"
CONNECT = "c = socket.create_connection(('127.0.0.1', {}))"


@contextlib.contextmanager
def program(words: str) -> Iterator[tuple[int, int]]:
    """A process that listens, after it has done something: its id, and its port."""
    script = f"import socket; {words}; {LISTEN}; input()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        try:
            yield process.pid, port
        finally:
            process.kill()


def url(port: int) -> str:
    return f"http://localhost:{port}"


class TestServing:
    def test_who_listens_serves(self) -> None:
        with program("pass") as (pid, port):
            found = serving(url(port), [], read_cpu())
        assert found is not None
        assert found.processes == {pid: SERVERS}
        assert found.cores == os.sched_getaffinity(0)

    def test_whom_the_server_is_connected_with_serves_too(self) -> None:
        with (
            program("pass") as (store, store_port),
            program(CONNECT.format(store_port)) as (engine, engine_port),
            program(CONNECT.format(engine_port)) as (proxy, port),
        ):
            reading = read_cpu()
            untold = serving(url(port), [], reading)
            told = serving(url(port), [url(engine_port)], reading)
        assert untold is not None
        assert untold.processes == {proxy: SERVERS, engine: SERVERS, store: SERVERS}
        assert told is not None
        assert told.processes == {proxy: PROXY, engine: SERVERS, store: STORE}

    def test_clients_do_not_serve(self) -> None:
        with (
            program("pass") as (engine, port),
            socket.create_connection(("127.0.0.1", port)),
        ):
            found = serving(url(port), [], read_cpu())
        assert found is not None
        assert found.processes == {engine: SERVERS}

    @pytest.mark.parametrize("elsewhere", ["http://192.0.2.1:80", "http://127.0.0.1:9"])
    def test_of_another_machine_or_an_unseen_process_nothing_is_known(self, elsewhere: str) -> None:
        assert serving(elsewhere, [], read_cpu()) is None


@pytest.mark.slow
def test_a_run_beside_a_program_that_takes_a_core_is_not_valid() -> None:
    with (
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) as thief,
        scripted_server("--first-ms", "200", "--gap-ms", "4") as server,
    ):
        try:
            done = pdserve(
                *("bench", "serve", "--base-url", server.url, "--tokenizer", "boxed"),
                *("--random-input-len", "8", "--random-output-len", "4", "--num-prompts", "16"),
                *("--request-rate", "8", "--burstiness", "inf", "--no-progress"),
            )
        finally:
            thief.kill()
    assert done.returncode == 1, done.stdout
    assert "NOT VALID: DO NOT USE THESE FIGURES" in done.stdout
    assert "Other programs used " in " ".join(done.stdout.split())
    assert "Cores in use on average: " in done.stdout
