"""The waiting requests, in the order in which they may start."""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING

from pdserve.config.schema import SchedulingPolicy
from pdserve.connectors.base import KVSource
from pdserve.scheduler.plan import next_line

if TYPE_CHECKING:
    from pdserve.scheduler.request import Request
    from pdserve.wire.ids import RequestId


class WaitingQueue:
    """A priority queue with removal by id.

    First come, first served orders by arrival, and a preempted request keeps its place,
    so it comes before everything that arrived after it. The priority policy orders by
    priority first. Push and pop are O(log n); removal is O(1), paid at a later pop.

    In each order a request whose KV lies ready may take the place of one whose KV is only planned:
    the other engine may lack the blocks that are kept for it.

    A request may stand aside until its connector says that it is to be asked about again: it
    still waits, but it is not in the line, so nobody waits behind it and nobody looks at it.
    """

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._by_priority = policy is SchedulingPolicy.PRIORITY
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
        """How many do not stand aside."""
        return len(self._members)

    @property
    def aside(self) -> list[RequestId]:
        """Who stands aside."""
        return list(self._aside)

    def push(self, request: Request) -> None:
        """Add a request."""
        push = next(self._pushes)
        heapq.heappush(self._heaps[request.source], (*self.rank(request), push, request))
        self._members[request.request_id] = push

    def peek(self) -> Request | None:
        """The request that comes next."""
        heads = self._heads()
        planned = heads.get(KVSource.PLANNED)
        line = next_line(
            {line: self.rank(head) for line, head in heads.items()},
            num_overtaken=0 if planned is None else planned.num_overtaken,
        )
        return None if line is None else heads[line]

    def note_start(self, request: Request) -> None:
        """`request`, which came next, is about to start, perhaps in a planned one's place."""
        planned = self._head(KVSource.PLANNED)
        if planned is not None and self.rank(planned) < self.rank(request):
            planned.num_overtaken += 1

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands."""
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
        """Put a request that stands aside in line, where its rank belongs; False if it does not."""
        if request.request_id not in self._aside:
            return False
        self._aside.discard(request.request_id)
        self.push(request)
        return True

    def rank(self, request: Request) -> tuple[int, int]:
        """Smaller comes first; also decides who is preempted (the largest)."""
        return (request.wire.priority if self._by_priority else 0, request.order)

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
