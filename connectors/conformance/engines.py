"""Engines without a model, which drive both halves of a connector as an engine core would.

Like `EngineCore.step`, `step` sends out instructions and brings reports back through a `Quorum`.
The test names the blocks, and their contents show who wrote them (`values`). There is no real
scheduler: the test decides who waits for what.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from pdserve.config.schema import CacheConfig, EngineConfig, ModelConfig, TransferConfig
from pdserve.connectors.base import ConnectorContext, ConnectorNews
from pdserve.connectors.conformance.values import Share, by_token, make_shape, write_tokens
from pdserve.connectors.quorum import Quorum
from pdserve.connectors.views import ScheduledRequest, StepView
from pdserve.errors import HandoffRefusedError
from pdserve.wire.ids import (
    BlockHash,
    BlockId,
    EngineId,
    Incarnation,
    RequestId,
    block_hash,
    root_hash,
)
from pdserve.wire.request import FinishReason, OnLoadFailure
from pdserve.wire.transfer import (
    BlockOrder,
    ConnectorReport,
    EngineRef,
    Failed,
    KVHandoff,
    Received,
    Settled,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.connectors.base import KVConnectorBase
    from pdserve.wire.sampling import TokenLogprobs
    from pdserve.wire.transfer import ConnectorMetadata, Endpoint, KVShape, PushTicket

SECRET = "the conformance kit's"
FIRST_TOKEN = 7
_DTYPE = "float32"
_ALL_LAYERS = slice(None)


@dataclass
class KitRequest:
    """A request as a connector sees it, at an engine whose blocks have `block_size` tokens."""

    request_id: RequestId
    prompt_token_ids: list[int]
    output_token_ids: list[int] = field(default_factory=list)
    first_logprobs: list[TokenLogprobs] | None = None
    num_cached_prompt_tokens: int = 0
    cache_salt: str = ""
    arrival_s: float = math.inf
    remote_decode: bool = False
    handoff: KVHandoff | None = None
    ticket: PushTicket | None = None
    on_load_failure: OnLoadFailure = OnLoadFailure.REPORT
    finish_reason: FinishReason | None = None
    is_unproven: bool = False
    block_size: int = 16

    @property
    def kv_transfer_params(self) -> KitRequest:
        """See `RequestView`."""
        return self

    @property
    def prompt_block_hashes(self) -> list[BlockHash]:
        """See `RequestView`."""
        hashes: list[BlockHash] = []
        parent, size = root_hash(self.cache_salt), self.block_size
        for end in range(size, len(self.prompt_token_ids) + 1, size):
            parent = block_hash(parent, self.prompt_token_ids[end - size : end])
            hashes.append(parent)
        return hashes


def prompt_of(num_tokens: int) -> list[int]:
    """Return a prompt of `num_tokens` tokens."""
    return list(range(100, 100 + num_tokens))


class Rank:
    """One worker half with its own blocks."""

    def __init__(
        self, connector: KVConnectorBase, context: ConnectorContext, wake: Callable[[], None]
    ) -> None:
        layout = context.layout
        self._context = context
        self.share = Share(context.shape, context.rank)
        self.worker = connector.make_worker(context, wake)
        inner = [layout.num_kv_heads, layout.block_size]
        if context.shape.order is BlockOrder.NHD:
            inner.reverse()
        self.kv = torch.zeros(
            layout.num_blocks,
            layout.num_layers,
            layout.num_planes,
            *inner,
            layout.head_dim,
            dtype=getattr(torch, layout.dtype),
        )
        self.endpoint: Endpoint | None = self.worker.register_kv_caches(self.kv, layout)

    def write(
        self, blocks: Sequence[int], seed: int, first: int, end: int, *, layers: slice = _ALL_LAYERS
    ) -> None:
        """Write the tokens `first` to `end` of a table as `seed` would."""
        values = self.share.values(seed, range(first, end), self._context.layout.dtype)
        write_tokens(self.kv[:, layers], blocks, self._context.shape, first, values[:, layers])

    def holds(
        self, blocks: Sequence[int], seed: int, first: int, end: int, *, layers: slice = _ALL_LAYERS
    ) -> bool:
        """Whether the tokens `first` to `end` of a table are what `seed` would have written."""
        found = by_token(self.kv[:, layers], blocks, self._context.shape)[first:end]
        wanted = self.share.values(seed, range(first, end), self._context.layout.dtype)
        return torch.equal(found, wanted[:, layers])


class Engine:
    """A scheduler half and, for each rank, a worker half with a pool of blocks.

    Args:
        transfer: Fields of `TransferConfig`.

    Attributes:
        news: Set whenever a worker half signals that `get_finished` has something.
        settled, received, failed, faults: What all ranks have seen; of several holds, the first.
        ready: Requests that were reported as ready, and why.
        retried: Failed loads that the scheduler half has retried; they are not in `failed`.
        said: Each rank's reports, in order, before the quorum.
        endpoints: Endpoints of the ranks, in order; empty if the connector has no peers.
    """

    def __init__(
        self,
        connector: KVConnectorBase,
        engine_id: str,
        *,
        shape: KVShape | None = None,
        incarnation: str = "",
        dtype: str = _DTYPE,
        **transfer: Any,
    ) -> None:
        shape = msgspec.structs.replace(
            shape or make_shape(), dtype_bytes=getattr(torch, dtype).itemsize
        )
        layout = Share(shape, 0).layout(dtype)
        whole = msgspec.structs.replace(
            layout, num_layers=shape.num_layers, num_kv_heads=shape.num_kv_heads
        )
        fields = whole.fields(model="kit", weights="kit")
        self.context = ConnectorContext(
            config=EngineConfig(
                model=ModelConfig(model="kit"),
                engine_id=engine_id,
                cache=CacheConfig(block_size=shape.block_size),
                transfer=TransferConfig(**{"secret": SECRET, **transfer}),
            ),
            engine_id=EngineId(engine_id),
            incarnation=Incarnation(incarnation or os.urandom(8).hex()),
            layout=layout,
            layout_digest="|".join(f"{name}={value}" for name, value in sorted(fields.items())),
            layout_fields=fields,
            shape=shape,
        )
        self.news = threading.Event()
        self.ranks = [self.make_rank(connector, rank, dtype) for rank in range(shape.num_ranks)]
        self.endpoints = tuple(rank.endpoint for rank in self.ranks if rank.endpoint is not None)
        self.scheduler = connector.make_scheduler(self.context, self.endpoints)
        self.quorum = Quorum(shape.num_ranks)
        self.settled: list[Settled] = []
        self.received: list[Received] = []
        self.failed: list[Failed] = []
        self.retried: list[Failed] = []
        self.ready: list[tuple[RequestId, str]] = []
        self.faults: Counter[str] = Counter()
        self.said: list[tuple[int, ConnectorReport]] = []
        self._num_requests, self._other_holds = 0, set[str]()

    def make_rank(self, connector: KVConnectorBase, rank: int, dtype: str) -> Rank:
        """Make one of the ranks."""
        layout = Share(self.context.shape, rank).layout(dtype)
        context = msgspec.structs.replace(self.context, layout=layout, rank=rank)
        return Rank(connector, context, self.news.set)

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.context.shape.block_size

    def num_bytes(self, num_tokens: int) -> int:
        """Return the bytes of `num_tokens` tokens on all ranks together."""
        bits = sum(len(rank.share.layers) * len(rank.share.heads) for rank in self.ranks)
        shape = self.context.shape
        return bits * shape.num_planes * shape.head_dim * shape.dtype_bytes * num_tokens

    # --- memory

    def write(self, blocks: Sequence[int], seed: int, first: int, end: int) -> None:
        """Write the tokens `first` to `end` of a table as `seed` would, on every rank."""
        for rank in self.ranks:
            rank.write(blocks, seed, first, end)

    def fill(self, blocks: Sequence[int], seed: int) -> None:
        """Fill the blocks with tokens as `seed` would."""
        self.write(blocks, seed, 0, len(blocks) * self.block_size)

    def holds(self, blocks: Sequence[int], seed: int, first: int, end: int) -> bool:
        """Whether every rank has, for the tokens `first` to `end`, what `seed` wrote."""
        return all(rank.holds(blocks, seed, first, end) for rank in self.ranks)

    def snapshot(self, blocks: Sequence[int]) -> list[torch.Tensor]:
        """Return a copy of some blocks of every rank."""
        return [rank.kv[list(blocks)].clone() for rank in self.ranks]

    # --- the life of a request

    def new_request(self, prompt: list[int], **fields: Any) -> KitRequest:
        """Make a request with a unique id."""
        self._num_requests += 1
        return KitRequest(
            RequestId(f"{self.context.engine_id}-{self._num_requests}"),
            prompt,
            block_size=self.block_size,
            **fields,
        )

    def prefill(
        self,
        prompt: list[int],
        blocks: Sequence[int],
        *,
        seed: int = 1,
        generations: Sequence[int] | None = None,
        step: bool = True,
    ) -> KVHandoff:
        """At P: compute a prompt and lease its blocks."""
        self.fill(blocks, seed)
        request = self.new_request(prompt, remote_decode=True)
        self.arrive(request)
        handoff = self.hand_over(request, blocks, generations or [1] * len(blocks))
        if step:
            self.step()
        return handoff

    def hand_over(
        self, request: KitRequest, blocks: Sequence[int], generations: Sequence[int]
    ) -> KVHandoff:
        """At P: end a request with its first token and lease its blocks."""
        request.output_token_ids.append(FIRST_TOKEN)
        request.finish_reason = FinishReason.HANDOFF
        hold = self.scheduler.request_finished(
            request, [BlockId(block) for block in blocks], list(generations)
        )
        assert hold is not None, "a finished prefill for another engine ends in a lease"
        assert hold.handoff is not None
        assert hold.hold_id == hold.handoff.nonce
        self._other_holds.update(each.hold_id for each in hold.others)
        return hold.handoff

    def give_up(self, nonce: str) -> None:
        """At P: report that a lease will not be read."""
        self.scheduler.update_connector_output(ConnectorReport(given_up=[nonce]))

    def refusal(self, request: KitRequest) -> str | None:
        """Return why a request is refused; None = it is accepted."""
        try:
            self.arrive(request)
        except HandoffRefusedError as error:
            return str(error)
        return None

    def arrive(self, request: KitRequest) -> None:
        """Accept a request."""
        self.scheduler.request_arrived(request)

    def queue(self, prompt: list[int], handoff: KVHandoff, *, step: bool = True) -> KitRequest:
        """At D: accept a request that another engine has prefilled."""
        request = self.new_request(prompt, handoff=handoff)
        self.arrive(request)
        if step:
            self.step()
        return request

    def stage_load(
        self, request: KitRequest, blocks: Sequence[int], *, num_computed: int = 0
    ) -> None:
        """At D: give the request its blocks, which already have the first `num_computed` tokens."""
        match = self.scheduler.get_num_new_matched_tokens(request, num_computed)
        assert match is not None, "a handoff's tokens can be loaded at once"
        assert match.is_async
        assert match.num_tokens == len(request.prompt_token_ids) - num_computed
        self.scheduler.update_state_after_alloc(
            request, [BlockId(block) for block in blocks], match.num_tokens
        )

    def abort(self, request: KitRequest) -> bool:
        """Abort a request. Return whether its blocks must be kept until `Settled`."""
        request.finish_reason = FinishReason.ABORT
        return self.scheduler.request_finished(request, (), ()) is not None

    def load(self, request: KitRequest, blocks: Sequence[int], *, num_computed: int = 0) -> None:
        """At D: stage a load and let it begin."""
        self.stage_load(request, blocks, num_computed=num_computed)
        self.step()

    # --- the same, pushed

    @property
    def ref(self) -> EngineRef:
        """This engine and incarnation, as tickets name them."""
        return EngineRef(
            engine_id=self.context.engine_id,
            incarnation=self.context.incarnation,
            endpoints=self.endpoints,
            shape=self.context.shape,
        )

    def take(self, request: KitRequest) -> KitRequest:
        """Accept a request with a ticket, at either end of a push."""
        self.arrive(request)
        self.step()
        return request

    def is_asked_to_wait(self, request: KitRequest) -> bool:
        """At P: whether the request may not start yet."""
        return self.scheduler.get_num_new_matched_tokens(request, 0) is None

    def start(self, request: KitRequest, blocks: Sequence[int]) -> None:
        """At P: give the request the blocks of its whole prompt."""
        match = self.scheduler.get_num_new_matched_tokens(request, 0)
        assert match is not None
        assert match.num_tokens == 0
        self.scheduler.update_state_after_alloc(
            request, [BlockId(block) for block in blocks], 0, generations=[1] * len(blocks)
        )

    def compute(
        self,
        request: KitRequest,
        blocks: Sequence[int],
        first: int,
        end: int,
        *,
        seed: int = 1,
        loaded: tuple[int, int] = (0, 0),
    ) -> None:
        """Run a step that computes the tokens `first` to `end`, waiting for each layer first.

        After the wait, the layer must have the tokens `loaded` as `seed` would have written them.
        """
        scheduled = ScheduledRequest(
            request, [BlockId(block) for block in blocks], [1] * len(blocks), first, end
        )
        step = StepView({request.request_id: end - first}, lambda _: scheduled)
        metadata = self.scheduler.build_connector_meta(step)
        for rank in self.ranks:
            is_layerwise = metadata is not None and rank.worker.start_load_kv(metadata)
            for index in range(len(rank.share.layers)):
                layer = slice(index, index + 1)
                if is_layerwise:
                    rank.worker.wait_for_layer_load(index)
                assert rank.holds(blocks, seed, *loaded, layers=layer), f"layer {index} lacks KV"
                rank.write(blocks, seed, first, end, layers=layer)
                if is_layerwise:
                    rank.worker.save_kv_layer(index)
            assert not rank.worker.wait_for_save()
        self.step()

    def finish(self, request: KitRequest, blocks: Sequence[int]) -> KVHandoff:
        """At P: end a request with its first token, lease its blocks and step."""
        handoff = self.hand_over(request, blocks, [1] * len(blocks))
        self.step()
        return handoff

    # --- steps

    def post(self, metadata: ConnectorMetadata) -> None:
        """Send instructions to every rank."""
        for rank in self.ranks:
            rank.worker.post(metadata)

    def step(self) -> ConnectorReport:
        """Send out instructions and take in reports. Return what this has completed."""
        metadata = self.scheduler.take_instructions()
        if metadata is not None:
            self.post(metadata)
        whole = ConnectorReport(settled=[], received=[], failed=[])
        for number, rank in enumerate(self.ranks):
            said = rank.worker.get_finished()
            if said:
                self.said.append((number, said))
            report = self.quorum.add(number, said)
            news = self.scheduler.update_connector_output(report) if report else ConnectorNews()
            self.retried += news.retried
            whole.settled.extend(e for e in news.released if e.nonce not in self._other_holds)
            whole.received.extend(news.loaded)
            whole.failed.extend(news.failed)
            self.ready += news.ready
            self.faults.update(report.faults)
        self.settled += whole.settled
        self.received += whole.received
        self.failed += whole.failed
        return whole

    def until(
        self,
        condition: Callable[[], object],
        timeout_s: float = 30.0,
        *,
        others: Sequence[Engine] = (),
    ) -> None:
        """Step this engine and `others` whenever there is news, until `condition` holds."""
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline_s, (
                f"{self.context.engine_id}: not within {timeout_s} s: {self.settled} "
                f"{self.received} {self.failed} {self.ready} {dict(self.faults)}"
            )
            self.news.wait(0.005)
            self.news.clear()
            self.step()
            for other in others:
                other.step()

    def close(self) -> None:
        """Close every rank's worker half."""
        for rank in self.ranks:
            rank.worker.close(5.0)
