"""Scheduler halves alone, and the handoffs, tickets and reports that tests give them."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec

from pdserve.config.schema import EngineConfig, ModelConfig, TransferConfig
from pdserve.connectors.base import ConnectorContext, KVLayout, Match
from pdserve.connectors.conformance.engines import prompt_of
from pdserve.connectors.handover.instructions import (
    Instructions,
    Load,
    PushNews,
    Registered,
    Reserve,
    Withdrawn,
)
from pdserve.connectors.handover.scheduler import HandoverScheduler
from pdserve.errors import HandoffRefusedError
from pdserve.observe.clock import ManualClock
from pdserve.wire.ids import BlockId, EngineId, Incarnation, RequestId
from pdserve.wire.request import FinishReason
from pdserve.wire.transfer import (
    ConnectorReport,
    Endpoint,
    EngineRef,
    Failed,
    KVHandoff,
    LoadFailure,
    PushTicket,
    Received,
)
from tests.connectors.engines import FakeRequest, layout

PROMPT = prompt_of(40)
NOTHING = Match(0, is_async=False)
PINNED = Match(0, is_async=False, is_pinned=True)
ENDPOINTS = [Endpoint(host="127.0.0.1", port=port) for port in (1, 2, 3)]


def scheduler(
    engine_id: str = "P",
    shape: KVLayout | None = None,
    digest: str = "d",
    num_ranks: int = 1,
    kv_shape: dict[str, Any] | None = None,
    clock: ManualClock | None = None,
    **transfer: Any,
) -> HandoverScheduler:
    context = ConnectorContext(
        config=EngineConfig(model=ModelConfig(model="m"), transfer=TransferConfig(**transfer)),
        engine_id=engine_id,
        incarnation=Incarnation(f"life of {engine_id}"),
        layout=shape or layout(),
        layout_digest=digest,
        layout_fields={},
        shape=msgspec.structs.replace(
            (shape or layout()).shape_of_one_rank(),
            **{"tp_size": num_ranks, "num_kv_heads": 2 * num_ranks, **(kv_shape or {})},
        ),
    )
    count = itertools.count()
    return HandoverScheduler(
        context,
        ENDPOINTS[:num_ranks],
        new_nonce=lambda: f"nonce-{next(count)}",
        clock=clock or ManualClock(),
    )


def blocks(*ids: int) -> list[BlockId]:
    return [BlockId(i) for i in ids]


def handed_off(p: HandoverScheduler | None = None, prompt: list[int] = PROMPT) -> KVHandoff:
    request = FakeRequest(RequestId("p"), prompt, output_token_ids=[7], remote_decode=True)
    return handed_over(p or scheduler(), request, blocks(3, 4, 5, 6), [1] * 4)


def handed_over(
    p: HandoverScheduler, request: FakeRequest, table: list[BlockId], generations: list[int]
) -> KVHandoff:
    request.finish_reason = FinishReason.HANDOFF
    hold = p.request_finished(request, table, generations)
    assert hold is not None
    assert hold.handoff is not None
    assert hold.hold_id == hold.handoff.nonce
    return hold.handoff


def aborted(half: HandoverScheduler, request: FakeRequest) -> bool:
    """Whether its blocks are held."""
    request.finish_reason = FinishReason.ABORT
    return half.request_finished(request, (), ()) is not None


def give_up(p: HandoverScheduler, nonce: str) -> None:
    p.update_connector_output(ConnectorReport(given_up=[nonce]))


def refusal_of(half: HandoverScheduler, request: FakeRequest) -> str | None:
    try:
        half.request_arrived(request)
    except HandoffRefusedError as error:
        what = "ticket" if request.handoff is None else "handoff"
        return str(error).removeprefix(f"{what} refused: ")
    return None


def retries(d: HandoverScheduler, failed: Failed) -> bool:
    """Tell of a failed load; whether it is tried once more."""
    return bool(d.update_connector_output(ConnectorReport(failed=[failed])).retried)


def staged(half: HandoverScheduler) -> Instructions:
    metadata = half.take_instructions()
    assert half.take_instructions() is None
    return Instructions() if metadata is None else Instructions.from_metadata(metadata)


def queued(d: HandoverScheduler, **changes: Any) -> FakeRequest:
    request = FakeRequest(RequestId("d"), PROMPT, handoff=handed_off(), **changes)
    d.request_arrived(request)
    return request


def failure(
    load: Load | Reserve, reason: LoadFailure = LoadFailure.DIGEST, num_valid_tokens: int = 0
) -> Failed:
    return Failed(
        request_id=load.request_id,
        reason=reason,
        load_id=load.load_id,
        num_valid_tokens=num_valid_tokens,
    )


def arrival(load: Load | Reserve, handoff: KVHandoff | None = None) -> Received:
    return Received(
        request_id=load.request_id,
        num_bytes=1,
        num_descriptors=1,
        wait_s=0,
        transfer_s=0,
        load_id=load.load_id,
        handoff=handoff,
    )


def end_of(engine_id: str) -> EngineRef:
    return EngineRef(
        engine_id=EngineId(engine_id),
        incarnation=Incarnation(f"life of {engine_id}"),
        endpoints=tuple(ENDPOINTS[:1]),
        shape=layout().shape_of_one_rank(),
    )


def ticket(nonce: str = "push", **changes: Any) -> PushTicket:
    fields = {"prefill": end_of("P"), "decode": end_of("D"), **changes}
    return PushTicket(nonce=nonce, **fields)


def prefill_of(
    planned: PushTicket, request_id: str = "p", *, arrival_s: float = 1000.0
) -> FakeRequest:
    return FakeRequest(
        RequestId(request_id), PROMPT, arrival_s=arrival_s, remote_decode=True, ticket=planned
    )


def decode_of(planned: PushTicket) -> FakeRequest:
    return FakeRequest(RequestId("d"), PROMPT, ticket=planned)


def pushed(*, registered: str = "", withdrawn: str = "", rank: int = 0) -> list[bytes]:
    """What a rank of P says of the pushes of these names."""
    return PushNews(
        rank=rank,
        registered=[Registered(nonce=registered)] if registered else [],
        withdrawn=[Withdrawn(nonce=withdrawn)] if withdrawn else [],
    ).to_payloads()


def registered(p: HandoverScheduler, nonce: str = "push") -> FakeRequest:
    """A request at P whose D has registered and whose blocks are taken."""
    request = prefill_of(ticket(nonce))
    p.request_arrived(request)
    p.update_connector_output(ConnectorReport(payloads=pushed(registered=nonce)))
    p.update_state_after_alloc(request, blocks(3, 4, 5), 0, generations=[7, 8, 9])
    staged(p)
    return request
