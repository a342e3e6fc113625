"""Sockets of an engine's processes: another user of the machine is not heard, nor told."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import zmq

from pdserve.config.schema import EngineConfig, ModelConfig
from pdserve.engine.zmq_client import launch_engine
from tests.engine.test_coordinator import running, stats

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")

STRANGER = """
import os, sys, zmq
os.setgid(65534)
os.setuid(65534)
context = zmq.Context()
sockets = []
for address in sys.argv[1:]:
    for kind in (zmq.PUSH, zmq.PULL):
        socket = context.socket(kind)
        socket.linger = 0
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
    """A process of another user that connects to addresses, says things and listens."""

    def __init__(self, *addresses: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", STRANGER, *addresses], stdout=subprocess.PIPE
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"here\n"

    def heard(self) -> bytes:
        """End it; what it heard."""
        self.process.kill()
        return self.process.communicate()[0]


def test_a_stranger_cannot_speak_to_the_coordinator() -> None:
    with running(1) as rig:
        link = rig.join()
        rig.next_counts()
        stranger = Stranger(rig.addresses.messages)
        link.tell(stats(num_running=1), num_taken=1)
        assert rig.next_counts()[0].num_running == 1
        with pytest.raises(subprocess.TimeoutExpired):
            rig.process.wait(0.3)
        stranger.heard()


async def test_a_stranger_cannot_speak_for_a_core_nor_take_its_requests(tmp_path: Path) -> None:
    config = EngineConfig(model=ModelConfig(model=str(tmp_path)))
    client = await launch_engine(config, progress=lambda text: None)
    sockets = (client._inputs, client._outputs)
    stranger = Stranger(*(socket.get_string(zmq.LAST_ENDPOINT) for socket in sockets))
    for _ in range(20):
        await client.release_lease("secret")
        await asyncio.sleep(0.01)
    heard = stranger.heard()
    await client.close(timeout_s=0)
    assert heard == b""
    assert "cannot be read" not in (client.dead_reason or "")
