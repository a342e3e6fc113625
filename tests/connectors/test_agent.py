"""What NIXL does where nobody answers: the promise that a lane never waits inside it."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import socket
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import numpy as np
import psutil
import pytest

from pdserve.connectors.nixl.agent import AgentError, NixlAgent
from pdserve.connectors.nixl.descriptors import is_connection, open_sockets
from pdserve.connectors.transfer.protocol import Region
from pdserve.connectors.transfer.seams import Direction
from pdserve.errors import ConfigError
from tests.connectors.engines import PRELOADED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess
    from pathlib import Path

    import numpy.typing as npt

_UNIT_BYTES = 4096
_NUM_UNITS = 16
_MANY_UNITS = 8192
_M_PERTURB = -6  # of mallopt(3)
_TCP_REPEATS_S = 924.6  # with 15 tries, Linux's default (ip-sysctl: tcp_retries2)


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_a_peer_that_never_answers_a_connect_holds_nobody_up() -> None:
    # In a process of its own: what waits inside NIXL cannot be stopped.
    assert _said_by(_read_from_nobody) is False


def _said_by(target: Callable[..., None], *args: object) -> object:
    """What a process of its own sends first."""
    with _apart(target, *args) as (_, here):
        assert here.poll(60.0), "it waits inside NIXL"
        return here.recv()


@contextmanager
def _apart(
    target: Callable[..., None], *args: object
) -> Iterator[tuple[BaseProcess, Connection[object, object]]]:
    """A process of its own, a fork of one that has imported NIXL, and the pipe that leads to it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    here, there = context.Pipe()
    process = context.Process(target=target, args=(there, *args), daemon=True)
    process.start()
    there.close()
    try:
        yield process, here
    finally:
        process.kill()
        process.join()


def _read_from_nobody(answer: Connection) -> None:
    """Post a READ from an agent whose port is a socket that answers no SYN; close; say how."""
    os.environ |= {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
    os.environ.pop("UCX_TCP_CONN_NB", None)
    mine, theirs = (np.zeros(_UNIT_BYTES * _NUM_UNITS, dtype=np.uint8) for _ in range(2))
    before = _ports()
    target = NixlAgent(f"target-{os.urandom(8).hex()}", ["UCX"])
    target.register(_region(theirs))
    (port,) = _ports() - before
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        queued = [socket.socket() for _ in range(4)]
        for each in queued:  # a queue that is full drops what comes
            each.setblocking(False)
            each.connect_ex(full.getsockname())
        metadata = target.metadata()
        assert metadata.count(port.to_bytes(2, "big")) == 1
        silent = metadata.replace(port.to_bytes(2, "big"), full.getsockname()[1].to_bytes(2, "big"))
        agent = NixlAgent(f"agent-{os.urandom(8).hex()}", ["UCX"])
        agent.register(_region(mine))
        peer = agent.add_peer(silent)
        units = np.arange(_NUM_UNITS, dtype=np.int32)
        transfer, is_done = agent.post(
            Direction.READ,
            agent.prepare(_region(mine)),
            units,
            agent.prepare(_region(theirs), peer),
            units,
        )
        if not is_done:
            is_done = agent.poll(transfer)
        agent.close()
        for each in queued:
            each.close()
        answer.send(is_done)


def _idle_times(answer: Connection) -> None:
    """Read over TCP; send after how many idle seconds the kernel asks whether a peer is there."""
    os.environ |= {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
    os.environ.pop("UCX_TCP_KEEPIDLE", None)
    memory = np.zeros(_UNIT_BYTES * _NUM_UNITS, dtype=np.uint8)
    agent, target = (NixlAgent(os.urandom(8).hex(), ["UCX"]) for _ in range(2))
    for each in (agent, target):
        each.register(_region(memory))
    transfer, is_done = agent.read_once(
        _region(memory), agent.add_peer(target.metadata()), _region(memory), _UNIT_BYTES
    )
    while not is_done:
        target.progress()
        is_done = agent.poll(transfer)
    found = []
    for descriptor in open_sockets().values():
        with socket.socket(fileno=os.dup(descriptor)) as copy:
            if is_connection(copy) and copy.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE):
                found.append(copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE))
    answer.send(found)


