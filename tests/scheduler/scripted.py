"""A scheduler whose connector does what the test says, and the values that go with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from pdserve.connectors.base import ConnectorNews, Hold, KVConnectorScheduler, KVSource, Match
from pdserve.errors import HandoffRefusedError
from pdserve.observe.clock import ManualClock
from pdserve.wire.ids import BlockId, EngineId, Incarnation, RequestId
from pdserve.wire.request import FinishReason, GenerateRequest, OnLoadFailure
from pdserve.wire.transfer import (
    ConnectorReport,
    EngineRef,
    Failed,
    Fetched,
    KVHandoff,
    KVMode,
    KVShape,
    LeaseEnd,
    LoadFailure,
    PushTicket,
    Received,
    Settled,
)
from tests.toy import HeldEngine, sampling, toy_config
from tests.toy_executor import toy_shape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.connectors.views import RequestView, StepView
    from pdserve.wire.transfer import ConnectorMetadata

NONCE = "push-1"
BLOCK_SIZE = 8
_SHAPE = KVShape(
    num_blocks=16,
    num_layers=1,
    num_planes=2,
    num_kv_heads=1,
    head_dim=1,
    dtype_bytes=8,
    block_size=BLOCK_SIZE,
)


class ScriptedConnector(KVConnectorScheduler):
    """Grants what its attributes say.

    Attributes:
        refusals: Why requests are refused, by the nonce of what they come with.
        offers: What is matched beyond what is found here, by request id.
        is_registered: At P: whether D has registered its blocks.
        is_read: At P: whether a push's blocks are held at its end, once it has begun.
        saving: Requests whose blocks are read by a save.
        savers: Connectors that each hold them for theirs.
        is_elsewhere: Another source has what a load that fails has not brought.
        num_retries: How many failed loads are tried again.
        ended: How requests ended, by id.
        tables: What blocks were held for, by request id, and their generations.
        chunks: What it saw of the chunks of prompts that will be handed over: request id, blocks,
            generations, first and end token.
        fails_over: The request, or the push, over which steps and reports raise.
        num_asked: Calls of `get_num_new_matched_tokens`.
        reports: What it was told.
        fetched: What it says with its next news.
    """

    hands_over = True

    def __init__(self) -> None:
        self.refusals: dict[str, str] = {}
        self.offers: dict[str, Match] = {}
        self.is_registered = False
        self.is_read = True
        self.saving: set[str] = set()
        self.savers = [""]
        self.is_elsewhere = False
        self.num_retries = 0
        self.ended: dict[RequestId, FinishReason | None] = {}
        self.tables: dict[RequestId, tuple[list[BlockId], list[int]]] = {}
        self.chunks: list[tuple[RequestId, list[BlockId], list[int], int, int]] = []
        self.fails_over = ""
        self.num_asked = 0
        self.reports: list[ConnectorReport] = []
        self.fetched: list[Fetched] = []
        self.holds: list[str] = []
        self._by_ticket: dict[str, RequestId] = {}
        self._prefills: set[RequestId] = set()

    def request_arrived(self, request: RequestView) -> KVSource:
        """See `KVConnectorScheduler`."""
        for each in (request.handoff, request.kv_transfer_params.ticket):
            if each is not None and each.nonce in self.refusals:
                raise HandoffRefusedError(self.refusals[each.nonce])
        if request.kv_transfer_params.ticket is not None:
            self._by_ticket[request.kv_transfer_params.ticket.nonce] = request.request_id
        if request.remote_decode:
            self._prefills.add(request.request_id)
        if request.kv_transfer_params.ticket is not None and not request.remote_decode:
            return KVSource.PLANNED
        return KVSource.LOCAL if request.handoff is None else KVSource.READY

    def get_num_new_matched_tokens(
        self, request: RequestView, num_computed_tokens: int
    ) -> Match | None:
        """See `KVConnectorScheduler`."""
        self.num_asked += 1
        if request.request_id in self.offers:
            return self.offers[request.request_id]
        is_push = request.kv_transfer_params.ticket is not None
        if request.remote_decode and is_push:
            return Match(0, is_async=False, is_pinned=True) if self.is_registered else None
        is_offered = is_push or request.handoff is not None
        num_tokens = len(request.prompt_token_ids) - num_computed_tokens if is_offered else 0
        return Match(max(0, num_tokens), is_async=num_tokens > 0, is_pinned=is_push)

    def update_state_after_alloc(
        self,
        request: RequestView,
        block_ids: Sequence[BlockId],
        num_external_tokens: int,
        *,
        generations: Sequence[int] = (),
    ) -> None:
        """See `KVConnectorScheduler`."""
        self.tables[request.request_id] = (list(block_ids), list(generations))
        if num_external_tokens:
            self.offers.pop(request.request_id, None)

    def build_connector_meta(self, step: StepView) -> ConnectorMetadata | None:
        """See `KVConnectorScheduler`."""
        for request_id in step:
            if request_id not in self._prefills:
                continue
            view, blocks, generations, start, end = step.get(request_id)
            self._fail_over(request_id)
            if end < len(view.prompt_token_ids):
                self.chunks.append((request_id, list(blocks), list(generations), start, end))
        return None

    def take_instructions(self) -> ConnectorMetadata | None:
        """See `KVConnectorScheduler`."""
        return None

    def preempted(
        self, request: RequestView, block_ids: Sequence[BlockId], generations: Sequence[int]
    ) -> Hold | None:
        """See `KVConnectorScheduler`."""
        return self._hold(request, block_ids)

    def request_finished(
        self, request: RequestView, block_ids: Sequence[BlockId], generations: Sequence[int]
    ) -> Hold | None:
        """See `KVConnectorScheduler`."""
        assert request.request_id not in self.ended, "ended twice"
        self.ended[request.request_id] = request.finish_reason
        nonce = (
            NONCE
            if request.kv_transfer_params.ticket is None
            else request.kv_transfer_params.ticket.nonce
        )
        if request.finish_reason is FinishReason.HANDOFF:
            tokens = list(request.output_token_ids)
            handoff = make_handoff(nonce, tokens, request_id=request.request_id)
            saved = self._hold(request, block_ids)
            return Hold(nonce, handoff, others=() if saved is None else (saved,))
        is_live = (
            request.remote_decode
            and request.kv_transfer_params.ticket is not None
            and self.is_registered
        )
        if self.is_read and is_live:
            return Hold(nonce)
        return self._hold(request, block_ids)

    def _fail_over(self, name: str) -> None:
        if name == self.fails_over:
            raise ZeroDivisionError("nobody thought of this")

    def _hold(self, request: RequestView, block_ids: Sequence[BlockId]) -> Hold | None:
        if request.request_id not in self.saving or not block_ids:
            return None
        self.holds.append(f"save {len(self.holds)}")
        first, *others = [Hold(self.holds[-1], connector=each) for each in self.savers]
        return msgspec.structs.replace(first, others=tuple(others))

    def update_connector_output(self, report: ConnectorReport) -> ConnectorNews:
        """See `KVConnectorScheduler`."""
        told = [payload.decode() for payload in report.payloads]
        for name in [*told, *(fact.request_id for fact, _ in report.one_by_one() if fact)]:
            self._fail_over(name)
        self.reports.append(report)
        wanted = [each for each in report.failed if each.request_id not in self.ended]
        retried = wanted[: max(0, self.num_retries)]
        self.num_retries -= len(wanted)
        fetched, self.fetched = self.fetched, []
        lost = [each for each in report.failed if each not in retried]
        return ConnectorNews(
            fetched=fetched,
            loaded=report.received,
            failed=[] if self.is_elsewhere else lost,
            elsewhere=lost if self.is_elsewhere else [],
            retried=retried,
            released=report.settled,
            ready=[(self._by_ticket[each], "ready") for each in told if each in self._by_ticket],
        )


class Engine(HeldEngine):
    """A core over toy ranks, whose connector is scripted; what the ranks report is the test's."""

    def __init__(
        self,
        *,
        num_blocks: int = 16,
        max_model_len: int = 48,
        num_stages: int = 1,
        ahead_s: float = 0.0,
        **fields: Any,
    ) -> None:
        self.connector = ScriptedConnector()
        super().__init__(
            toy_config(num_stages=num_stages, **fields),
            toy_shape(num_blocks, BLOCK_SIZE),
            half=self.connector,
            clock=ManualClock(ahead_s=ahead_s),
            max_model_len=max_model_len,
            depth=num_stages,
        )

    def fill(self, prompt: Sequence[int], request_id: str, num_tokens: int | None = None) -> None:
        """Write the right KV of a prompt, or of its beginning, where `request_id` wants it."""
        blocks, _ = self.connector.tables[RequestId(request_id)]
        self.executor.write_prompt(prompt[:num_tokens], blocks)


