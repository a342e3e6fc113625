"""The example store passes the kit, as it is and with layers that take their time."""

from __future__ import annotations

import copy
import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec

from pdserve.connectors.base import Hold
from pdserve.connectors.conformance import StoreConformance, make_shape
from pdserve.wire.ids import RequestId
from pdserve.wire.transfer import ConnectorMetadata, ConnectorReport, LeaseEnd, Settled
from tests.connectors.example_store import KEPT, StoreConnector, StoreScheduler, StoreWorker

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from pdserve.connectors.base import KVConnectorBase

_LAYER_S = 0.003


class TestStore(StoreConformance):
    def make_connector(self) -> KVConnectorBase:
        KEPT.clear()
        return StoreConnector()


class TestStoreOfFourRanks(TestStore):
    prefill_shape = make_shape(tp=2, pp=2, block_size=8)


class SlowScheduler(StoreScheduler):
    """Holds blocks until what is being saved of them is saved."""

    def __init__(self, shape: Any) -> None:
        super().__init__(shape)
        self._num_holds = itertools.count()
        self._let_go: list[tuple[RequestId, str]] = []

    def request_finished(self, request: Any, block_ids: Any, generations: Any) -> Hold | None:
        hold = Hold(f"hold {next(self._num_holds)}")
        self._let_go.append((request.request_id, hold.hold_id))
        return hold

    preempted = request_finished

    def take_instructions(self) -> ConnectorMetadata | None:
        let_go, self._let_go = self._let_go, []
        return ConnectorMetadata(msgspec.msgpack.encode(let_go)) if let_go else None


class SlowWorker(StoreWorker):
    """Layers come and go on a thread, one after the other, and each takes a while."""

    def __init__(self, rank: int, wake: Callable[[], None]) -> None:
        super().__init__(rank)
        self._wake, self._thread = wake, ThreadPoolExecutor(1)
        self._layers: list[Future[None]] = []
        self._settled: list[Settled] = []

    def _later(self, do: Callable[..., None], *arguments: Any) -> Future[None]:
        def work() -> None:
            time.sleep(_LAYER_S)
            do(*arguments)

        return self._thread.submit(work)

    def start_load_kv(self, metadata: ConnectorMetadata) -> bool:
        is_layerwise = super().start_load_kv(metadata)
        load, layers = super().wait_for_layer_load, range(self._kv.shape[1])
        self._layers = [self._later(load, layer) for layer in layers]
        return is_layerwise

    def wait_for_layer_load(self, layer: int) -> None:
        self._layers[layer].result()

    def save_kv_layer(self, layer: int) -> None:
        this_step = copy.copy(self)
        self._later(StoreWorker.save_kv_layer, this_step, layer)

    def post(self, metadata: ConnectorMetadata) -> None:
        for request_id, hold_id in msgspec.msgpack.decode(metadata.payload):
            self._later(self._settle, RequestId(request_id), hold_id)

    def _settle(self, request_id: RequestId, hold_id: str) -> None:
        end = LeaseEnd.RELEASED
        self._settled.append(Settled(request_id=request_id, end=end, nonce=hold_id))
        self._wake()

    def get_finished(self) -> ConnectorReport:
        settled, self._settled = self._settled, []
        return ConnectorReport(settled=settled)

    def close(self, timeout_s: float) -> None:
        self._thread.shutdown()


class SlowConnector(StoreConnector):
    def make_scheduler(self, context: Any, endpoints: Any) -> SlowScheduler:
        return SlowScheduler(context.shape)

    def make_worker(self, context: Any, wake: Callable[[], None]) -> SlowWorker:
        return SlowWorker(context.rank, wake)


class TestStoreWhoseLayersTakeTime(StoreConformance):
    def make_connector(self) -> KVConnectorBase:
        KEPT.clear()
        return SlowConnector()
