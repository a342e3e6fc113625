"""Ranks as processes of this machine, behind shared-memory rings.

The engine core plans the next step while the ranks run this one. It needs no torch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import msgspec

from pdserve.errors import InternalError
from pdserve.executor.channel import SPIN_S
from pdserve.executor.messages import WORKER, Launch
from pdserve.executor.ranked import RankedExecutor
from pdserve.executor.rings import RingEnds, RingHub
from pdserve.observe.liveness import NUM_LOOKS, ProcessWatch, how_it_ended
from pdserve.observe.log import log_config
from pdserve.parallel.place import rank_places
from pdserve.parallel.rendezvous import listen

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from pdserve.config.schema import EngineConfig
    from pdserve.executor.channel import Waiter
    from pdserve.parallel.place import CorePlace
    from pdserve.wire.ids import EngineId, Incarnation

_log = logging.getLogger(__name__)

_POST_BYTES = 64 << 10
_LOOPBACK = "127.0.0.1"
_KILL_TIMEOUT_S = 5.0


class MultiprocessExecutor(RankedExecutor):
    """See `Executor`.

    Args:
        core: Place of this engine core; its rendezvous, if it has one, must have been
            inherited if rank 0 of the world is among its ranks.
        worker: As in `Launch`.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        core: CorePlace,
        engine_id: EngineId,
        incarnation: Incarnation,
        progress: Callable[[str], None],
        worker: str = WORKER,
    ) -> None:
        parallel = config.parallel
        num_ranks = parallel.num_ranks
        rendezvous, listener = core.rendezvous, None
        if rendezvous is None and core.num_cores > 1:
            raise InternalError(f"core {core.index} of {core.num_cores} has no rendezvous")
        if rendezvous is None and num_ranks > 1:
            listener, rendezvous = listen(_LOOPBACK)
        places = rank_places(parallel, core, rendezvous)
        hub = RingHub(num_ranks)
        posts = RingHub(num_ranks, step_bytes=_POST_BYTES, reply_bytes=_POST_BYTES)
        launches = [
            Launch(
                parent_pid=os.getpid(),
                log=log_config(),
                config=config,
                place=place,
                engine_id=engine_id,
                incarnation=incarnation,
                ends=hub.ends(place.engine_rank, spin_s=SPIN_S),
                post_ends=posts.ends(place.engine_rank, spin_s=0.0),
                worker=worker,
            )
            for place in places
        ]
        self._processes = RankProcesses(launches, listener)
        super().__init__(
            hub,
            posts,
            self._processes,
            places=places,
            max_in_flight=max(2, parallel.pipeline_parallel_size),
            look_s=config.liveness.heartbeat_timeout_s / NUM_LOOKS,
            progress=progress,
        )

    @property
    def pids(self) -> list[int]:
        """The ranks' process ids, once started."""
        return self._processes.pids


class RankProcesses:
    """See `Ranks`: children of this process, which end with it.

    Args:
        listener: The socket behind the rendezvous, if this process bound it: rank 0 inherits
            it, and it is closed here.
    """

    def __init__(self, launches: list[Launch], listener: socket.socket | None = None) -> None:
        self._launches = launches
        self._listener = listener
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pid_fds: list[int] = []
        self._watches: list[ProcessWatch] = []

    @property
    def pids(self) -> list[int]:
        """Process ids in rank order."""
        return [process.pid for process in self._processes]

    def start(self) -> None:
        """See `Ranks`."""
        for launch in self._launches:
            process = subprocess.Popen(
                [sys.executable, "-m", "pdserve.executor.rank"],
                stdin=subprocess.PIPE,
                pass_fds=_inherited(launch),
            )
            self._processes.append(process)
            self._pid_fds.append(os.pidfd_open(process.pid))
            self._watches.append(ProcessWatch(process.pid))
        self._close_listener()
        # Interpreters start in parallel; only then do they get their start messages.
        for process, launch in zip(self._processes, self._launches, strict=True):
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended, and that is noticed
                process.stdin.write(msgspec.msgpack.encode(launch))
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()

    def wake_on(self, waiter: Waiter) -> None:
        """See `Ranks`."""
        for pid_fd in self._pid_fds:
            waiter.watch(pid_fd)

    def ended(self) -> dict[int, str]:
        """See `Ranks`."""
        return {
            rank: _how(process)
            for rank, process in enumerate(self._processes)
            if process.poll() is not None
        }

    def look(self) -> dict[int, str]:
        """See `Ranks`. One that is asleep may wait for steps, or for another rank."""
        for watch in self._watches:
            watch.look()
        return {
            rank: f"pid {self._processes[rank].pid} was stopped for longer than --heartbeat-timeout"
            for rank, watch in enumerate(self._watches)
            if watch.num_stopped >= NUM_LOOKS
        }

    def kill(self) -> None:
        """See `Ranks`."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()

    def close(self) -> None:
        """See `Ranks`."""
        for rank, process in enumerate(self._processes):
            try:
                process.wait(_KILL_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                _log.error("rank %d (pid %d) cannot be killed", rank, process.pid)
        self._close_listener()
        for pid_fd in self._pid_fds:
            os.close(pid_fd)

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()


def _inherited(launch: Launch) -> list[int]:
    fds = [
        fd
        for ends in (launch.ends, launch.post_ends)
        if isinstance(ends, RingEnds)
        for fd in ends.fds
    ]
    rendezvous = launch.place.rendezvous
    if rendezvous is not None and rendezvous.listen_fd is not None:
        fds.append(rendezvous.listen_fd)
    return fds


def _how(process: subprocess.Popen[bytes]) -> str:
    return f"pid {process.pid} {how_it_ended(process.returncode)}"
