"""Pull, push and move: how one engine continues from another's KV.

In a *pull* the prefill leg comes first, then the leg of a decode engine that reads the KV.

In a *push* both legs run at once. Both engines get one sealed ticket, and the KV is written while
it is computed. The order of the client's output does not depend on which engine is faster: nothing
of the receiving leg is passed on before the prefill leg has delivered the first token and completed
the handoff. Until then the decode engine's output stays in its connection. An abandoned leg
continues in the background until its engine has noticed.

A *move* takes a stream that its engine has ended with a handoff to another engine.

Knows how two legs wait for each other; `legs` knows the content of one leg, and `flow` what to do
when one fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from aiohttp import web

from pdserve.proxy.errors import (
    DrainedError,
    KvFailedError,
    MovedError,
    RefusedError,
    WorkerError,
)
from pdserve.proxy.handoff import Handoff
from pdserve.proxy.setbacks import LegFailure
from pdserve.proxy.story import Stage
from pdserve.wire.transfer import TICKETS, EngineRef, KVMode, PushTicket

if TYPE_CHECKING:
    from pdserve.proxy.backend import Backend
    from pdserve.proxy.breakers import TransferAttempt
    from pdserve.proxy.legs import Legs
    from pdserve.proxy.routing import Disaggregate
    from pdserve.proxy.services import Services
    from pdserve.proxy.setbacks import Setbacks

T = TypeVar("T")
Outcome: TypeAlias = "web.StreamResponse | LegFailure | None"
Strategy: TypeAlias = "Callable[[Legs, Disaggregate, Handoff], Awaitable[Outcome]]"
"""Returns the answer; or how a leg failed, with the handoff complete if that was the receiver; or
None, with the handoff complete."""

PUSH_PATIENCE_S = 5.0
"""How long a prefill engine is waited for whose receiver says that no KV came: it was told as
well and hands over soon, unless the two cannot reach each other."""
LOST_RECEIVER_PATIENCE_S = 1.0
"""The same if the receiver is lost: the prefill engine may be half way, or wait for that one in
vain until its own clock ends it. What it has computed by then is in its prefix cache."""


async def pull(legs: Legs, pair: Disaggregate, handoff: Handoff) -> Outcome:
    """Prefill; `read` follows. Returns the answer itself if the request ends there."""
    legs.begin(KVMode.PULL)
    return await legs.prefill(handoff)


async def read(legs: Legs, backend: Backend, handoff: Handoff) -> web.StreamResponse | LegFailure:
    """Make a decode engine read the KV of a complete handoff, however that came about."""
    legs.story.kv_mode = KVMode.PULL
    legs.story.leg_sent(Stage.TRANSFER, backend.url)
    body = legs.body.for_decode(handoff.params, first_delivered=handoff.answer is None)
    breakers = legs.services.breakers
    with breakers.transfer(handoff.prefill, backend, KVMode.PULL, legs.story) as transfer:
        outcome = await legs.decode(backend, body, transfer, handoff)
        if isinstance(outcome, LegFailure):
            outcome.blame(transfer)
        return outcome


async def push(legs: Legs, pair: Disaggregate, handoff: Handoff) -> Outcome:
    """Make one engine prefill into the other's blocks, and pass on both engines' output."""
    assert pair.decode is not None
    legs.begin(KVMode.PUSH)
    breakers = legs.services.breakers
    with breakers.transfer(pair.prefill, pair.decode, KVMode.PUSH, legs.story) as transfer:
        outcome = await _both(legs, pair.decode, handoff, transfer)
        if isinstance(outcome, LegFailure):  # the prefill engine may have refused the ticket
            outcome.blame(transfer)
        return outcome


async def _both(
    legs: Legs, decode: Backend, handoff: Handoff, transfer: TransferAttempt
) -> Outcome:
    ticket = _ticket(handoff.prefill, decode, legs.services)
    legs.story.receiver_sent(decode.url)
    body = legs.body.for_receiving(ticket)
    receiving = asyncio.create_task(legs.decode(decode, body, transfer, handoff))
    prefilling = asyncio.create_task(legs.prefill(handoff, ticket))
    left: list[asyncio.Task[web.StreamResponse | LegFailure | None]]
    left = [prefilling, receiving]
    try:
        await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
        if not prefilling.done():
            lost = receiving.result()
            assert isinstance(lost, LegFailure)  # it cannot end well without the handoff
            await asyncio.wait({prefilling}, timeout=_patience_s(lost))
            if not prefilling.done():
                return lost
        left.remove(prefilling)
        outcome = prefilling.result()
        if not handoff.is_complete:
            return outcome
        if legs.story.stage is Stage.PREFILL:
            legs.story.stage = Stage.TRANSFER
        return await receiving
    finally:
        for task in left:
            task.cancel()
            legs.services.http.background.start(_ended(task))


def _ticket(prefill: Backend, decode: Backend, services: Services) -> str:
    ticket = PushTicket(
        nonce=services.new_nonce(), prefill=_engine_ref(prefill), decode=_engine_ref(decode)
    )
    return TICKETS.seal(ticket, services.config.secret)


async def _ended(task: asyncio.Task[web.StreamResponse | LegFailure | None]) -> None:
    """Wait for an abandoned leg, whatever its result."""
    await asyncio.gather(task, return_exceptions=True)


def _patience_s(lost: LegFailure) -> float:
    """Return how long a prefill engine may still hand over after its receiver failed like this."""
    match lost.error:
        case WorkerError(was_taken=False) | RefusedError():
            return 0.0
        case KvFailedError():
            return PUSH_PATIENCE_S
        case _:
            return LOST_RECEIVER_PATIENCE_S


def _engine_ref(backend: Backend) -> EngineRef:
    info = backend.info
    assert info is not None  # `Backends.can_push` requires both
    assert info.kv_shape is not None
    return EngineRef(
        engine_id=info.engine_id,
        incarnation=info.incarnation,
        endpoints=tuple(info.endpoints),
        shape=info.kv_shape,
    )


async def follow(legs: Legs, setbacks: Setbacks, outcome: T) -> T | web.StreamResponse | LegFailure:
    """Continue a stream for as long as an engine ends it with a handoff.

    The handoff has all tokens so far, and a lease on their KV: an engine that reads it continues
    where the stream stopped, and sends nothing that the client has. If no engine can, the stream
    restarts elsewhere (`replay`), as if its engine had been drained without being asked.

    Args:
        outcome: A leg's outcome; one without a handoff is returned unchanged.

    Returns:
        The final outcome: the failure of a drained engine if no engine could continue.
    """
    found: T | web.StreamResponse | LegFailure = outcome
    while isinstance(found, LegFailure) and isinstance(found.error, MovedError):
        found = await _moved(legs, setbacks, found, found.error.handoff)
    return found


async def _moved(
    legs: Legs, setbacks: Setbacks, moved: LegFailure, data: bytes
) -> web.StreamResponse | LegFailure:
    source, failed, metrics = moved.backend, setbacks.failed, legs.services.metrics
    given_up = LegFailure(moved.leg, source, DrainedError(source.url))
    with Handoff(source, legs.services.http, metrics, legs.story) as handoff:
        try:
            handoff.read(data)
        except WorkerError as error:
            return LegFailure(moved.leg, source, error)
        handoff.complete()
        target = legs.services.router.decode_for(
            source, legs.prompt, failed, without={source, *failed}
        )
        outcome = given_up if target is None else await read(legs, target, handoff)
        if not isinstance(outcome, LegFailure) or outcome.is_moved:
            handoff.spend()
            metrics.migrations.labels("drain", "moved").inc()
            return outcome
    metrics.migrations.labels("drain", "failed").inc()
    if outcome is not given_up:
        await setbacks.add(outcome)
    return given_up
