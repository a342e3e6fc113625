"""Messages between this rank and its peers, each through its own buffer.

    waiting (for a buffer) -> posted -> over: all of it is there, or failed as a value
        `----- dropped -----'--> (its buffer is reused once UCX has finished with it)

A dropped message that was posted continues, but touches only its buffer. A message that hangs ends
with its peer's connection (`hang_up`), at the latest after a while; a buffer that is not returned
even then is left to UCX. Each peer is limited to a share of the buffers, so that one which hangs
does not block the others, and several do so only for that while.

It knows neither blocks nor the contents of messages.
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
    from pdserve.observe.clock import Clock

_SHARE: Final = 4


@dataclass(slots=True, eq=False)
class TaggedMessage:
    """One message; compared by identity.

    Attributes:
        address: Address of the peer's worker.
        num_bytes: Bytes of its payload.
        on_over: Called once, unless the message was dropped: with the payload (uint8), valid until
            it returns, and the reason of a failure or None.
        fill: Writes the payload of a message to send; None for a message to receive.
        on_posted: Called when it is posted.
        until_s: When it ends its peer's connection if it is not over; inf before it is posted.
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
    until_s: float = float("inf")

    @property
    def is_posted(self) -> bool:
        """Whether it was handed to UCX."""
        return self.request is not None

    @property
    def memory(self) -> torch.Tensor:
        """The part of its buffer that is transmitted."""
        assert self.buffer is not None
        return self.buffer[: self.num_bytes + TRAILER_BYTES]

    @property
    def payload(self) -> torch.Tensor:
        """Its memory without the trailer."""
        return self.memory[:-TRAILER_BYTES]

    @property
    def is_over(self) -> bool:
        """Whether it was posted, and UCX has finished with it."""
        return self.request is not None and self.request.is_over

    def send_nothing(self) -> None:
        """Make a message to send empty, unless it is already posted."""
        if not self.is_posted:
            self.num_bytes, self.fill = 0, nothing

    def tell(self, failure: str | None) -> None:
        """Call `on_over`, unless the message was dropped."""
        if not self.is_dropped:
            self.is_dropped = True
            self.on_over(self.payload, failure)


class _Way:
    """The messages of one direction.

    Attributes:
        waiting: Queues by peer; the first peer is the next in turn.
    """

    def __init__(self, max_posted: int) -> None:
        self.waiting: dict[bytes, deque[TaggedMessage]] = {}
        self.posted: list[TaggedMessage] = []
        self._max_posted = max_posted

    def add(self, message: TaggedMessage) -> None:
        """Append it to its peer's queue."""
        self.waiting.setdefault(message.address, deque()).append(message)

    def remove(self, message: TaggedMessage) -> None:
        """Remove it if it waits."""
        queue = self.waiting.get(message.address)
        if queue is not None and message in queue:
            queue.remove(message)
            if not queue:
                del self.waiting[message.address]

    def take(self) -> TaggedMessage | None:
        """Take the next message to post, if the limits allow one."""
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
        max_posted: Limit of posted messages, each way.
        timeout_s: Time after which a posted message hangs, whether or not it was dropped meanwhile.
    """

    def __init__(
        self,
        worker: UcxWorker,
        staging: Staging,
        *,
        clock: Clock,
        max_posted: int,
        timeout_s: float,
    ) -> None:
        self._worker = worker
        self._staging = staging
        self._clock = clock
        self._timeout_s = timeout_s
        self._endpoints: dict[bytes, UcxEndpoint] = {}
        self._free: list[torch.Tensor] = []
        self._max_free = 2 * max_posted
        self._to_send, self._to_receive = _Way(max_posted), _Way(max_posted)
        self._stranded: list[TaggedMessage] = []
        # Begins at random and counts up, so no tag of an earlier process or message repeats.
        self._next_tag = secrets.randbits(62)

    @property
    def due_s(self) -> float:
        """When `advance` must be called next, whatever UCX has to do."""
        posted = (each for way in self._ways for each in way.posted)
        return min((each.until_s for each in posted), default=float("inf"))

    def new_tag(self) -> int:
        """Draw a tag that no message to this rank has ever had."""
        self._next_tag += 1
        return self._next_tag

    def post(self, message: TaggedMessage) -> None:
        """Send or receive it once a buffer is free, after earlier ones of its peer."""
        self._way(message).add(message)
        self._post_waiting()

    def drop(self, message: TaggedMessage) -> None:
        """Discard a message: it is never posted, or continues without effect."""
        message.is_dropped = True
        self._way(message).remove(message)

    def hang_up(self, address: bytes) -> None:
        """End all messages in flight with a peer; a later one connects again."""
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
        """Let UCX do its pending work, and finish the messages that are over."""
        self._worker.progress()
        for way in self._ways:
            for message in [each for each in way.posted if each.is_over]:
                way.posted.remove(message)
                self._end(message)
        for message in [each for each in self._stranded if each.is_over]:
            self._stranded.remove(message)
            self._give_back(message)
        now_s = self._clock.monotonic_s()
        posted = [each for way in self._ways for each in way.posted]
        for address in {each.address for each in posted if each.until_s <= now_s}:
            self.hang_up(address)
        self._post_waiting()

    def close(self) -> None:
        """End everything, without calling `on_over`."""
        for endpoint in self._endpoints.values():
            endpoint.close()
        self._endpoints.clear()
        under_way = [*self._stranded, *self._to_send.posted, *self._to_receive.posted]
        buffers = [message.buffer for message in under_way]
        for message in under_way:
            message.request = None
        self._worker.close()
        del buffers  # UCX may have used them until now

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
            end_with(message.memory, ~message.tag)  # an old trailer must not pass for this one
            message.request = endpoint.receive(message.memory, message.tag)
        else:
            message.fill(message.payload)
            end_with(message.memory, message.tag)
            message.request = endpoint.send(message.memory, message.tag)
        message.until_s = self._clock.monotonic_s() + self._timeout_s
        if message.on_posted is not None:
            message.on_posted()

    def _end(self, message: TaggedMessage) -> None:
        """Finish a message that UCX has finished with."""
        assert message.request is not None
        failure = message.request.failure()
        if failure is None and not ends_with(message.memory, message.tag):
            failure = "the peer has not sent it"
        message.tell(failure)
        self._give_back(message)

    def _endpoint(self, address: bytes) -> UcxEndpoint:
        """Return the connection to a peer, replacing one that has failed."""
        endpoint = self._endpoints.get(address)
        if endpoint is not None and not endpoint.is_alive:
            endpoint.close()
            endpoint = None
        if endpoint is None:
            endpoint = self._endpoints[address] = self._worker.connect(address)
        return endpoint

    def _take_buffer(self, num_bytes: int) -> torch.Tensor:
        """Return a buffer that is large enough, a used one if possible."""
        for number, buffer in enumerate(self._free):
            if buffer.numel() >= num_bytes + TRAILER_BYTES:
                return self._free.pop(number)
        return self._staging.new_buffer(num_bytes)

    def _give_back(self, message: TaggedMessage) -> None:
        message.request = None  # a reference to it would keep the worker alive
        buffer, message.buffer = message.buffer, None
        if buffer is not None:
            self._free.append(buffer)
            self._free.sort(key=torch.Tensor.numel)
            del self._free[: -self._max_free]  # the smallest fit the fewest messages


def nothing(payload: torch.Tensor) -> None:
    """Fill the payload of an empty message."""