def make_ticket(nonce: str = NONCE) -> PushTicket:
    """A ticket of a push from p to d."""
    prefill, decode = (
        EngineRef(
            engine_id=EngineId(name),
            incarnation=Incarnation(f"{name}-1"),
            endpoints=(),
            shape=_SHAPE,
        )
        for name in "pd"
    )
    return PushTicket(nonce=nonce, prefill=prefill, decode=decode)


def make_handoff(
    nonce: str,
    first_token_ids: list[int],
    *,
    request_id: str = "p",
    num_tokens: int = 20,
    num_cached_tokens: int = 0,
) -> KVHandoff:
    """What P gives; nobody here looks at what is signed."""
    return KVHandoff(
        engine_id=EngineId("p"),
        incarnation=Incarnation("p-1"),
        nonce=nonce,
        request_id=RequestId(request_id),
        endpoints=[],
        block_ids=[],
        shape=_SHAPE,
        num_tokens=num_tokens,
        layout_digest="toy",
        lease_s=30.0,
        prompt_digest="",
        first_token_ids=first_token_ids,
        num_cached_tokens=num_cached_tokens,
    )


def make_request(
    request_id: str,
    prompt: Sequence[int],
    max_tokens: int = 8,
    *,
    remote_decode: bool = False,
    ticket: PushTicket | None = None,
    handoff: KVHandoff | None = None,
    deadline_s: float | None = None,
    on_load_failure: OnLoadFailure = OnLoadFailure.RECOMPUTE,
    is_fallback: bool = False,
    **fields: Any,
) -> GenerateRequest:
    """A request with toy sampling; `fields` are the sampling's."""
    fields = {"ignore_eos": True, **fields}
    return GenerateRequest(
        request_id=RequestId(request_id),
        prompt_token_ids=list(prompt),
        sampling=msgspec.structs.replace(sampling(max_tokens), **fields),
        arrival_s=1000.0,
        remote_decode=remote_decode,
        ticket=ticket,
        handoff=handoff,
        deadline_s=deadline_s,
        on_load_failure=on_load_failure,
        is_fallback=is_fallback,
    )


def received(
    request_id: str,
    *,
    handoff: KVHandoff | None = None,
    mode: KVMode = KVMode.PULL,
    wait_s: float = 0.0,
    transfer_s: float = 0.0,
    **fields: Any,
) -> Received:
    """A load is complete."""
    return Received(
        request_id=RequestId(request_id),
        num_bytes=100,
        num_descriptors=1,
        wait_s=wait_s,
        transfer_s=transfer_s,
        mode=mode,
        handoff=handoff,
        **fields,
    )


def failed(
    request_id: str, reason: LoadFailure = LoadFailure.PEER_LOST, *, num_valid_tokens: int = 0
) -> Failed:
    """A load has failed."""
    return Failed(
        request_id=RequestId(request_id), reason=reason, num_valid_tokens=num_valid_tokens
    )


def settled(
    request_id: str, end: LeaseEnd = LeaseEnd.READ, *, nonce: str = NONCE, connector: str = ""
) -> Settled:
    """Nobody reads the blocks any more."""
    return Settled(request_id=RequestId(request_id), end=end, nonce=nonce, connector=connector)


def told_of(nonce: str = NONCE) -> bytes:
    """A worker half's word to the scripted one: whoever waits for this is to be asked again."""
    return nonce.encode()
