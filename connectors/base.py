"""The connector interface: how KV leaves and enters an engine's blocks.

Two halves that meet only in frozen values. The scheduler half lives beside the
scheduler, decides and counts, and sees no tensor. The worker half lives beside the
model runner, owns a transfer thread, and decides nothing. What need not wait for a step goes at
once, also while one runs: the scheduler half's `take_instructions` to the worker half's
`post`, and `get_finished` back to `update_connector_output`. What belongs to a step goes with
it: `build_connector_meta` to `start_load_kv`.

An engine has one scheduler half, and a worker half per rank, each with its own side
channel, leases and transfers. All of them get the same metadata; what they report goes
through a `Quorum`, so the scheduler half learns of a fact once, when every rank has seen it.

Life of a request at P (`remote_decode`):
    prefill runs as any other; of each chunk but its last the worker half may take note
    (`chunk_planned`) -> `request_finished` returns a handoff and the
    blocks stay leased -> D reads, or releases, or the lease ends -> the worker half
    reports `Settled` -> the scheduler frees the blocks.

    With a `ticket` (push) it waits in the queue until D has registered its blocks
    (`Registered`) or will not (`Withdrawn`); then each step's new full blocks are written to D
    behind the step, or layer by layer inside it. The lease is granted all the same: D ends it
    once it has everything, and whoever takes over from D can pull.

Life of a request at D (`handoff`):
    `request_queued` (heartbeats begin) -> `get_num_new_matched_tokens` says what can be
    loaded -> blocks are taken, `update_state_after_alloc` -> the worker half loads in
    the background -> `Received` (the request may run) or `Failed` (computed here).
    Between alloc and that report the blocks are never freed, whatever happens to the
    request: `request_aborted` asks the worker half to stop, and its report settles it.

    With a `ticket` (push) the load begins before P does: blocks are taken, registered at P,
    and `Received` comes with the handoff, whose first token the request goes on from.
"""

from __future__ import annotations

import abc
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

import msgspec

from pdserve.wire.seal import PROTOCOL
from pdserve.wire.transfer import KVShape

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from pdserve.config.schema import EngineConfig
    from pdserve.wire.ids import BlockId, EngineId, Incarnation, RequestId
    from pdserve.wire.outputs import TokenLogprobs
    from pdserve.wire.request import OnLoadFailure
    from pdserve.wire.step import SchedulerOutput
    from pdserve.wire.transfer import (
        ConnectorMetadata,
        ConnectorReport,
        Endpoint,
        Failed,
        KVHandoff,
        PushTicket,
    )


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a connector can do; asked for instead of its class.

    Attributes:
        layerwise_load: `wait_for_layer_load` does something.
        layerwise_save: `save_kv_layer` does something. If neither does, the model runner calls
            neither.
        push: It takes tickets, on both sides.
    """

    layerwise_load: bool = False
    layerwise_save: bool = False
    push: bool = False

    @property
    def is_layerwise(self) -> bool:
        """Whether the model runner has to call it around each layer."""
        return self.layerwise_load or self.layerwise_save


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of KV memory, as one tensor per rank.

    `[num_blocks, num_layers, num_planes, num_kv_heads, block_size, head_dim]`, contiguous, so
    a block with all its layers is one range of `block_bytes`.

    Attributes:
        num_layers: Of this rank's pipeline stage.
        num_planes: 2 (K and V), or 1 for the latent cache of MLA.
        num_kv_heads: Of this rank's share.
    """

    num_blocks: int
    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: str
    dtype_bytes: int
    num_planes: int = 2

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers of this rank."""
        num_vectors = self.num_layers * self.num_planes * self.num_kv_heads * self.block_size
        return num_vectors * self.head_dim * self.dtype_bytes

    def shape_of_one_rank(self) -> KVShape:
        """The shape of an engine that has no rank but this one."""
        return KVShape(
            num_blocks=self.num_blocks,
            num_layers=self.num_layers,
            num_planes=self.num_planes,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype_bytes=self.dtype_bytes,
            block_size=self.block_size,
            stages=((0, self.num_layers),),
        )

    def fields(self, *, model: str, weights: str) -> dict[str, str]:
        """What two engines must agree on to exchange KV, by name, for messages."""
        return {
            "protocol": str(PROTOCOL),
            "model": model,
            "weights": weights,
            "dtype": self.dtype,
            "num_layers": str(self.num_layers),
            "num_planes": str(self.num_planes),
            "num_kv_heads": str(self.num_kv_heads),
            "head_dim": str(self.head_dim),
        }


class Match(msgspec.Struct, frozen=True):
    """Tokens a connector can provide beyond the local prefix hit.

    Attributes:
        num_tokens: How many; 0 = none.
        is_async: The request waits, without blocking a step, until they have arrived.
    """

    num_tokens: int
    is_async: bool


class RequestView(Protocol):
    """What a connector may see of the scheduler's request."""

    @property
    def request_id(self) -> RequestId:
        """Engine-level id."""
        ...

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt."""
        ...

    @property
    def output_token_ids(self) -> list[int]:
        """Tokens out so far."""
        ...

    @property
    def arrival_s(self) -> float:
        """When this engine's server took it, in monotonic seconds."""
        ...

    @property
    def first_logprobs(self) -> list[TokenLogprobs] | None:
        """The first token's logprobs, if the request asked for any."""
        ...

    @property
    def num_cached_prompt_tokens(self) -> int:
        """Prompt tokens that a prefix cache had when it was prefilled."""
        ...

    @property
    def cache_salt(self) -> str:
        """What its prefixes are shared within."""
        ...

    @property
    def remote_decode(self) -> bool:
        """Whether its KV is to be leased out."""
        ...

    @property
    def handoff(self) -> KVHandoff | None:
        """Where another engine has prefilled it, if one has."""
        ...

    @property
    def ticket(self) -> PushTicket | None:
        """The push that it is part of, at either end, if it is."""
        ...

    @property
    def on_load_failure(self) -> OnLoadFailure:
        """What becomes of it if its KV does not arrive."""
        ...


