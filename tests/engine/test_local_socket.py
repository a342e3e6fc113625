"""Sockets of an engine's processes: nobody else is heard there, nor told, whoever it runs as."""

from __future__ import annotations

import subprocess
import sys

import pytest
import zmq

from pdserve.engine.local_socket import LocalKeys, bind_local, connect_local, local_name
from tests.engine.test_coordinator import running, stats

KINDS = ["plain", "with a key of its own"]

STRANGER = """
import sys, zmq
has_key = sys.argv.pop(1) != "plain"
context = zmq.Context()
sockets = []
for address in sys.argv[1:]:
    for kind in (zmq.PUSH, zmq.PULL):
        socket = context.socket(kind)
        socket.linger = 0
        if has_key:
            socket.curve_serverkey, _ = zmq.curve_keypair()
            socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.connect(address)
        sockets.append(socket)
print("here", flush=True)
while True:
    for socket in sockets:
        if socket.type == zmq.PUSH:
            try:
                socket.send(b"garbage", zmq.NOBLOCK)
            except zmq.Again:
                pass
        elif socket.poll(20):
            print("heard", socket.recv(), flush=True)
"""


class Stranger:
    """A process of the same user that connects to addresses, says things and listens."""

    def __init__(self, kind: str, *addresses: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", STRANGER, kind, *addresses], stdout=subprocess.PIPE
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"here\n"

    def heard(self) -> bytes:
        """End it; what it heard."""
        self.process.kill()
        return self.process.communicate()[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_stranger_cannot_speak_to_the_coordinator(kind: str) -> None:
    with running(1) as rig:
        link = rig.join()
        rig.next_counts()
        stranger = Stranger(kind, rig.addresses.messages)
        link.tell(stats(num_running=1), num_taken=1)
        assert rig.next_counts()[0].num_running == 1
        with pytest.raises(subprocess.TimeoutExpired):
            rig.process.wait(0.3)
        stranger.heard()


def test_only_who_was_told_the_key_is_heard_and_told() -> None:
    keys, name = LocalKeys.make(), local_name()
    context = zmq.Context()
    inputs, outputs = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    bind_local(inputs, f"{name}-in", keys)
    bind_local(outputs, f"{name}-out", keys)
    says, hears = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    connect_local(says, f"{name}-in", keys.public)
    connect_local(hears, f"{name}-out", keys.public)
    says.send(b"a prompt")
    assert inputs.poll(30_000)
    assert inputs.recv() == b"a prompt"
    outputs.send(b"a token")
    assert hears.poll(30_000)
    assert hears.recv() == b"a token"
    context.destroy(linger=0)


def test_who_listens_without_the_secret_key_is_told_nothing() -> None:
    """Somebody else may have taken the address; what is said is for the holder of the key."""
    name, context = local_name(), zmq.Context()
    impostor, says = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    bind_local(impostor, name, LocalKeys.make())
    connect_local(says, name, LocalKeys.make().public)
    says.send(b"a prompt")
    assert not impostor.poll(300)
    context.destroy(linger=0)
