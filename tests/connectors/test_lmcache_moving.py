"""What the threads that move chunks do once the store is gone."""

from __future__ import annotations

from types import SimpleNamespace

from pdserve.connectors.lmcache.client import StoreGoneError
from pdserve.connectors.lmcache.messages import ChunkLoad, ChunkRange
from pdserve.connectors.lmcache.moving import LayerwiseLoad, LoadingThread, StoreLink
from pdserve.wire.ids import RequestId
from pdserve.wire.transfer import LoadFailure


class GoneStore:
    """Answers nothing; notes of each load whether it waits for that."""

    def __init__(self) -> None:
        self.waited: list[bool] = []

    def locked(self, chunks: ChunkRange, units: list[int], *, waits: bool) -> None:
        self.waited.append(waits)
        raise StoreGoneError("no answer")


def test_of_the_loads_of_a_step_one_alone_waits_for_a_store_that_is_gone() -> None:
    store = GoneStore()
    link = StoreLink(store, lambda _: None, rank=0, wake=lambda: None)
    link.is_up = True
    thread = LoadingThread(link, SimpleNamespace(units=[0]), checks_digests=True)
    chunks = ChunkRange(1, RequestId("r"), bytes(4 * 16), "", 0, 1)
    loads = [LayerwiseLoad(ChunkLoad(chunks, 0, []), 1) for _ in range(3)]
    for load in loads:
        thread.put(load)
    thread.start()
    for load in loads:
        load.wait_for(0, 5.0)
    thread.close()
    reasons = [failed and failed.reason for failed in (load.outcome(16) for load in loads)]
    assert reasons == [LoadFailure.PEER_LOST] * 3
    assert store.waited == [True, False, False]
