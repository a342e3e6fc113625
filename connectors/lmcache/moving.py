"""Two threads per rank that move chunks between its blocks and the store, beside steps.

`LoadingThread` loads layers while the step waits for each, `SavingThread` saves computed chunks.
They share a `StoreLink` with the thread that watches the server (`watch`).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from pdserve.connectors.lmcache.client import StoreGoneError, StoreMissError
from pdserve.connectors.lmcache.messages import ChunkSave, LoadDone, LoadUnlocked, RankProgress
from pdserve.connectors.lmcache.slots import Slots
from pdserve.observe.log import log_event
from pdserve.wire.request import KVStoreStats
from pdserve.wire.transfer import ConnectorReport, Failed, LeaseEnd, LoadFailure, Settled

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.connectors.lmcache.client import StoreClient
    from pdserve.connectors.lmcache.messages import ChunkLoad, SaveBarrier, StoreNews
    from pdserve.connectors.lmcache.slots import ChunkMemory, StoreLayout

_log = logging.getLogger(__name__)

_GIVE_WAY_S = 0.05
_UNLOCK_S = 0.1
"""Time that the server has to answer that chunks are unlocked, so that no later load waits long."""


class StoreLink:
    """The connection and news that the threads of a rank share. Thread-safe.

    Args:
        make_memory: Makes `memory`, given the tokens per chunk.
        wake: Called when `take_report` has something.

    Attributes:
        memory: None until the server was first reached.
        is_up: Whether the server answered last; a thread that gets no answer calls `lost`.
        was_lost: Set by `lost`, for the thread that watches the server.
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
        """Note that the server answers and has registered this rank."""
        if self.memory is None:
            self.memory = self._make_memory(self.client.chunk_tokens)
        self.is_up = True
        self.was_lost.clear()

    def lost(self, error: Exception) -> None:
        """Note that the server does not answer; it gets no requests until it is back."""
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
        """Note that all saves up to this session are over."""
        with self._lock:
            self._saved_up_to = session
        self._wake()

    def settle(self, barrier: SaveBarrier) -> None:
        """Report a hold whose saves are all over as settled."""
        settled = Settled(request_id=barrier.request_id, end=LeaseEnd.READ, nonce=barrier.hold_id)
        with self._lock:
            self._settled.append(settled)
        self._wake()

    def take_report(self) -> ConnectorReport:
        """Return what has happened since the last call."""
        with self._lock:
            payloads, self._news = self._news, []
            settled, self._settled = self._settled, []
            if self._saved_up_to > self._told_up_to or self._stats != KVStoreStats():
                stats, self._stats = self._stats, KVStoreStats()
                self._told_up_to = self._saved_up_to
                progress = RankProgress(self._rank, self._saved_up_to, stats)
                payloads.append(msgspec.msgpack.encode(progress))
        return ConnectorReport(payloads=payloads, settled=settled)


class LayerwiseLoad:
    """One load: the loading thread copies layer by layer, the step's thread waits for each.

    Attributes:
        copying: Lock held while blocks are written; a thread that holds it may cancel.
        is_cancelled: Whether nothing more may be written.
        num_chunks: Number of leading chunks of the prompt that are valid so far.
        reason: Why the others are not.
        unlocking: The server's answers once its chunks are unlocked.
    """

    def __init__(self, load: ChunkLoad, num_layers: int) -> None:
        self.load = load
        self.copying = threading.Lock()
        self.is_cancelled = False
        self.num_chunks = load.chunks.end
        self.reason = LoadFailure.TIMEOUT
        self.num_bytes = 0
        self.unlocking: list[Any] = []
        self._num_layers = num_layers
        self._layers_done = 0
        self._changed = threading.Condition()

    def layers_are_done(self, num_layers: int) -> None:
        """Note that the first `num_layers` layers may be read."""
        with self._changed:
            self._layers_done = num_layers
            self._changed.notify_all()

    def keep(self, num_chunks: int, reason: LoadFailure) -> None:
        """Note that only the first `num_chunks` chunks are valid."""
        if not self.is_cancelled:
            self.num_chunks, self.reason = num_chunks, reason

    def over(self) -> None:
        """End the load; nothing waits for it any more."""
        self.layers_are_done(self._num_layers)

    def wait_for(self, layer: int, timeout_s: float) -> None:
        """Return once a layer may be read, or will not arrive; cancel after `timeout_s`."""
        if self._layers_done > layer:
            return
        with self._changed:
            if self._changed.wait_for(lambda: self._layers_done > layer, timeout_s):
                return
        self.cancel()

    def cancel(self) -> None:
        """Cancel the load, unless it is over; on return nothing writes to the blocks."""
        with self.copying:
            if self._layers_done < self._num_layers:
                self.keep(self.load.chunks.first, LoadFailure.TIMEOUT)
                self.is_cancelled = True
        self.over()

    def outcome(self, chunk_tokens: int) -> Failed | None:
        """Return the failure of a load that is over; None if there is none."""
        chunks = self.load.chunks
        if self.num_chunks == chunks.end:
            return None
        return Failed(
            request_id=chunks.request_id,
            reason=self.reason,
            detail=f"of the store's chunks {chunks.first} to {chunks.end} (without the last) the "
            f"first bad one is {self.num_chunks}",
            num_valid_tokens=max(self.load.first_token, self.num_chunks * chunk_tokens),
        )


