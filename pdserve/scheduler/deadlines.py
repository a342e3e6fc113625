"""Which requests are too late to be of use, wherever they stand. Pure; monotonic seconds."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.scheduler.request import Request
    from pdserve.wire.ids import RequestId

_MIN_TO_SWEEP = 1024


class Deadlines:
    """Requests by their deadline. O(log requests) each; asking while none is late is O(1).

    Args:
        requests: Those that exist, by id. An entry of any other is void.
    """

    def __init__(self, requests: Mapping[RequestId, Request]) -> None:
        self._requests = requests
        self._heap: list[tuple[float, int, RequestId]] = []

    def __len__(self) -> int:
        """Entries, void ones included."""
        return len(self._heap)

    def add(self, request: Request) -> None:
        """Watch a request that exists, if it has a deadline."""
        deadline_s = request.wire.deadline_s
        if deadline_s is None:
            return
        if len(self._heap) >= max(_MIN_TO_SWEEP, 2 * len(self._requests)):
            self._heap = [entry for entry in self._heap if self._find(entry) is not None]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (deadline_s, request.order, request.request_id))

    def take_late(self, now_s: float) -> list[Request]:
        """Those whose deadline lies before `now_s`, each once, the latest last."""
        late: list[Request] = []
        while self._heap and self._heap[0][0] < now_s:
            request = self._find(heapq.heappop(self._heap))
            if request is not None:
                late.append(request)
        return late

    def _find(self, entry: tuple[float, int, RequestId]) -> Request | None:
        _, order, request_id = entry
        request = self._requests.get(request_id)
        # Another one may have come under the same id.
        return request if request is not None and request.order == order else None
