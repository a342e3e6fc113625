"""Held locks: how `pdserve kv-server` gives back what a killed engine had locked.

LMCache counts the read locks of a chunk without their owners. Those of an engine that is killed
would last until they expire, for five minutes. So each rank connects to a socket beside the
server's memory, and says which lookups hold locks. The kernel closes the connection when the
process ends, however it ends; then the server gives back what the open lookups hold, and what the
rank was loading and saving. A rank that is only stopped keeps its connection, and its locks. In the
same way, a rank sees at once that the server's process has ended.

A rank says that a lookup is over before it gives its locks back, or loads. If it is killed just
then, these expire: giving back twice would take another engine's lock.
"""

from __future__ import annotations

import dataclasses
import logging
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

_log = logging.getLogger(__name__)

_MESSAGE_BYTES: Final = 4096
_RANK: Final = b"rank "
_OPEN, _PART, _OVER, _END = b"+", b"<", b"-", b"end"
_LOOK_S: Final = 0.05
_SETTLE_S: Final = 1.0
"""Time in which the server usually works off what a rank sent before its end; then all is over that
it said to be over, and only then is it known what is left."""
_UNDERWAY_S: Final = 10.0
"""Time that a lookup may take until the server takes it up."""
_PREFETCH_S: Final = 60.0


class HeldLocks:
    """A rank's end; never blocks, and learns and says nothing without a socket. Thread-safe.

    Args:
        instance_id: Under which the rank registers.
    """

    def __init__(self, instance_id: int) -> None:
        self._instance_id = instance_id
        self._segment: Path | None = None
        self._socket: socket.socket | None = None
        self._unsent: deque[bytes] = deque()
        self._lock = threading.Lock()

    def connect(self, segment: Path) -> None:
        """Connect to the server with this memory, unless that is done."""
        if segment == self._segment:
            return
        self.close()
        self._segment, rank = segment, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            rank.connect(_beside(segment))
        except OSError:
            rank.close()
            return
        rank.setblocking(False)
        self._socket = rank
        self._say(_RANK + str(self._instance_id).encode())

    def opened(self, session: str) -> None:
        """Say that a lookup may hold locks from now on."""
        self._say(_OPEN + session.encode())

    def over_before(self, chunk: int, session: str) -> None:
        """Say that the chunks before this one are not locked any more."""
        self._say(_PART + f"{chunk} {session}".encode())

    def over(self, session: str) -> None:
        """Say that it holds none any more, or that they are a load's."""
        self._say(_OVER + session.encode())

    def is_cut(self) -> bool:
        """Whether the server's process has ended since this was asked or connected."""
        with self._lock:
            if self._socket is None:
                return False
            try:
                is_cut = not self._socket.recv(1)
            except BlockingIOError:
                return False
            except OSError:
                is_cut = True
            if is_cut:
                self._drop()
            return is_cut

    def close(self) -> None:
        """Leave in order: the rank itself has given back what it had locked."""
        self._say(_END)
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._segment = self._socket = None
        self._unsent.clear()

    def _say(self, message: bytes) -> None:
        """Send what is unsent; a server that is stopped takes only some until it goes on."""
        with self._lock, suppress(OSError):
            if self._socket is None:
                return
            self._unsent.append(message)
            while self._unsent:
                self._socket.send(self._unsent[0])
                self._unsent.popleft()


def build_server_modules(build: Any) -> HeldLocksModule:
    """Make the module of LMCache's server that `--server-module` names.

    Args:
        build: LMCache's `ExtServerModuleBuildContext`, with the path of the server's memory as
            `segment` of its `config`.
    """
    named = {type(each).__name__: each for each in build.modules}
    lookups, transfers = named["LookupModule"], named["EngineDrivenTransferModule"]
    return HeldLocksModule(build.server_context, lookups, transfers, Path(build.config["segment"]))


class HeldLocksModule:
    """The server's end.

    Args:
        context: LMCache's, with the sessions of lookups.
        lookups, transfers: LMCache's modules, called as by the messages of a rank.
    """

    def __init__(self, context: Any, lookups: Any, transfers: Any, segment: Path) -> None:
        self.context = context
        self._lookups = lookups
        self._transfers = transfers
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(_beside(segment))
        Path(_beside(segment)).chmod(0o600)
        self._listener.listen()
        threading.Thread(target=self._accept, name="held-locks", daemon=True).start()

    def report_status(self) -> dict[str, Any]:
        """Nothing that the others' do not say."""
        return {}

    def close(self) -> None:
        """Take no more ranks."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                rank, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._follow, args=(rank,), daemon=True).start()

    def _follow(self, rank: socket.socket) -> None:
        """Note what a rank says, until its process ends."""
        instance_id, sessions = None, dict[str, int]()  # the first chunk that is locked
        with rank:
            while message := _received(rank):
                if message == _END:
                    return
                if message.startswith(_RANK):
                    instance_id = int(message.removeprefix(_RANK))
                elif message.startswith(_OPEN):
                    sessions[message[1:].decode()] = 0
                elif message.startswith(_PART):
                    chunk, _, name = message[1:].decode().partition(" ")
                    if name in sessions:  # else its load, in another thread, came first
                        sessions[name] = int(chunk)
                else:
                    sessions.pop(message[1:].decode(), None)
        if instance_id is None:
            return
        _log.warning("an engine was killed: the locks of %d lookups are given back", len(sessions))
        time.sleep(_SETTLE_S)
        self._transfers.unregister_kv_cache(instance_id)
        deadline_s = time.monotonic() + _UNDERWAY_S
        while sessions and time.monotonic() < deadline_s:
            for name, first in list(sessions.items()):
                if self._has_given_back(name, first):
                    del sessions[name]
            time.sleep(_LOOK_S)

    def _has_given_back(self, name: str, first: int) -> bool:
        """Give back a lookup's locks from a chunk on; False: it is underway, if it was sent."""
        session = self.context.session_manager.get(name)
        if session is None or session.lookup_ipc_key is None:
            return False
        if session.prefetch_hit_chunks < 0:  # nobody has asked for the result yet
            self._lookups.wait_prefetch_status(name, _PREFETCH_S)
        if session.prefetch_hit_chunks < 0:
            return False
        start = first * self.context.chunk_size
        self._lookups.free_lookup_locks(dataclasses.replace(session.lookup_ipc_key, start=start), 1)
        self._lookups.end_session(name)
        return True


def _beside(segment: Path) -> str:
    return f"{segment}.locks"


def _received(rank: socket.socket) -> bytes:
    try:
        return rank.recv(_MESSAGE_BYTES)
    except ConnectionError:
        return b""
