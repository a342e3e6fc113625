"""An engine's stream on its way to the client, in the reader's callback: it wakes no task.

Knows what a request's record notes of its tokens; knows no other leg.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.proxy.relay import Relay

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.proxy.delivery import Delivery
    from pdserve.proxy.leg import Leg
    from pdserve.proxy.story import Stage, Story


class Passing:
    """Passes one leg's stream on, and notes in the request's record what the client gets.

    Args:
        stage: What the request is in once output arrives.
        begun: Called at the first output.
        stalled: Given the seconds without output, if this engine has taken over from another.

    Attributes:
        relay: What was found in the stream.
        last: The events of the last read that had any; with the end mark, of the last two.
    """

    def __init__(
        self,
        leg: Leg,
        delivery: Delivery,
        story: Story,
        stage: Stage,
        *,
        begun: Callable[[], None],
        stalled: Callable[[float], None],
    ) -> None:
        self._leg = leg
        self._delivery = delivery
        self._story = story
        self._stage = stage
        self._begun = begun
        self._stalled = stalled
        self.relay = Relay()
        self.last = b""

    def take(self, chunk: bytes) -> bool:
        """Pass one read on; return whether the next may follow at once.

        Raises:
            DivergedError: A repeated stream differs from the original.
        """
        relay, delivery = self.relay, self._delivery
        num_events = relay.num_events
        data = relay.feed(chunk)
        self._leg.moved = relay.handoff
        if data:
            self._pass_on(data, relay.num_events - num_events)
        return not (delivery.keeps or relay.done or relay.error is not None)

    def _pass_on(self, data: bytes, num_events: int) -> None:
        story, delivery = self._story, self._delivery
        if not self.last:
            self._begun()
        story.stage = self._stage
        sent_s = story.clock.monotonic_s()
        if (stall_s := story.goes_on(sent_s)) is not None:
            self._stalled(stall_s)
        num_known = delivery.num_swallowed
        if delivery.offer(data) and num_events:
            story.chunk(sent_s)
        story.num_output_tokens += num_events - (delivery.num_swallowed - num_known)
        self.last = self.last + data if self.relay.done else data
