"""A push: the prefill leg and the receiving leg of one request, both at once.

Both engines get one sealed ticket, and the KV is written while it is computed; the handoff passes
between the two legs here. The order of what a client gets does not depend on which engine is
faster: nothing of the receiving leg is passed on before the prefill leg has delivered the first
token and given its handoff. Until then what comes from the decode engine stays in its connection.

Knows how two legs wait for each other; what one says is `legs`'s, and what is done when one fails
is `flow`'s. A leg that is left goes on in the background until its engine has noticed, and a
handoff that it ends with is given back.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from pdserve.proxy.errors import KvFailedError, RefusedError, WorkerError
from pdserve.proxy.legs import LegFailure, Prefilled
from pdserve.proxy.story import Stage
from pdserve.wire.transfer import TICKETS, EngineRef, KVMode, PushTicket

if TYPE_CHECKING:
    from aiohttp import web

    from pdserve.proxy.attempts import HandOver
    from pdserve.proxy.backend import Backend
    from pdserve.proxy.legs import Legs
    from pdserve.proxy.services import Services
    from pdserve.proxy.story import Story

PUSH_PATIENCE_S = 5.0
"""How long a prefill engine is waited for whose receiver says that no KV came: it was told as
well and hands over soon, unless the two cannot reach each other."""
LOST_RECEIVER_PATIENCE_S = 1.0
"""The same if the receiver is lost: the prefill engine may be half way, or wait for that one in
vain until its own clock ends it. What it has computed by then is in its prefix cache."""


class Push:
    """One request's way to two engines at once.

    Args:
        legs: The request's own.
    """

    def __init__(self, services: Services, legs: Legs, story: Story) -> None:
        self._secret = services.config.secret
        self._background = services.http.background
        self._new_nonce = services.new_nonce
        self._legs = legs
        self._story = story

    async def run(
        self, prefill: Backend, decode: Backend
    ) -> Prefilled | web.StreamResponse | LegFailure:
        """Let one engine prefill into the other's blocks, and pass on what both say.

        Returns:
            The answer; or a handoff to go on from, with how its receiver failed; or the failure
            of either leg, with nothing in hand.
        """
        self._legs.begin(KVMode.PUSH)
        ticket = self._ticket(prefill, decode)
        with self._legs.hand_over(prefill, decode, KVMode.PUSH) as hand_over:
            return await self._run(prefill, decode, ticket, hand_over)

    async def _run(
        self, prefill: Backend, decode: Backend, ticket: str, hand_over: HandOver
    ) -> Prefilled | web.StreamResponse | LegFailure:
        gate: asyncio.Future[Prefilled] = asyncio.get_running_loop().create_future()
        receiving = asyncio.create_task(self._legs.receive_on(decode, ticket, hand_over, gate))
        prefilling = asyncio.create_task(self._legs.prefill_on(prefill, ticket))
        left: list[asyncio.Task[Prefilled | web.StreamResponse | LegFailure]]
        left = [prefilling, receiving]
        try:
            await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            if not prefilling.done():
                lost = receiving.result()
                assert isinstance(lost, LegFailure)  # it cannot end well without the gate
                await asyncio.wait({prefilling}, timeout=_patience_s(lost))
                if not prefilling.done():
                    lost.blame(hand_over)
                    return lost
            left.remove(prefilling)
            outcome = prefilling.result()
            if isinstance(outcome, LegFailure):  # it may have refused the ticket
                outcome.blame(hand_over)
            if not isinstance(outcome, Prefilled):
                return outcome
            return await self._go_on(hand_over, outcome, receiving, gate)
        finally:
            for task in left:
                task.cancel()
                self._background.start(self._reap(task))

    async def _go_on(
        self,
        hand_over: HandOver,
        prefilled: Prefilled,
        receiving: asyncio.Task[web.StreamResponse | LegFailure],
        gate: asyncio.Future[Prefilled],
    ) -> web.StreamResponse | Prefilled:
        """The prefill leg of a push has handed over: let the other leg through."""
        if self._story.stage is Stage.PREFILL:
            self._story.stage = Stage.TRANSFER
        gate.set_result(prefilled)
        try:
            result = await receiving
        except BaseException:
            self._legs.give_back(prefilled.handoff)
            raise
        if not isinstance(result, LegFailure):
            return result
        result.blame(hand_over)
        return replace(prefilled, lost=result)

    async def _reap(self, task: asyncio.Task[Prefilled | web.StreamResponse | LegFailure]) -> None:
        """Wait for a leg that was left; a handoff that it ended with is nobody's."""
        (result,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(result, Prefilled):
            self._legs.give_back(result.handoff)

    def _ticket(self, prefill: Backend, decode: Backend) -> str:
        ticket = PushTicket(
            nonce=self._new_nonce(), prefill=_engine_ref(prefill), decode=_engine_ref(decode)
        )
        return TICKETS.seal(ticket, self._secret)


def _patience_s(lost: LegFailure) -> float:
    """How long a prefill engine may still hand over after its receiver failed like this."""
    match lost.error:
        case WorkerError(was_taken=False) | RefusedError():
            return 0.0
        case KvFailedError():
            return PUSH_PATIENCE_S
        case _:
            return LOST_RECEIVER_PATIENCE_S


def _engine_ref(backend: Backend) -> EngineRef:
    info = backend.info
    assert info is not None  # `Backends.can_push` asks for both
    assert info.kv_shape is not None
    return EngineRef(
        engine_id=info.engine_id,
        incarnation=info.incarnation,
        endpoints=tuple(info.endpoints),
        shape=info.kv_shape,
    )
