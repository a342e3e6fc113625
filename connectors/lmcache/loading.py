"""The thread that brings chunks from the store into blocks, layer by layer, beside a step."""

from __future__ import annotations

import logging
import queue
import threading
import time
from typing import TYPE_CHECKING

from pdserve.connectors.lmcache.client import StoreGoneError, StoreMissError
from pdserve.connectors.lmcache.messages import LoadDone
from pdserve.connectors.lmcache.slots import Slots
from pdserve.wire.transfer import Failed, LoadFailure

if TYPE_CHECKING:
    from pdserve.connectors.lmcache.link import StoreLink
    from pdserve.connectors.lmcache.messages import ChunkLoad
    from pdserve.connectors.lmcache.slots import StoreLayout

_log = logging.getLogger(__name__)


class LayerwiseLoad:
    """One load: the loading thread goes from layer to layer, the step's thread waits for each.

    Attributes:
        copying: Held while blocks are written; whoever holds it may cancel.
        is_cancelled: Nothing more is written.
        num_chunks: Leading chunks of the prompt that are good so far.
        reason: Why the others are not.
    """

    def __init__(self, load: ChunkLoad, num_layers: int) -> None:
        self.load = load
        self.copying = threading.Lock()
        self.is_cancelled = False
        self.num_chunks = load.chunks.end
        self.reason = LoadFailure.TIMEOUT
        self.num_bytes = 0
        self._num_layers = num_layers
        self._layers_done = 0
        self._changed = threading.Condition()

    def layers_are_done(self, num_layers: int) -> None:
        """So many may be read."""
        with self._changed:
            self._layers_done = num_layers
            self._changed.notify_all()

    def keep(self, num_chunks: int, reason: LoadFailure) -> None:
        """Only so many leading chunks are good."""
        if not self.is_cancelled:
            self.num_chunks, self.reason = num_chunks, reason

    def over(self) -> None:
        """There will be no more."""
        self.layers_are_done(self._num_layers)

    def wait_for(self, layer: int, timeout_s: float) -> None:
        """Return once a layer is there, or will not come."""
        if self._layers_done > layer:
            return
        with self._changed:
            if self._changed.wait_for(lambda: self._layers_done > layer, timeout_s):
                return
        self.cancel()

    def cancel(self) -> None:
        """When this returns, nothing writes the blocks any more."""
        with self.copying:
            if self._layers_done < self._num_layers:
                self.keep(self.load.chunks.first, LoadFailure.TIMEOUT)
                self.is_cancelled = True
        self.over()

    def outcome(self, chunk_tokens: int) -> Failed | None:
        """What has failed of it, once it is over."""
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
    """See the module.

    Args:
        checks_digests: False only in tests that show what the digests are for.

    Attributes:
        is_idle: Set while nothing is to be loaded; others may have the memory's bandwidth.
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
        """Begin a load."""
        self.is_idle.clear()
        self._inbox.put(job)

    def close(self) -> None:
        """End the thread, if it runs."""
        self._inbox.put(None)
        if self.ident is not None:
            self.join()

    def run(self) -> None:
        """Load until closed."""
        while (job := self._inbox.get()) is not None:
            began_s = time.monotonic()
            try:
                self._load(job)
            except Exception:  # noqa: BLE001 - a load that is broken has failed
                _log.exception("a load from the store is broken")
                job.cancel()
            # Told before the step can end: what it has computed may be void.
            self._tell(job, time.monotonic() - began_s)
            job.over()
            if self._inbox.empty():
                self.is_idle.set()

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
        try:
            slots = client.locked(chunks, units)
        except StoreGoneError as error:
            self._link.lost(error)
            job.keep(chunks.first, LoadFailure.PEER_LOST)
            return
        except StoreMissError:
            job.keep(chunks.first, LoadFailure.PEER_LOST)
            return
        try:
            self._copy(job, slots)
        finally:
            client.unlock(chunks, units)

    def _copy(self, job: LayerwiseLoad, slots: Slots) -> None:
        """Copy what is right."""
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
        """What is behind so many chunks is not what was saved: it does not count as loaded."""
        end = job.load.chunks.first + num_right
        if self._checks_digests and end < job.num_chunks:
            job.keep(end, LoadFailure.DIGEST)
