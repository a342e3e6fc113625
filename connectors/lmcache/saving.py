"""The thread that brings chunks from blocks to the store, beside the steps."""

from __future__ import annotations

import logging
import queue
import threading
import time
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from pdserve.connectors.lmcache.client import StoreGoneError
from pdserve.connectors.lmcache.messages import ChunkSave
from pdserve.connectors.lmcache.slots import Slots

if TYPE_CHECKING:
    from pdserve.connectors.lmcache.link import StoreLink
    from pdserve.connectors.lmcache.messages import SaveBarrier
    from pdserve.connectors.lmcache.slots import StoreLayout

_log = logging.getLogger(__name__)

_GIVE_WAY_S = 0.05


class SavingThread(threading.Thread):
    """See the module. In the order in which it is told; a barrier settles once it is reached.

    Args:
        may_go_on: Clear while a load is under way, to which a save gives way for a moment.
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

    def put(self, told: ChunkSave | SaveBarrier) -> None:
        """Save, or settle behind what is saved."""
        self._inbox.put(told)

    def close(self) -> None:
        """End the thread, if it runs; what is not saved by then is dropped."""
        self._is_closed = True
        self._inbox.put(None)
        if self.ident is not None:
            self.join()

    def run(self) -> None:
        """Save until closed."""
        while (told := self._inbox.get()) is not None:
            if not isinstance(told, ChunkSave):
                self._link.settle(told)
                continue
            try:
                self._save(told)
            except StoreGoneError as error:
                self._link.lost(error)
                self._drop(told)
            except Exception:  # noqa: BLE001 - the store lacks it then
                _log.exception("a save is broken")
                self._drop(told)
            self._link.saved(told.chunks.session)

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
