from __future__ import annotations

from tests.python import run_python

_PROGRAM = """
import asyncio, os, signal
from pdserve.http.stopping import StopSignals

async def serve():
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        await stop.asked.wait()
    asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGINT)

asyncio.run(serve())
print("ended")
"""


def test_one_more_signal_amid_the_end_of_a_server_raises_nothing() -> None:
    done = run_python("-c", _PROGRAM, is_to_succeed=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended\n", "")
