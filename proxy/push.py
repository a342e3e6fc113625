"""A push: the prefill leg and the receiving leg of one request, both at once.

Both engines get one sealed ticket, and the KV is written while it is computed; the handoff passes
between the two legs here. The order of what a client gets does not depend on which engine is
faster: nothing of the receiving leg is passed on before the prefill leg has delivered the first
token and given its handoff. Until then what comes from the decode engine stays in its connection.

Knows how two legs wait for each other; what one says is `legs`'s, and what is done when one fails
is `flow`'s. A leg that is left goes on in the background until its engine has noticed.
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

    from pdserve.proxy.backend import Backend
    from pdserve.proxy.breakers import HandOver
    from pdserve.proxy.handoff import OwnedHandoff
    from pdserve.proxy.legs import Legs
    from pdserve.proxy.routing import Disaggregate
    from pdserve.proxy.services import Call, Services

PUSH_PATIENCE_S = 5.0
"""How long a prefill engine is waited for whose receiver says that no KV came: it was told as
well and hands over soon, unless the two cannot reach each other."""
LOST_RECEIVER_PATIENCE_S = 1.0
"""The same if the receiver is lost: the prefill engine may be half way, or wait for that one in
vain until its own clock ends it. What it has computed by then is in its prefix cache."""


class Push:
    """One attempt at a request by two engines at once.

    Args:
        legs: The request's own.
        owned: The attempt's own.
    """

    def __init__(self, services: Services, call: Call, legs: Legs, owned: OwnedHandoff) -> None:
        self._secret = services.config.secret
        self._background = services.http.background
        self._new_nonce = services.new_nonce
        self._body = call.body
        self._story = call.story
        self._legs = legs
        self._owned = owned

    async def run(self, pair: Disaggregate) -> Prefilled | web.StreamResponse | LegFailure:
        """Let one engine prefill into the other's blocks, and pass on what both say.

        Returns:
            The answer; or a handoff to go on from, with how its receiver failed; or the failure
            of either leg, with nothing in hand.
        """
        assert pair.decode is not None
        self._legs.begin(KVMode.PUSH)
        ticket = self._ticket(pair.prefill, pair.decode)
        with self._legs.hand_over(pair.prefill, pair.decode, KVMode.PUSH) as hand_over:
            outcome = await self._run(pair.prefill, pair.decode, ticket, hand_over)
            failure = outcome.lost if isinstance(outcome, Prefilled) else outcome
            if isinstance(failure, LegFailure):  # the prefill engine may have refused the ticket
                failure.blame(hand_over)
            return outcome

    async def _run(
        self, prefill: Backend, decode: Backend, ticket: str, hand_over: HandOver
    ) -> Prefilled | web.StreamResponse | LegFailure:
        gate: asyncio.Future[Prefilled] = asyncio.get_running_loop().create_future()
        self._story.receiver_sent(decode.url)
        body = self._body.for_receiving(ticket)
        receiving = asyncio.create_task(
            self._legs.decode(decode, body, hand_over, gate, self._owned)
        )
        prefilling = asyncio.create_task(self._legs.prefill(prefill, self._owned, ticket))
        left: list[asyncio.Task[Prefilled | web.StreamResponse | LegFailure]]
        left = [prefilling, receiving]
        try:
            await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            if not prefilling.done():
                lost = receiving.result()
                assert isinstance(lost, LegFailure)  # it cannot end well without the gate
                await asyncio.wait({prefilling}, timeout=_patience_s(lost))
                if not prefilling.done():
                    return lost
            left.remove(prefilling)
            prefilled = prefilling.result()
            if not isinstance(prefilled, Prefilled):
                return prefilled
            if self._story.stage is Stage.PREFILL:
                self._story.stage = Stage.TRANSFER
            gate.set_result(prefilled)
            answer = await receiving
            return replace(prefilled, lost=answer) if isinstance(answer, LegFailure) else answer
        finally:
            for task in left:
                task.cancel()
                self._background.start(_ended(task))

    def _ticket(self, prefill: Backend, decode: Backend) -> str:
        ticket = PushTicket(
            nonce=self._new_nonce(), prefill=_engine_ref(prefill), decode=_engine_ref(decode)
        )
        return TICKETS.seal(ticket, self._secret)


async def _ended(task: asyncio.Task[Prefilled | web.StreamResponse | LegFailure]) -> None:
    """Wait for a leg that was left, whatever it ends with."""
    await asyncio.gather(task, return_exceptions=True)


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
