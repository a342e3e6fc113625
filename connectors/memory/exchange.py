"""Where the engines of one process find one another's blocks."""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING

from pdserve.wire.transfer import Endpoint

if TYPE_CHECKING:
    from pdserve.connectors.memory.worker import MemoryWorker

_HOST = "memory"


class Exchange:
    """Worker halves by endpoint. `lock` guards them and all that is reached through them."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._ports = itertools.count(1)
        self._workers: dict[Endpoint, MemoryWorker] = {}

    def join(self, worker: MemoryWorker) -> Endpoint:
        """Add `worker` under an endpoint that was never used before."""
        with self.lock:
            endpoint = Endpoint(host=_HOST, port=next(self._ports))
            self._workers[endpoint] = worker
            return endpoint

    def leave(self, endpoint: Endpoint) -> None:
        """Remove a worker; unknown endpoints are ignored."""
        with self.lock:
            self._workers.pop(endpoint, None)

    def find(self, endpoint: Endpoint) -> MemoryWorker | None:
        """The worker at `endpoint`, if there is one. Call it with `lock` held."""
        return self._workers.get(endpoint)
