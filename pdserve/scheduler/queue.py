"""Requests in order: those that wait by rank, all of them by deadline. Pure."""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING

from pdserve.connectors.base import KVSource
from pdserve.scheduler.plan import next_line

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.scheduler.request import Request
    from pdserve.wire.ids import RequestId

_MIN_TO_SWEEP = 1024


class WaitingQueue:
    """A priority queue by rank, with removal by id.

    A preempted request keeps its rank, so it comes before everything that arrived after it. Push
    and pop are O(log n); removal is O(1), paid at a later pop.

    A request whose KV lies ready may take the place of one whose KV is only planned:
    the other engine may lack the blocks that are kept for it.

    A request may stand aside until its connector says that it is to be asked about again: it
    still waits, but it is not in the line, so nobody waits behind it and nobody looks at it.
    """

    def __init__(self) -> None:
        self._heaps: dict[KVSource, list[tuple[int, int, int, Request]]] = {
            source: [] for source in KVSource
        }
        self._pushes = itertools.count()
        self._members: dict[RequestId, int] = {}
        self._aside: set[RequestId] = set()

    def __len__(self) -> int:
        return len(self._members) + len(self._aside)

    @property
    def num_in_line(self) -> int:
        """Requests that do not stand aside."""
        return len(self._members)

    @property
    def aside(self) -> list[RequestId]:
        """Requests that stand aside."""
        return list(self._aside)

    def push(self, request: Request) -> None:
        """Add a request."""
        push = next(self._pushes)
        heapq.heappush(self._heaps[request.source], (*request.rank, push, request))
        self._members[request.request_id] = push

    def peek(self) -> Request | None:
        """Return the request that comes next, and leave it there."""
        heads = self._heads()
        planned = heads.get(KVSource.PLANNED)
        line = next_line(
            {line: head.rank for line, head in heads.items()},
            num_overtaken=0 if planned is None else planned.num_overtaken,
        )
        return None if line is None else heads[line]

    def note_start(self, request: Request) -> None:
        """Note that `request`, which came next, starts, perhaps in a planned one's place."""
        planned = self._head(KVSource.PLANNED)
        if planned is not None and planned.rank < request.rank:
            planned.overtaken()

    def remove(self, request: Request) -> None:
        """Remove a request, whether it is in line or stands aside."""
        if request.request_id in self._aside:
            self._aside.discard(request.request_id)
            return
        del self._members[request.request_id]
        if not self._members:
            for heap in self._heaps.values():
                heap.clear()

    def stand_aside(self, request: Request) -> None:
        """Take a request out of the line, until `come_back`."""
        self.remove(request)
        self._aside.add(request.request_id)

    def come_back(self, request: Request) -> bool:
        """Put a request that stands aside back in line by its rank; False if it does not."""
        if request.request_id not in self._aside:
            return False
        self._aside.discard(request.request_id)
        self.push(request)
        return True

    def _heads(self) -> dict[KVSource, Request]:
        heads = {source: self._head(source) for source in KVSource}
        return {source: head for source, head in heads.items() if head is not None}

    def _head(self, source: KVSource) -> Request | None:
        heap = self._heaps[source]
        while heap:
            _, _, push, request = heap[0]
            # What was removed and pushed again has an older entry as well, which is void.
            if self._members.get(request.request_id) == push:
                return request
            heapq.heappop(heap)
        return None


class Deadlines:
    """Finds the requests whose deadline has passed. Monotonic seconds.

    O(log requests) each; asking while none is late is O(1).

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
        heapq.heappush(self._heap, (deadline_s, request.rank[1], request.request_id))

    def take_late(self, now_s: float) -> list[Request]:
        """Return each request whose deadline lies before `now_s`, once, the latest last."""
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
        return request if request is not None and request.rank[1] == order else None