class ConnectorContext(msgspec.Struct, frozen=True, kw_only=True):
    """What both halves know of the engine.

    Attributes:
        rank: The worker half's rank within its engine; 0 for the scheduler half.
        num_ranks: Ranks of the engine (TP x PP); each has a worker half.
        layout_digest: Equal digests mean that KV can be exchanged, however it is shared out.
        layout_fields: What it was taken over.
        shape: How this engine's KV is shared out over its ranks.
    """

    config: EngineConfig
    engine_id: EngineId
    incarnation: Incarnation
    layout: KVLayout
    layout_digest: str
    layout_fields: dict[str, str]
    shape: KVShape
    rank: int = 0
    num_ranks: int = 1


class KVConnectorScheduler(abc.ABC):
    """The half beside the scheduler. One thread, no I/O, no clock of its own.

    A method about a request that has not started may raise: then nothing has changed, and the
    scheduler ends that request alone, with an error.

    Attributes:
        faults: Count by name of what should stay rare, since the engine started.
    """

    faults: Mapping[str, int] = MappingProxyType({})

    @abc.abstractmethod
    def check_handoff(self, request: RequestView) -> str | None:
        """Why the request's handoff, or its ticket, cannot be trusted or used here; None = it can.

        Asked before anything of the handoff (its first token too) is believed: the range of each
        number, layout digest (the answer names both values), prompt digest. A ticket must name
        this engine's life. That both are this deployment's was checked where they came in. With
        a ticket and a handoff (what a push brought, in `Received`) the two must belong together.
        """

    @abc.abstractmethod
    def request_queued(self, request: RequestView) -> None:
        """A request was taken; if it has a handoff, keep its lease alive from now on.

        With a ticket: meet the peer; at P, let D's registration be known.
        """

    @abc.abstractmethod
    def get_num_new_matched_tokens(
        self, request: RequestView, num_computed_tokens: int
    ) -> Match | None:
        """Tokens loadable beyond the `num_computed_tokens` (block-aligned) found locally.

        No side effect; called at every step while the request waits. None = ask again
        later. The answer is never more than the prompt's tokens.

        At P, a request with a ticket that was answered None (D has not registered) is asked
        about again once a report has named its nonce as registered or withdrawn, not before.
        """

    @abc.abstractmethod
    def update_state_after_alloc(
        self,
        request: RequestView,
        block_ids: Sequence[BlockId],
        num_external_tokens: int,
        *,
        generations: Sequence[int] = (),
    ) -> None:
        """`block_ids` (the whole table) are held for the request.

        If `num_external_tokens` is 0 nothing will be loaded (the local hit covers it, or
        an earlier load failed): any lease the request came with is released.

        Args:
            generations: Of each block; required at P for a request with a ticket, whose table
                has all blocks of its prompt.
        """

    def chunk_planned(
        self,
        request: RequestView,
        block_ids: Sequence[BlockId],
        start_token: int,
        end_token: int,
        *,
        generations: Sequence[int],
    ) -> None:
        """The step that is being built computes a chunk of a `remote_decode` prompt, not its last.

        Said before `build_connector_meta` of that step. The request may be preempted or gone
        before the step has run; its blocks then have other generations once they are used again.

        Args:
            block_ids, generations: Its table so far, with the chunk's blocks.
            start_token, end_token: What the step computes.
        """

    @abc.abstractmethod
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ConnectorMetadata | None:
        """What belongs to this step, for `start_load_kv`. None = nothing."""

    @abc.abstractmethod
    def take_instructions(self) -> ConnectorMetadata | None:
        """Drain what is staged and need not wait for a step, for `post`. None = nothing."""

    @abc.abstractmethod
    def request_finished(
        self, request: RequestView, block_ids: Sequence[BlockId], generations: Sequence[int]
    ) -> KVHandoff | None:
        """The request ended here. Not None = its blocks are leased until `Settled`."""

    @abc.abstractmethod
    def request_aborted(self, request: RequestView) -> bool:
        """The request is gone.

        A load in flight is still reported, as received or failed; a handoff that was
        never loaded is released at its owner; a push is stopped.

        Returns:
            Whether a peer may still be written from its blocks, or read them: then they are
            held until `Settled`. A request whose push was registered is never preempted, not
            even once it is withdrawn: what was begun may still be under way.
        """

    @abc.abstractmethod
    def release_lease(self, nonce: str) -> None:
        """Nobody will read this lease (the client left). Unknown nonces are ignored."""

    def holds_blocks(self, request: RequestView) -> bool:
        """Whether a peer may be written from the request's blocks, although it is not leased.

        That is so at P from D's registration on, until nothing is written from them any more. Such
        a request gets the blocks of its whole prompt when it starts, and is never preempted.
        """
        return False

    def retry_load(self, failed: Failed) -> bool:
        """Whether the load is tried once more, under its lease and into the same blocks.

        Asked for each failed load of a request that still waits for it, before anything else is
        done about it, and before `update_connector_output` has the report. If so, the
        instructions are staged already, and the request goes on receiving.
        """
        return False

    @abc.abstractmethod
    def update_connector_output(self, report: ConnectorReport) -> None:
        """Learn what the workers saw, after the scheduler has."""


