"""Whether a handoff or a ticket can be believed and used here, decided before anything of it is.

Pure functions over what came with a request and what this engine is. They know neither
leases nor transfers: a handoff that is good here may be of a lease that has ended.

Every answer names both values, because two deployments are usually involved in finding out
why.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pdserve.connectors.slicing import mismatch
from pdserve.wire.hashing import prompt_digest

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pdserve.connectors.base import ConnectorContext
    from pdserve.wire.transfer import Endpoint, EngineRef, KVHandoff, KVShape, PushTicket

_SAME_IN_ALL_SHAPES: Final = (
    "num_layers",
    "num_planes",
    "num_kv_heads",
    "head_dim",
    "dtype_bytes",
)


def why_not_handoff(
    handoff: KVHandoff,
    mine: ConnectorContext,
    *,
    secret: bytes,
    prompt_token_ids: Sequence[int],
    cache_salt: str,
    ticket: PushTicket | None = None,
) -> str | None:
    """Why this engine cannot use `handoff` for that prompt; None = it can.

    Args:
        ticket: Of the push that the handoff came with, if it did.
    """
    owner = handoff.engine_id
    if not handoff.is_authentic(secret):
        return _not_authentic(f"it says it is from {owner}")
    if ticket is not None:
        theirs = (handoff.nonce, owner, handoff.incarnation)
        planned = (ticket.nonce, ticket.prefill.engine_id, ticket.prefill.incarnation)
        if theirs != planned:
            return f"(nonce, engine, incarnation) is {theirs} and the ticket's {planned}"
    why = _why_not_peer(owner, handoff.shape, handoff.endpoints, mine)
    if why is not None:
        return why
    num_tokens = len(prompt_token_ids)
    num_blocks = -(-num_tokens // handoff.shape.block_size)
    why = _first_difference(
        owner,
        mine,
        (
            ("layout digest", handoff.layout_digest, mine.layout_digest),
            ("prompt tokens", handoff.num_tokens, num_tokens),
            ("prompt digest", handoff.prompt_digest, prompt_digest(prompt_token_ids, cache_salt)),
        ),
    )
    if why is not None:
        return why
    for what, listed in (
        ("number of blocks", handoff.block_ids),
        ("number of generations", handoff.generations),
    ):
        if len(listed) != num_blocks:
            return (
                f"{what} is {len(listed)} at {owner} and {num_tokens} tokens in its blocks of "
                f"{handoff.shape.block_size} are {num_blocks}"
            )
    # Without a secret anybody on this machine can sign, and block ids become addresses.
    if not all(0 <= block_id < handoff.shape.num_blocks for block_id in handoff.block_ids):
        return f"it names blocks that {owner} cannot have: it has {handoff.shape.num_blocks}"
    if not handoff.lease_s > 0:
        return f"its lease at {owner} lasts {handoff.lease_s} s, which must be above 0"
    return None


def why_not_ticket(
    ticket: PushTicket, mine: ConnectorContext, *, secret: bytes, is_prefill: bool
) -> str | None:
    """Why this engine cannot be the end of `ticket` that it is to be; None = it can."""
    here, peer = (ticket.prefill, ticket.decode) if is_prefill else (ticket.decode, ticket.prefill)
    if not ticket.is_authentic(secret):
        return _not_authentic(f"it says it is for {here.engine_id}")
    if (here.engine_id, here.incarnation) != (mine.engine_id, mine.incarnation):
        return (
            f"it is for {'prefill' if is_prefill else 'decode'} at {_life(here)}, and this is "
            f"{mine.engine_id} incarnation {mine.incarnation}"
        )
    return _why_not_peer(peer.engine_id, peer.shape, peer.endpoints, mine)


def _why_not_peer(
    peer: str, shape: KVShape, endpoints: Sequence[Endpoint], mine: ConnectorContext
) -> str | None:
    why = _first_difference(
        peer,
        mine,
        (
            (name.replace("_", " "), getattr(shape, name), getattr(mine.shape, name))
            for name in _SAME_IN_ALL_SHAPES
        ),
    )
    if why is not None:
        return why
    why = mismatch(shape, mine.shape)
    if why is not None:
        return f"{peer} cannot have its shape: {why}"
    if len(endpoints) != shape.num_ranks:
        return f"number of ranks is {shape.num_ranks} at {peer}, with {len(endpoints)} endpoints"
    return None


def _first_difference(
    peer: str, mine: ConnectorContext, values: Iterable[tuple[str, object, object]]
) -> str | None:
    for what, theirs, ours in values:
        if theirs != ours:
            return f"{what} is {theirs} at {peer} and {ours} at {mine.engine_id}"
    return None


def _not_authentic(claim: str) -> str:
    return (
        "its signature is not this deployment's: engines need the same secret, given to "
        f"each as PDSERVE_SECRET ({claim})"
    )


def _life(ref: EngineRef) -> str:
    return f"{ref.engine_id} incarnation {ref.incarnation}"
