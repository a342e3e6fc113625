"""Messages between this rank and peers, each through a buffer of its own.

    waiting (for a buffer) -> posted -> over: all of it is there, or failed as a value
        `----- dropped -----'--> (its buffer is used again once UCX is through with it)

A message that nobody wants any more goes on; nothing but its buffer is touched by it. What hangs
ends with its peer's connection (`hang_up`); a buffer that even then is not given back is left to
UCX. A peer has a share of the buffers, so that one which hangs holds up nobody else.

It knows neither blocks nor what peers say.
"""

from __future__ import annotations

import secrets
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from pdserve.connectors.ucx.library import UcxError
from pdserve.connectors.ucx.staging import TRAILER_BYTES, end_with, ends_with

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.connectors.ucx.library import UcxEndpoint, UcxRequest, UcxWorker
    from pdserve.connectors.ucx.staging import Staging

_SHARE: Final = 4


@dataclass(slots=True, eq=False)
class TaggedMessage:
    """One message; compared by identity.

    Attributes:
        address: The peer's worker.
        num_bytes: Of its payload.
        on_over: Called once, unless it was dropped: with the payload (uint8), which is the
            callee's until it returns, and with None or what went wrong.
        fill: Writes the payload of one that is sent; None for one that is received.
        on_posted: Called when it is posted.
    """

    address: bytes
    tag: int
    num_bytes: int
    on_over: Callable[[torch.Tensor, str | None], None]
    fill: Callable[[torch.Tensor], None] | None = None
    on_posted: Callable[[], object] | None = None
    is_dropped: bool = False
    buffer: torch.Tensor | None = None
    request: UcxRequest | None = None

    @property
    def is_posted(self) -> bool:
        """Whether UCX has it."""
        return self.request is not None

    @property
    def memory(self) -> torch.Tensor:
        """What of its buffer travels."""
        assert self.buffer is not None
        return self.buffer[: self.num_bytes + TRAILER_BYTES]

    @property
    def payload(self) -> torch.Tensor:
        """What of that is not the trailer."""
        return self.memory[:-TRAILER_BYTES]

    @property
    def is_over(self) -> bool:
        """Whether it was posted, and UCX is through with it."""
        return self.request is not None and self.request.is_over

    def send_nothing(self) -> None:
        """Have one that is sent be empty, if that has not happened yet."""
        if not self.is_posted:
            self.num_bytes, self.fill = 0, nothing

    def tell(self, failure: str | None) -> None:
        """Call `on_over`, unless nobody wants it any more."""
        if not self.is_dropped:
            self.is_dropped = True
            self.on_over(self.payload, failure)


class _Way:
    """The messages of one direction.

    Attributes:
        waiting: By peer; the first is whose turn it is.
    """

    def __init__(self, max_posted: int) -> None:
        self.waiting: dict[bytes, deque[TaggedMessage]] = {}
        self.posted: list[TaggedMessage] = []
        self._max_posted = max_posted

    def add(self, message: TaggedMessage) -> None:
        """Have it wait behind those of its peer."""
        self.waiting.setdefault(message.address, deque()).append(message)

    def remove(self, message: TaggedMessage) -> bool:
        """Take it out if it waits; return whether it did."""
        queue = self.waiting.get(message.address)
        if queue is None or message not in queue:
            return False
        queue.remove(message)
        if not queue:
            del self.waiting[message.address]
        return True

    def take(self) -> TaggedMessage | None:
        """The next to be posted, if there is a buffer for it."""
        if len(self.posted) >= self._max_posted:
            return None
        num_posted = Counter(each.address for each in self.posted)
        for address, queue in self.waiting.items():
            if num_posted[address] < self._max_posted // _SHARE:
                message = queue.popleft()
                del self.waiting[address]
                if queue:
                    self.waiting[address] = queue
                self.posted.append(message)
                return message
        return None


