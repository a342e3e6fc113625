"""Runs a function on real ranks: one process each, in a world of their own.

The ranks of a call are forked from a zygote, a process of one thread that has imported torch
and the module of the function, so that a call costs a fork and a join, not an import. Nothing
is shared between calls. The zygote ends with the pytest process, however that ends, and takes
its ranks along.

    def _sum(world: World, value: float) -> Tensor:
        return world.tp.all_reduce(torch.full((2,), value))

    def test_two_ranks_sum() -> None:
        first, second = run_ranks(MeshShape(tp=2), _sum, 1.5)

The function must be at the top level of an importable module; arguments and results are pickled.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import msgspec

from pdserve.parallel.mesh import Mesh, MeshShape
from pdserve.parallel.rendezvous import Rendezvous, listen

_ROOT = Path(__file__).resolve().parent.parent
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_MAX_MESSAGE = 1 << 20


class RankError(Exception):
    """A rank raised, died or did not finish; the message has its traceback and what it printed.

    Its cause is the rank's own exception, where it could be pickled.
    """


def run_ranks(
    shape: MeshShape,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = 200.0,
    may_die: Collection[int] = (),
    use_shared_memory: bool = True,
) -> list[Any]:
    """Call `fn(world, *args)` on every rank of a fresh world.

    Args:
        use_shared_memory: False: the ranks meet through gloo, as if on several hosts.
        may_die: Ranks that may be killed; their result is None then.

    Returns:
        What each rank returned, by rank.

    Raises:
        RankError: A rank raised, died or took more than `timeout_s`. All have ended by then.
    """
    num_ranks = shape.world_size
    pairs = [socket.socketpair() for _ in range(num_ranks)]
    outputs = [os.memfd_create("rank-output") for _ in range(num_ranks)]
    listener, rendezvous = listen("127.0.0.1")
    task = pickle.dumps((fn, args))
    try:
        pids = _zygote().fork(
            (fn.__module__, shape, rendezvous, use_shared_memory, len(task)),
            [*(theirs.fileno() for _, theirs in pairs), *outputs, listener.fileno()],
        )
        for _, theirs in pairs:
            theirs.close()
        listener.close()
        statuses: list[int] = []
        try:
            replies = _collect([ours for ours, _ in pairs], task, pids, timeout_s, may_die)
        finally:
            for pid in pids:  # not reaped before `reap`, so the ids are still theirs
                os.kill(pid, signal.SIGKILL)
            statuses = _zygote().reap(pids)
        return _results(replies, statuses, outputs, may_die)
    finally:
        listener.close()
        for pair in pairs:
            for side in pair:
                side.close()
        for output in outputs:
            os.close(output)


class _Ok(msgspec.Struct):
    value: Any


class _Raised(msgspec.Struct):
    trace: str
    cause: Exception | None


class _TooLate(msgspec.Struct):
    timeout_s: float


_Reply = _Ok | _Raised | _TooLate | None


def _collect(
    sockets: list[socket.socket],
    task: bytes,
    pids: list[int],
    timeout_s: float,
    may_die: Collection[int],
) -> list[_Reply]:
    """Each rank's reply; None: it ended without one, or others failed first."""
    replies: list[_Reply] = [None] * len(sockets)
    parts: list[list[bytes]] = [[] for _ in sockets]
    deadline = time.monotonic() + timeout_s
    has_failed = False
    with selectors.DefaultSelector() as selector:
        for rank, sock in enumerate(sockets):
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                sock.sendall(task)
            selector.register(sock, selectors.EVENT_READ, rank)
        while selector.get_map():
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for key, _ in ready:
                rank = key.data
                try:
                    part = sockets[rank].recv(_MAX_MESSAGE)
                except ConnectionResetError:
                    part = b""
                if part:
                    parts[rank].append(part)
                    continue
                selector.unregister(sockets[rank])
                if parts[rank]:
                    replies[rank] = pickle.loads(b"".join(parts[rank]))
                if not isinstance(replies[rank], _Ok) and rank not in may_die and not has_failed:
                    has_failed = True
                    # The others may be about to say the same in their own words.
                    deadline = min(deadline, time.monotonic() + 1.0)
        late = [key.data for key in selector.get_map().values()]
    if late and not has_failed:
        for rank in late:
            replies[rank] = _TooLate(timeout_s)
            os.kill(pids[rank], signal.SIGUSR1)  # faulthandler writes where it is
        time.sleep(1.0)  # for the stacks: the caller kills what has not ended
    return replies


def _results(
    replies: list[_Reply], statuses: list[int], outputs: list[int], may_die: Collection[int]
) -> list[Any]:
    told: list[str] = []
    cause: Exception | None = None
    for rank, (reply, status, output) in enumerate(zip(replies, statuses, outputs, strict=True)):
        printed = os.pread(output, _MAX_MESSAGE, 0).decode(errors="replace").strip()
        if printed:
            printed = f"\nrank {rank} printed:\n{printed}"
        match reply:
            case _Ok():
                pass
            case _Raised(trace, raised):
                told.append(f"rank {rank} raised:\n{trace}{printed}")
                cause = cause or raised
            case _TooLate(timeout_s):
                told.append(f"rank {rank} did not finish in {timeout_s} s{printed}")
            case None if rank not in may_die:
                code = os.waitstatus_to_exitcode(status)
                told.append(f"rank {rank} ended with {code} and no result{printed}")
    if told:
        raise RankError("\n".join(told)) from cause
    return [reply.value if isinstance(reply, _Ok) else None for reply in replies]


