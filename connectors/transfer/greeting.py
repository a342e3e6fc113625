"""The handshake of two ranks: each checks that the other is the one it expects."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pdserve.connectors.slicing import route_between
from pdserve.connectors.transfer.protocol import Hello, Refuse, RefuseReason, Welcome
from pdserve.errors import PeerError
from pdserve.observe.log import log_event
from pdserve.wire.ids import EngineId

if TYPE_CHECKING:
    from pdserve.connectors.base import ConnectorContext
    from pdserve.connectors.transfer.peering import PeerId
    from pdserve.connectors.transfer.seams import ExposedMemory
    from pdserve.wire.transfer import EngineRef, Numerics

_log = logging.getLogger(__name__)


def hello_to(
    owner: EngineRef, rank: int, context: ConnectorContext, target: ExposedMemory
) -> Hello:
    """Return D's greeting to a rank of `owner`."""
    return Hello(
        engine_id=EngineId(context.engine_id),
        incarnation=context.incarnation,
        rank=context.rank,
        wants_engine_id=owner.engine_id,
        wants_incarnation=owner.incarnation,
        wants_rank=rank,
        layout_digest=context.layout_digest,
        layout_fields=context.layout_fields,
        shape=context.shape,
        agent_metadata=target.metadata,
        pool=target.pool,
        numerics=context.numerics,
    )


class NumericsWatch:
    """Warns, once per numerics, where P's and D's text may differ from a single engine's.

    The first rank does so for its engine. A D that does not say how it rounds is not compared.
    """

    def __init__(self, mine: ConnectorContext) -> None:
        self._mine = mine
        self._known: set[Numerics | None] = {None, mine.numerics}

    def look_at(self, hello: Hello) -> None:
        """Compare the numerics with those of a D that is served."""
        here, there = self._mine.numerics, hello.numerics
        if here is None or there in self._known or self._mine.rank:
            return
        self._known.add(there)
        log_event(
            _log,
            "kv peer rounds differently: its text need not be that of one engine",
            level=logging.WARNING,
            peer=hello.engine_id,
            here=str(here),
            there=str(there),
        )


def refusal_of(mine: ConnectorContext, hello: Hello) -> Refuse | None:
    """Return why this rank of P refuses a D with this greeting; None = it serves it."""
    if (hello.wants_engine_id, hello.wants_incarnation) != (mine.engine_id, mine.incarnation):
        return Refuse(
            RefuseReason.STALE,
            f"the handoff is of {hello.wants_engine_id} incarnation "
            f"{hello.wants_incarnation}, this is {mine.engine_id} incarnation "
            f"{mine.incarnation}",
        )
    if hello.wants_rank != mine.rank:
        return Refuse(
            RefuseReason.INCOMPATIBLE,
            f"rank {hello.rank} of {hello.engine_id} wants rank {hello.wants_rank} of "
            f"{mine.engine_id}, this is its rank {mine.rank}",
        )
    if hello.layout_digest != mine.layout_digest:
        names = sorted({*hello.layout_fields, *mine.layout_fields})
        differ = [
            f"{name} is {mine.layout_fields.get(name)} at {mine.engine_id} and "
            f"{hello.layout_fields.get(name)} at {hello.engine_id}"
            for name in names
            if mine.layout_fields.get(name) != hello.layout_fields.get(name)
        ] or [f"digest is {mine.layout_digest} and {hello.layout_digest}"]
        return Refuse(RefuseReason.INCOMPATIBLE, "KV layouts differ: " + ", ".join(differ))
    try:
        route_between(mine.shape, hello.shape, mine.rank, hello.rank)
    except PeerError as error:
        return Refuse(RefuseReason.INCOMPATIBLE, f"{hello.engine_id} and {mine.engine_id}: {error}")
    return None


def why_incompatible(welcome: Welcome, peer: PeerId) -> str | None:
    """Return why a P with this greeting is not the intended one; None = it is."""
    expected = peer.owner.shape
    if welcome.shape != expected:
        return f"the handoff gives {peer} the shape {expected}, but it has {welcome.shape}"
    why = welcome.pool.why_not_blocks_of(expected, peer.rank)
    return None if why is None else f"{peer} {why}"
