"""The handoff of one attempt, owned as soon as it is read: given back on every way out but one.

    with OwnedHandoff(http, metrics, story) as owned:
        owned.take(handoff)  # a prefill leg, as soon as it has read one
        owned.spend()        # the decode leg has ended well: its engine has ended the lease

The one place that gives leases back. A leg that is left may still read a handoff when the block is
over: it is given back at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Self

    from pdserve.proxy.bodies import Handoff
    from pdserve.proxy.client import EngineHttp, Leg
    from pdserve.proxy.metrics import Metrics
    from pdserve.proxy.story import Story


class OwnedHandoff:
    """Owns the handoff of one attempt while the block runs.

    Attributes:
        reader: The newest leg of the attempt that gets the KV. A lease that ended under it, before
            it has heard that it is not wanted, would look to it like lost KV.
    """

    def __init__(self, http: EngineHttp, metrics: Metrics, story: Story) -> None:
        self._http = http
        self._metrics = metrics
        self._story = story
        self._handoff: Handoff | None = None
        self._is_over = False
        self.reader: Leg | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._give_back()

    def take(self, handoff: Handoff) -> None:
        """Own what a prefill leg of the attempt has read."""
        self._handoff = handoff
        if self._is_over:
            self._give_back()

    def spend(self) -> None:
        """The decode leg has ended well: nothing is left to give back."""
        self._handoff = None

    def _give_back(self) -> None:
        handoff, self._handoff = self._handoff, None
        if handoff is not None:
            self._metrics.releases.inc()
            self._story.tell("handoff given back")
            self._http.release(handoff, after=self.reader)
