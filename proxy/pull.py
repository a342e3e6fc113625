"""A pull: the prefill leg of a request, then the leg of a decode engine that reads the KV.

What is done when one fails is `flow`'s.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from pdserve.proxy.legs import LegFailure
from pdserve.proxy.story import Stage
from pdserve.wire.transfer import KVMode

if TYPE_CHECKING:
    from aiohttp import web

    from pdserve.proxy.backend import Backend
    from pdserve.proxy.handoff import OwnedHandoff
    from pdserve.proxy.legs import Legs, Prefilled
    from pdserve.proxy.routing import Disaggregate
    from pdserve.proxy.services import Call


class Pull:
    """One attempt at a request by two engines, one after the other.

    Args:
        legs: The request's own.
        owned: The attempt's own.
    """

    def __init__(self, call: Call, legs: Legs, owned: OwnedHandoff) -> None:
        self._body = call.body
        self._story = call.story
        self._legs = legs
        self._owned = owned

    async def run(self, pair: Disaggregate) -> Prefilled | web.StreamResponse | LegFailure:
        """Prefill. Returns the answer itself if the request ends there."""
        self._legs.begin(KVMode.PULL)
        return await self._legs.prefill(pair.prefill, self._owned)

    async def read(self, backend: Backend, prefilled: Prefilled) -> web.StreamResponse | LegFailure:
        """Let a decode engine go on from a handoff, however that came about."""
        self._story.kv_mode = KVMode.PULL
        self._story.leg_sent(Stage.TRANSFER, backend.url)
        body = self._body.for_decode(prefilled.handoff, first_delivered=prefilled.answer is None)
        gate: asyncio.Future[Prefilled] = asyncio.get_running_loop().create_future()
        gate.set_result(prefilled)
        with self._legs.hand_over(prefilled.backend, backend, KVMode.PULL) as hand_over:
            outcome = await self._legs.decode(backend, body, hand_over, gate, self._owned)
            if isinstance(outcome, LegFailure):
                outcome.blame(hand_over)
            return outcome
