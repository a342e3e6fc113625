"""What the threads of one rank share: the server's client, whether it is there, what was done."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

import msgspec

from pdserve.connectors.lmcache.messages import RankProgress
from pdserve.observe.log import log_event
from pdserve.wire.request import KVStoreStats
from pdserve.wire.transfer import ConnectorReport, LeaseEnd, Settled

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.connectors.lmcache.client import StoreClient
    from pdserve.connectors.lmcache.messages import SaveBarrier, StoreNews
    from pdserve.connectors.lmcache.slots import ChunkMemory

_log = logging.getLogger(__name__)


class StoreLink:
    """The state of a rank's connection, and its news. Thread-safe.

    Args:
        make_memory: From the tokens of a chunk.
        wake: Called when `take_report` has something.

    Attributes:
        memory: Once the server was there.
        is_up: The server answered last; whoever finds that it does not says so by `lost`.
        was_lost: Set by `lost`; for the thread that looks after the server.
    """

    def __init__(
        self,
        client: StoreClient,
        make_memory: Callable[[int], ChunkMemory],
        *,
        rank: int,
        wake: Callable[[], None],
    ) -> None:
        self.client = client
        self.memory: ChunkMemory | None = None
        self.is_up = False
        self._make_memory = make_memory
        self.was_lost = threading.Event()
        self._rank = rank
        self._wake = wake
        self._lock = threading.Lock()
        self._stats = KVStoreStats()
        self._saved_up_to = self._told_up_to = 0
        self._news: list[bytes] = []
        self._settled: list[Settled] = []

    def found(self) -> None:
        """The server answers, and knows us."""
        if self.memory is None:
            self.memory = self._make_memory(self.client.chunk_tokens)
        self.is_up = True
        self.was_lost.clear()

    def lost(self, error: Exception) -> None:
        """The server does not answer: it is asked for nothing until it is back."""
        with self._lock:
            was_up, self.is_up = self.is_up, False
        if was_up:
            what = "the KV store is gone: prompts are computed, and nothing is saved"
            log_event(_log, what, level=logging.WARNING, why=str(error))
            self.was_lost.set()

    def count(self, **added: float) -> None:
        """Add to counters of `KVStoreStats`, by name."""
        with self._lock:
            for name, value in added.items():
                setattr(self._stats, name, getattr(self._stats, name) + value)

    def tell(self, news: StoreNews) -> None:
        """Report something to the scheduler half."""
        with self._lock:
            self._news.append(msgspec.msgpack.encode(news))
        self._wake()

    def saved(self, session: int) -> None:
        """All saves up to this session are over."""
        with self._lock:
            self._saved_up_to = session
        self._wake()

    def settle(self, barrier: SaveBarrier) -> None:
        """All saves that a hold waits for are over."""
        settled = Settled(request_id=barrier.request_id, end=LeaseEnd.READ, nonce=barrier.hold_id)
        with self._lock:
            self._settled.append(settled)
        self._wake()

    def take_report(self) -> ConnectorReport:
        """What happened since the last call."""
        with self._lock:
            payloads, self._news = self._news, []
            settled, self._settled = self._settled, []
            if self._saved_up_to > self._told_up_to or self._stats != KVStoreStats():
                stats, self._stats = self._stats, KVStoreStats()
                self._told_up_to = self._saved_up_to
                progress = RankProgress(self._rank, self._saved_up_to, stats)
                payloads.append(msgspec.msgpack.encode(progress))
        return ConnectorReport(payloads=payloads, settled=settled)