class Messages:
    """All messages of one rank; all methods belong to one thread.

    Args:
        worker: UCX.
        staging: Makes buffers.
        max_posted: How many may be posted each way.
    """

    def __init__(self, worker: UcxWorker, staging: Staging, max_posted: int) -> None:
        self._worker = worker
        self._staging = staging
        self._endpoints: dict[bytes, UcxEndpoint] = {}
        self._free: list[torch.Tensor] = []
        self._max_free = 2 * max_posted
        self._to_send, self._to_receive = _Way(max_posted), _Way(max_posted)
        self._stranded: list[TaggedMessage] = []
        # Neither another life's nor an earlier message's: it is never drawn again.
        self._next_tag = secrets.randbits(62)

    def new_tag(self) -> int:
        """Draw a tag that no message to this rank ever had."""
        self._next_tag += 1
        return self._next_tag

    def post(self, message: TaggedMessage) -> None:
        """Send or receive it as soon as a buffer is free, in the order of its peer."""
        self._way(message).add(message)
        self._post_waiting()

    def drop(self, message: TaggedMessage) -> None:
        """Nobody wants it any more: it is not posted, or goes on for itself."""
        message.is_dropped = True
        self._way(message).remove(message)

    def hang_up(self, address: bytes) -> None:
        """End all that is under way with a peer; what is posted later connects again."""
        endpoint = self._endpoints.pop(address, None)
        if endpoint is None:
            return
        endpoint.close()
        self.advance()
        for way in self._ways:
            for message in [each for each in way.posted if each.address == address]:
                way.posted.remove(message)
                self._stranded.append(message)
                message.tell("the connection was lost")

    def advance(self) -> None:
        """Let UCX do what there is to do, and see what is over."""
        self._worker.progress()
        for way in self._ways:
            for message in [each for each in way.posted if each.is_over]:
                way.posted.remove(message)
                self._end(message)
        for message in [each for each in self._stranded if each.is_over]:
            self._stranded.remove(message)
            self._give_back(message)
        self._post_waiting()

    def close(self) -> None:
        """End everything; nobody is told."""
        for endpoint in self._endpoints.values():
            endpoint.close()
        self._endpoints.clear()
        under_way = [*self._stranded, *self._to_send.posted, *self._to_receive.posted]
        buffers = [message.buffer for message in under_way]
        for message in under_way:
            message.request = None
        self._worker.close()
        del buffers  # UCX's until now

    @property
    def _ways(self) -> tuple[_Way, _Way]:
        return self._to_send, self._to_receive

    def _way(self, message: TaggedMessage) -> _Way:
        return self._to_receive if message.fill is None else self._to_send

    def _post_waiting(self) -> None:
        for way in self._ways:
            while (message := way.take()) is not None:
                try:
                    self._post(message)
                except UcxError as error:
                    way.posted.remove(message)
                    message.tell(str(error))
                    self._give_back(message)

    def _post(self, message: TaggedMessage) -> None:
        message.buffer = self._take_buffer(message.num_bytes)
        endpoint = self._endpoint(message.address)
        if message.fill is None:
            end_with(message.memory, ~message.tag)  # what was there before must not pass
            message.request = endpoint.receive(message.memory, message.tag)
        else:
            message.fill(message.payload)
            end_with(message.memory, message.tag)
            message.request = endpoint.send(message.memory, message.tag)
        if message.on_posted is not None:
            message.on_posted()

    def _end(self, message: TaggedMessage) -> None:
        """UCX is through with it."""
        assert message.request is not None
        failure = message.request.failure()
        if failure is None and not ends_with(message.memory, message.tag):
            failure = "the peer has not sent it"
        message.tell(failure)
        self._give_back(message)

    def _endpoint(self, address: bytes) -> UcxEndpoint:
        """The way to a peer; one that has failed is made again."""
        endpoint = self._endpoints.get(address)
        if endpoint is not None and not endpoint.is_alive:
            endpoint.close()
            endpoint = None
        if endpoint is None:
            endpoint = self._endpoints[address] = self._worker.connect(address)
        return endpoint

    def _take_buffer(self, num_bytes: int) -> torch.Tensor:
        """A buffer that is large enough: one that was used before, if there is any."""
        for number, buffer in enumerate(self._free):
            if buffer.numel() >= num_bytes + TRAILER_BYTES:
                return self._free.pop(number)
        return self._staging.new_buffer(num_bytes)

    def _give_back(self, message: TaggedMessage) -> None:
        message.request = None  # it would keep the worker
        buffer, message.buffer = message.buffer, None
        if buffer is not None:
            self._free.append(buffer)
            self._free.sort(key=torch.Tensor.numel)
            del self._free[: -self._max_free]  # the smallest serve the fewest


def nothing(payload: torch.Tensor) -> None:
    """Fill the payload of an empty message."""