class LoadingThread(threading.Thread):
    """Copies chunks from the store into blocks, layer by layer, beside a step.

    Args:
        checks_digests: False only in tests that show what the digests are for.

    Attributes:
        is_idle: Set while there is nothing to load, so that saves may use the memory bandwidth.
    """

    def __init__(self, link: StoreLink, layout: StoreLayout, *, checks_digests: bool) -> None:
        super().__init__(name="lmcache-load", daemon=True)
        self._link = link
        self._layout = layout
        self._checks_digests = checks_digests
        self._inbox: queue.SimpleQueue[LayerwiseLoad | None] = queue.SimpleQueue()
        self.is_idle = threading.Event()
        self.is_idle.set()

    def put(self, job: LayerwiseLoad) -> None:
        """Queue a load."""
        self.is_idle.clear()
        self._inbox.put(job)

    def close(self) -> None:
        """End the thread, if it runs."""
        self._inbox.put(None)
        if self.ident is not None:
            self.join()

    def run(self) -> None:
        """Load until closed."""
        over: list[LayerwiseLoad] = []
        while (job := self._inbox.get()) is not None:
            began_s = time.monotonic()
            try:
                self._load(job)
            except Exception:  # noqa: BLE001 - a load that is broken has failed
                _log.exception("a load from the store is broken")
                job.cancel()
            # Reported before the step can end: what the step has computed may be void.
            self._tell(job, time.monotonic() - began_s)
            job.over()
            over.append(job)
            if self._inbox.empty():
                self.is_idle.set()
                self._tell_unlocked(over)
                over.clear()

    def _tell_unlocked(self, over: Sequence[LayerwiseLoad]) -> None:
        deadline_s = time.monotonic() + _UNLOCK_S
        for job in over:
            for answer in job.unlocking:
                answer.wait(max(0.0, deadline_s - time.monotonic()))
            self._link.tell(LoadUnlocked(job.load.chunks.session))

    def _tell(self, job: LayerwiseLoad, seconds: float) -> None:
        chunks, link = job.load.chunks, self._link
        is_whole = job.num_chunks == chunks.end
        link.count(
            num_loads=1,
            num_failed_loads=not is_whole,
            num_wrong_chunks=not is_whole and job.reason is LoadFailure.DIGEST,
            loaded_bytes=job.num_bytes,
            load_s=seconds,
        )
        link.tell(LoadDone(chunks.session, chunks.first, job.num_chunks, job.num_bytes, seconds))

    def _load(self, job: LayerwiseLoad) -> None:
        chunks, client, units = job.load.chunks, self._link.client, self._layout.units
        slots = None
        try:
            # A store that is gone is asked, too, as it may go on and has the locks then; but no
            # other load of the step waits for it.
            slots = client.locked(chunks, units, waits=self._link.is_up)
        except StoreGoneError as error:
            self._link.lost(error)
        except StoreMissError:
            pass  # its load fails as if the store were gone
        if slots is None:
            job.keep(chunks.first, LoadFailure.PEER_LOST)
            return
        try:
            self._copy(job, slots)
        finally:
            job.unlocking = client.unlock(chunks, units)

    def _copy(self, job: LayerwiseLoad, slots: Slots) -> None:
        """Copy the chunks that are valid."""
        memory, load = self._link.memory, job.load
        assert memory is not None
        chunks, size = load.chunks, memory.chunk_tokens
        with job.copying:
            there, saved = memory.check(slots, self._layout.prefixes(chunks, size))
            self._keep(job, there)
        blocks = memory.blocks_of(load.block_ids, chunks)
        blocks[0, : (load.first_token - chunks.first * size) // memory.block_size] = -1
        for layer in range(memory.num_layers):
            with job.copying:
                if job.is_cancelled:
                    return
                good = slice(job.num_chunks - chunks.first)
                part = Slots(slots.pool, slots.starts[good])
                self._keep(job, memory.load_layer(blocks[good], part, layer, saved[good]))
            if layer + 1 < memory.num_layers:
                job.layers_are_done(layer + 1)
        num_good = job.num_chunks - chunks.first
        job.num_bytes = num_good * memory.bytes_per_chunk * len(self._layout.units)

    def _keep(self, job: LayerwiseLoad, num_right: int) -> None:
        """Drop the chunks after the first `num_right`: their bytes are not what was saved."""
        end = job.load.chunks.first + num_right
        if self._checks_digests and end < job.num_chunks:
            job.keep(end, LoadFailure.DIGEST)


class SavingThread(threading.Thread):
    """Copies chunks from blocks to the store, beside the steps.

    It works in the order of `put`; a barrier settles once it is reached.

    Args:
        may_go_on: Clear during a load, for which a save pauses briefly.
    """

    def __init__(
        self,
        link: StoreLink,
        layout: StoreLayout,
        may_go_on: threading.Event,
    ) -> None:
        super().__init__(name="lmcache-save", daemon=True)
        self._link = link
        self._layout = layout
        self._may_go_on = may_go_on
        self._inbox: queue.SimpleQueue[ChunkSave | SaveBarrier | None] = queue.SimpleQueue()
        self._is_closed = False

    def put(self, item: ChunkSave | SaveBarrier) -> None:
        """Queue a save, or a barrier that settles after the saves before it."""
        self._inbox.put(item)

    def close(self) -> None:
        """End the thread, if it runs; saves that have not begun are dropped."""
        self._is_closed = True
        self._inbox.put(None)
        if self.ident is not None:
            self.join()

    def run(self) -> None:
        """Save until closed."""
        while (item := self._inbox.get()) is not None:
            if not isinstance(item, ChunkSave):
                self._link.settle(item)
                continue
            try:
                self._save(item)
            except StoreGoneError as error:
                self._link.lost(error)
                self._drop(item)
            except Exception:  # noqa: BLE001 - the store lacks it then
                _log.exception("a save is broken")
                self._drop(item)
            self._link.saved(item.chunks.session)

    def _drop(self, save: ChunkSave) -> None:
        num_chunks = save.chunks.end - save.chunks.first
        self._link.count(num_dropped_chunks=num_chunks * len(self._layout.written))

    def _save(self, save: ChunkSave) -> None:
        link, chunks, units = self._link, save.chunks, self._layout.written
        memory = link.memory
        if not units:
            return
        if not link.is_up or self._is_closed or memory is None:
            self._drop(save)
            return
        began_s = time.monotonic()
        for bad in save.replaced:
            wrong = msgspec.structs.replace(chunks, first=bad, end=bad + 1)
            link.client.forget(wrong, units)
        slots = link.client.reserve(chunks, units)
        is_wanted = slots.starts >= 0
        blocks = memory.blocks_of(save.block_ids, chunks)
        num_bytes = 0
        for index, prefix in enumerate(self._layout.prefixes(chunks, memory.chunk_tokens)):
            if is_wanted[index].any():
                self._may_go_on.wait(_GIVE_WAY_S)
                one = slice(index, index + 1)
                num_bytes += memory.save(blocks[one], Slots(slots.pool, slots.starts[one]), prefix)
        link.client.commit(chunks, [units[i] for i in np.flatnonzero(np.any(is_wanted, axis=0))])
        link.client.end_save(chunks)
        link.count(
            num_saved_chunks=int(is_wanted.sum()),
            num_refused_chunks=int((~is_wanted).sum()),
            num_replaced_chunks=sum(
                bool(is_wanted[bad - chunks.first].any()) for bad in save.replaced
            ),
            saved_bytes=num_bytes,
            save_s=time.monotonic() - began_s,
        )