class _Zygote:
    """The process that ranks are forked from."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", f"import tests.ranks as r; r.serve({theirs.fileno()})"],
                cwd=_ROOT,
                env=os.environ | _ONE_THREAD | {"PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        atexit.register(self.close)

    def fork(self, order: object, fds: list[int]) -> list[int]:
        """Fork a rank per socket in `fds`; their process ids."""
        with self._lock:
            socket.send_fds(self._socket, [pickle.dumps(("fork", order))], fds)
            pids: list[int] | str = self._answer()
        if isinstance(pids, str):
            raise RankError(f"the ranks could not be started:\n{pids}")
        return pids

    def reap(self, pids: list[int]) -> list[int]:
        """Wait for processes that have ended; their wait statuses."""
        with self._lock:
            self._socket.send(pickle.dumps(("reap", pids)))
            statuses: list[int] = self._answer()
        return statuses

    def close(self) -> None:
        """End it, and with it all its ranks."""
        self._socket.close()
        self.process.wait()

    def _answer(self) -> Any:
        answer = self._socket.recv(_MAX_MESSAGE)
        if not answer:
            raise RankError("the zygote has ended")
        return pickle.loads(answer)


_running: _Zygote | None = None
_starting = threading.Lock()


def _zygote() -> _Zygote:
    global _running
    with _starting:
        if _running is None or _running.process.poll() is not None:
            _running = _Zygote()
        return _running


def never_compare_dtensors() -> None:
    """Spare this process the 500 modules, sympy's among them, that the first comparison imports."""
    import torch

    torch.testing._comparison._HAS_DTENSOR = False


def serve(control_fd: int) -> None:
    """The zygote's loop."""
    import torch

    import pdserve.parallel.group  # noqa: F401  imported here once, for all ranks
    from pdserve.kernels.cpu import build

    torch.set_num_threads(1)
    never_compare_dtensors()
    with contextlib.suppress(build.BuildError):
        build.library()  # seconds, once per version of the kernels; else in the first ranks' time
    control = socket.socket(fileno=control_fd)
    children: set[int] = set()
    try:
        while True:
            message, fds, _, _ = socket.recv_fds(control, _MAX_MESSAGE, 64)
            if not message:
                return
            kind, order = pickle.loads(message)
            if kind == "fork":
                answer = _fork_ranks(order, fds, control)
                if isinstance(answer, list):
                    children.update(answer)
            else:
                answer = [os.waitpid(pid, 0)[1] for pid in order]
                children.difference_update(order)
            with contextlib.suppress(BrokenPipeError):
                control.send(pickle.dumps(answer))
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        for pid in children:
            os.waitpid(pid, 0)


def _fork_ranks(order: Any, fds: list[int], control: socket.socket) -> list[int] | str:
    module, shape, rendezvous, use_shared_memory, task_bytes = order
    try:
        importlib.import_module(module)
    except Exception:
        for fd in fds:
            os.close(fd)
        return traceback.format_exc()
    parent = os.getpid()
    pids: list[int] = []
    for rank in range(shape.world_size):
        pid = os.fork()
        if pid == 0:
            try:
                control.close()
                _be_rank(Mesh(shape, rank), rendezvous, use_shared_memory, task_bytes, fds, parent)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        pids.append(pid)
    for fd in fds:
        os.close(fd)
    return pids


def _be_rank(
    mesh: Mesh,
    place: Rendezvous,
    use_shared_memory: bool,
    task_bytes: int,
    fds: list[int],
    parent: int,
) -> None:
    import torch

    from pdserve.lifeline import end_with_parent
    from pdserve.parallel.group import join

    end_with_parent(parent)
    rank = mesh.rank
    output, listen_fd = fds[mesh.shape.world_size + rank], fds[-1]
    os.dup2(output, 1)
    os.dup2(output, 2)
    reply_to = socket.socket(fileno=fds[rank])
    for index, fd in enumerate(fds):
        if index != rank and not (fd == listen_fd and rank == 0):
            os.close(fd)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    reply: _Ok | _Raised
    try:
        parts = bytearray()
        while len(parts) < task_bytes:
            parts += reply_to.recv(task_bytes - len(parts))
        fn, args = pickle.loads(parts)
        place = msgspec.structs.replace(place, listen_fd=listen_fd if rank == 0 else None)
        device = torch.device("cpu")
        world = join(mesh, place, device, use_shared_memory=use_shared_memory)
        value = fn(world, *args)
        world.close()
        reply = _Ok(value)
        data = pickle.dumps(reply)
    except Exception as error:
        trace = traceback.format_exc()
        try:
            data = pickle.dumps(_Raised(trace, error))
            pickle.loads(data)
        except Exception:
            data = pickle.dumps(_Raised(trace, None))
    sys.stdout.flush()
    sys.stderr.flush()
    reply_to.sendall(data)
