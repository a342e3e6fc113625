"""Decides whether a handoff or ticket can be trusted and used, before any of it is used.

Pure functions of a request's handoff or ticket and this engine's context. They know neither
leases nor transfers: a handoff that passes may belong to a lease that has ended.

Every answer names both values, because finding the reason usually involves two deployments.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from pdserve.connectors.slicing import mismatch
from pdserve.wire.ids import prompt_digest
from pdserve.wire.transfer import MAX_LEASE_S, MAX_NAME_CHARS, MAX_TICKET_S, MIN_LEASE_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.connectors.base import ConnectorContext
    from pdserve.connectors.views import RequestView
    from pdserve.wire.transfer import Endpoint, KVHandoff, KVShape, PushTicket


def why_not_handoff(handoff: KVHandoff, request: RequestView, mine: ConnectorContext) -> str | None:
    """Return why this engine cannot use `handoff` for a request; None = it can."""
    owner, ticket = handoff.engine_id, request.kv_transfer_params.ticket
    if ticket is not None:
        named = (handoff.nonce, owner, handoff.incarnation)
        planned = (ticket.nonce, ticket.prefill.engine_id, ticket.prefill.incarnation)
        if named != planned:
            return f"(nonce, engine, incarnation) is {named} and the ticket's {planned}"
    why = _why_not_peer(owner, handoff.shape, handoff.endpoints, mine)
    if why is not None:
        return why
    prompt = request.prompt_token_ids
    num_tokens = len(prompt) + len(handoff.first_token_ids) - 1
    num_blocks = -(-num_tokens // handoff.shape.block_size)
    for what, theirs, ours in (
        ("layout digest", handoff.layout_digest, mine.layout_digest),
        ("tokens", handoff.num_tokens, num_tokens),
        ("prompt digest", handoff.prompt_digest, prompt_digest(prompt, request.cache_salt)),
    ):
        if theirs != ours:
            return f"{what} is {theirs} at {owner} and {ours} at {mine.engine_id}"
    for what, listed in (
        ("number of blocks", handoff.block_ids),
        ("number of generations", handoff.generations),
    ):
        if len(listed) != num_blocks:
            return (
                f"{what} is {len(listed)} at {owner}, but {num_tokens} tokens in its blocks of "
                f"{handoff.shape.block_size} need {num_blocks}"
            )
    if not all(0 <= block_id < handoff.shape.num_blocks for block_id in handoff.block_ids):
        return f"it names blocks outside the {handoff.shape.num_blocks} of {owner}"
    if not all(0 <= generation < 1 << 63 for generation in handoff.generations):
        return f"it names impossible generations of blocks of {owner}"
    if not MIN_LEASE_S <= handoff.lease_s <= MAX_LEASE_S:
        return (
            f"its lease at {owner} lasts {handoff.lease_s} s, which must be from {MIN_LEASE_S} to "
            f"{MAX_LEASE_S:g}"
        )
    return _why_not_name("nonce", handoff.nonce)


def why_not_ticket(ticket: PushTicket, mine: ConnectorContext, *, is_prefill: bool) -> str | None:
    """Return why this engine cannot serve its end of `ticket`; None = it can."""
    here, peer = (ticket.prefill, ticket.decode) if is_prefill else (ticket.decode, ticket.prefill)
    if (here.engine_id, here.incarnation) != (mine.engine_id, mine.incarnation):
        return (
            f"it is for {'prefill' if is_prefill else 'decode'} at {here.engine_id} incarnation "
            f"{here.incarnation}, and this is {mine.engine_id} incarnation {mine.incarnation}"
        )
    why = _why_not_peer(peer.engine_id, peer.shape, peer.endpoints, mine)
    if why is not None:
        return why
    if not 0 < ticket.valid_s <= MAX_TICKET_S:
        return (
            f"it is valid for {ticket.valid_s} s: it must be above 0 and at most {MAX_TICKET_S:g}"
        )
    return _why_not_name("nonce", ticket.nonce)


def _why_not_peer(
    peer: str, shape: KVShape, endpoints: Sequence[Endpoint], mine: ConnectorContext
) -> str | None:
    why = mismatch(shape, mine.shape, (peer, mine.engine_id))
    if why is not None:
        return why
    if len(endpoints) != shape.num_ranks:
        return f"number of ranks is {shape.num_ranks} at {peer}, with {len(endpoints)} endpoints"
    for endpoint in endpoints:
        why = _why_not_endpoint(endpoint, has_secret=bool(mine.config.transfer.secret))
        if why is not None:
            return f"{peer} cannot listen on {endpoint.host}:{endpoint.port}: {why}"
    return _why_not_name("engine id", peer)


def _why_not_endpoint(endpoint: Endpoint, *, has_secret: bool) -> str | None:
    """Return why no engine can be at an endpoint; connecting could serve an attacker.

    A host that is not an IP address belongs to a connector that opens no sockets.
    """
    if not 0 < endpoint.port < 1 << 16:
        return "there is no such port"
    try:
        address = ipaddress.ip_address(endpoint.host)
    except ValueError:
        return _why_not_name("host", endpoint.host)
    if address.is_unspecified or address.is_multicast:
        return "it is not the address of a host"
    if not (has_secret or address.is_loopback):
        return "without a secret an engine meets only engines on its own host: set PDSERVE_SECRET"
    return None


def _why_not_name(what: str, name: str) -> str | None:
    """Return why a name is too long, or empty."""
    if not 0 < len(name) <= MAX_NAME_CHARS:
        return f"its {what} has {len(name)} characters: it must have 1 to {MAX_NAME_CHARS}"
    return None
