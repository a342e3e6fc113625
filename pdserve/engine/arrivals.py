"""Requests that have arrived at an engine core but are not yet in its scheduler.

A prompt comes once, however many choices it has; here each choice becomes a request. A turn of
the core's loop hands on a bounded number of requests and tokens, so that a thousand choices, or
a hundred long prompts at once, delay no stream. Knows no sockets and no steps.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from pdserve.kvcache.manager import SharedPrompt
from pdserve.wire.request import with_siblings

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdserve.scheduler.scheduler import Scheduler
    from pdserve.wire.core_messages import Add
    from pdserve.wire.ids import RequestId
    from pdserve.wire.request import GenerateRequest

MAX_REQUESTS_PER_TURN = 32
MAX_PROMPT_TOKENS_PER_TURN = 1 << 16
"""Checking this many takes about a millisecond."""


class Arrivals:
    """First come, first served. `len` counts requests that the scheduler does not have yet."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._waiting: OrderedDict[RequestId, tuple[GenerateRequest, SharedPrompt]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, message: Add) -> int:
        """Take a message; return how many of its requests were refused at once."""
        shared = SharedPrompt()
        num_refused = 0
        for request in with_siblings(message.request, message.siblings):
            if request.request_id in self._waiting:
                self._scheduler.refuse(
                    request.request_id, "a request with this id is already being served"
                )
                num_refused += 1
            else:
                self._waiting[request.request_id] = request, shared
        return num_refused

    def forget(self, request_ids: Iterable[RequestId]) -> int:
        """Drop those of the requests that are here; return their number."""
        return sum(self._waiting.pop(request_id, None) is not None for request_id in request_ids)

    def hand_on(self, *, may_take_all: bool = False) -> int:
        """Give the scheduler the requests that came first; return their number.

        Args:
            may_take_all: Whether there is no stream to delay.
        """
        num_requests = num_tokens = 0
        while self._waiting and (
            may_take_all
            or (num_requests < MAX_REQUESTS_PER_TURN and num_tokens < MAX_PROMPT_TOKENS_PER_TURN)
        ):
            _, (request, shared) = self._waiting.popitem(last=False)
            self._scheduler.add(request, shared)
            num_requests += 1
            num_tokens += len(request.prompt_token_ids)
        return num_requests