class KVConnectorWorker(abc.ABC):
    """The half beside the model runner.

    `post` and `get_finished` may be called from any one thread at a time, also while a step
    runs; the others belong to the thread that runs steps.
    """

    capabilities: Capabilities

    @abc.abstractmethod
    def register_kv_caches(self, kv: torch.Tensor, layout: KVLayout) -> None:
        """Once, after allocation.

        Args:
            kv: `[num_blocks, num_layers, num_planes, num_kv_heads, block_size, head_dim]`.
            layout: The same in numbers.
        """

    @property
    @abc.abstractmethod
    def endpoint(self) -> Endpoint | None:
        """The side channel's address after `register_kv_caches`, if there is one."""

    @abc.abstractmethod
    def post(self, metadata: ConnectorMetadata) -> None:
        """Take instructions that belong to no step. Never blocks."""

    @abc.abstractmethod
    def start_load_kv(self, metadata: ConnectorMetadata) -> None:
        """Take the instructions of the step that is about to run. Never blocks."""

    def wait_for_layer_load(self, layer: int) -> None:
        """Return once `layer`'s KV may be read. Layerwise connectors override it."""

    def save_kv_layer(self, layer: int) -> None:
        """`layer`'s KV of this step is written. Starts; does not finish."""

    def wait_for_save(self) -> None:
        """Once per step, after the forward: this step's KV is complete in memory."""

    @abc.abstractmethod
    def get_finished(self) -> ConnectorReport:
        """What happened since the last call; each fact once."""

    @abc.abstractmethod
    def close(self, timeout_s: float) -> None:
        """Complete or abandon what is in flight within `timeout_s`. Never hangs."""


class ConnectorFactory(Protocol):
    """One line of the registry."""

    def scheduler(
        self, context: ConnectorContext, endpoints: list[Endpoint]
    ) -> KVConnectorScheduler:
        """Make the scheduler half; `endpoints` are the worker halves', in rank order."""
        ...

    def worker(self, context: ConnectorContext, wake: Callable[[], None]) -> KVConnectorWorker:
        """Make the worker half; it calls `wake` from any thread when `get_finished` has news."""
        ...