def _answer_reads(pipe: Connection) -> None:
    """Answer over TCP, with memory from malloc that is full of what others left, until told."""
    os.environ |= {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
    assert ctypes.CDLL(None).mallopt(_M_PERTURB, 0xFD)
    memory = np.zeros(_MANY_UNITS * _UNIT_BYTES, dtype=np.uint8)
    agent = NixlAgent(f"target-{os.urandom(8).hex()}", ["UCX"])
    agent.register(_region(memory))
    pipe.send((agent.metadata(), _region(memory)))
    while not pipe.poll():
        with suppress(AgentError):
            agent.progress()
        time.sleep(0.0005)  # as engines poll
    pipe.send("alive")


def _ask_for_much(pipe: Connection, metadata: bytes, remote: Region) -> None:
    """Post a READ of far more than sockets hold, every unit by itself, and stand still."""
    os.environ |= {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
    memory = np.zeros(_MANY_UNITS * _UNIT_BYTES, dtype=np.uint8)
    agent = NixlAgent(f"reader-{os.urandom(8).hex()}", ["UCX"])
    agent.register(_region(memory))
    peer = agent.add_peer(metadata)
    transfer, is_done = agent.read_once(_region(memory), peer, remote, _UNIT_BYTES)
    while not is_done:
        is_done = agent.poll(transfer)
    units = np.arange(_MANY_UNITS, dtype=np.int32)
    prepared = agent.prepare(_region(memory)), agent.prepare(remote, peer)
    agent.post(Direction.READ, prepared[0], units, prepared[1], units[::-1].copy())
    pipe.send("posted")
    time.sleep(60.0)  # until it is killed


def _ports() -> set[int]:
    listening = psutil.Process().net_connections()
    return {each.laddr.port for each in listening if each.status == psutil.CONN_LISTEN}


def _region(memory: npt.NDArray[np.uint8]) -> Region:
    return Region(memory.ctypes.data, _UNIT_BYTES, memory.nbytes // _UNIT_BYTES, "DRAM", 0)


@pytest.mark.slow
def test_a_connection_outlives_all_that_tcp_still_repeats_on_another() -> None:
    found = _said_by(_idle_times)
    assert isinstance(found, list)
    assert min(found) > _TCP_REPEATS_S


@pytest.mark.slow
def test_who_answers_a_read_over_tcp_outlives_a_reader_that_is_killed() -> None:
    with _apart(_answer_reads) as (_, answers):
        metadata_and_region = answers.recv()
        assert isinstance(metadata_and_region, tuple)
        for _ in range(2):
            with _apart(_ask_for_much, *metadata_and_region) as (reader, says):
                assert says.poll(60.0)
                assert says.recv() == "posted"
                time.sleep(0.2)  # until answers wait for room
                reader.kill()
                reader.join()
        time.sleep(0.2)  # for what the second one's end brings about
        answers.send("enough")
        assert answers.recv() == "alive"


def test_a_peer_whose_agent_has_no_readable_name_is_refused_as_a_value() -> None:
    memory = np.zeros(_UNIT_BYTES * _NUM_UNITS, dtype=np.uint8)
    agent, target = (NixlAgent(f"{name}-{os.urandom(8).hex()}", ["UCX"]) for name in ("a", "name"))
    target.register(_region(memory))
    for _ in range(2):  # it is not kept
        with pytest.raises(AgentError, match="no name in UTF-8"):
            agent.add_peer(target.metadata().replace(b"name-", b"\xffame-"))
    assert agent.add_peer(target.metadata()).startswith("name-")
    agent.close()
    target.close()


def test_a_backend_that_reaches_storage_alone_is_a_wrong_setting() -> None:
    with pytest.raises(ConfigError, match=r"backends contains 'POSIX', which reaches storage"):
        NixlAgent("stores", ["POSIX"])


@pytest.mark.slow
def test_a_backend_whose_plugin_cannot_be_loaded_is_a_wrong_setting(tmp_path: Path) -> None:
    (tmp_path / "libplugin_ODD.so").write_text("not a library")
    assert "--kv-transfer-config.nixl.backends contains 'ODD'" in str(_said_by(_load_odd, tmp_path))


def _load_odd(answer: Connection, plugins: Path) -> None:
    # NIXL looks for plugins once in a process.
    os.environ["NIXL_PLUGIN_DIR"] = str(plugins)
    try:
        NixlAgent("odd", ["ODD"])
    except ConfigError as error:
        answer.send(error.message)
