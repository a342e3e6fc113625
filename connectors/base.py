"""The connector interface: how KV leaves and enters an engine's blocks.

Two halves that meet only in frozen values. The scheduler half lives beside the
scheduler, decides and counts, and sees no tensor. The worker half lives beside the
model runner, owns a transfer thread, and decides nothing. Per step: the scheduler half's
`build_connector_meta` is carried to the worker half's `start_load_kv`, and the worker
half's `get_finished` comes back to the scheduler half's `update_connector_output`.

An engine has one scheduler half, and a worker half per rank, each with its own side
channel, leases and transfers. All of them get the same metadata; what they report goes
through a `Quorum`, so the scheduler half learns of a fact once, when every rank has seen it.

Life of a request at P (`remote_decode`):
    prefill runs as any other -> `request_finished` returns a signed handoff and the
    blocks stay leased -> D reads, or releases, or the lease ends -> the worker half
    reports `Settled` -> the scheduler frees the blocks.

Life of a request at D (`handoff`):
    `request_queued` (heartbeats begin) -> `get_num_new_matched_tokens` says what can be
    loaded -> blocks are taken, `update_state_after_alloc` -> the worker half loads in
    the background -> `Received` (the request may run) or `Failed` (computed here).
    Between alloc and that report the blocks are never freed, whatever happens to the
    request: `request_aborted` asks the worker half to stop, and its report settles it.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from pdserve.config.schema import EngineConfig
    from pdserve.wire.ids import BlockId, EngineId, Incarnation, RequestId
    from pdserve.wire.outputs import TokenLogprobs
    from pdserve.wire.step import SchedulerOutput
    from pdserve.wire.transfer import (
        ConnectorMetadata,
        ConnectorReport,
        Endpoint,
        KVHandoff,
    )


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a connector can do; asked for instead of its class.

    Attributes:
        layerwise: `wait_for_layer_load` and `save_kv_layer` do something; if not, the
            model runner does not call them.
    """

    layerwise: bool = False


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

    def fields(self, *, model: str, weights: str) -> dict[str, str]:
        """What two engines must agree on to exchange KV, by name, for messages."""
        return {
            "schema": "1",
            "model": model,
            "weights": weights,
            "dtype": self.dtype,
            "num_layers": str(self.num_layers),
            "num_planes": str(self.num_planes),
            "num_kv_heads": str(self.num_kv_heads),
            "block_size": str(self.block_size),
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
    def first_logprobs(self) -> list[TokenLogprobs] | None:
        """The first token's logprobs, if the request asked for any."""
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


class ConnectorContext(msgspec.Struct, frozen=True, kw_only=True):
    """What both halves know of the engine.

    Attributes:
        rank: The worker half's rank within its engine; 0 for the scheduler half.
        num_ranks: Ranks of the engine (TP x PP); each has a worker half.
        layout_digest: Equal digests mean that KV can be exchanged byte for byte.
        layout_fields: What it was taken over.
    """

    config: EngineConfig
    engine_id: EngineId
    incarnation: Incarnation
    layout: KVLayout
    layout_digest: str
    layout_fields: dict[str, str]
    rank: int = 0
    num_ranks: int = 1


class KVConnectorScheduler(abc.ABC):
    """The half beside the scheduler. One thread, no I/O, no clock of its own."""

    @abc.abstractmethod
    def check_handoff(self, request: RequestView) -> str | None:
        """Why the request's handoff cannot be trusted or used here; None = it can.

        Asked once, before anything of the handoff (its first token too) is believed:
        signature, layout digest (the answer names both values), prompt digest.
        """

    @abc.abstractmethod
    def request_queued(self, request: RequestView) -> None:
        """A request was taken; if it has a handoff, keep its lease alive from now on."""

    @abc.abstractmethod
    def get_num_new_matched_tokens(
        self, request: RequestView, num_computed_tokens: int
    ) -> Match | None:
        """Tokens loadable beyond the `num_computed_tokens` (block-aligned) found locally.

        No side effect; called at every step while the request waits. None = ask again
        later. The answer is never more than the prompt's tokens.
        """

    @abc.abstractmethod
    def update_state_after_alloc(
        self, request: RequestView, block_ids: Sequence[BlockId], num_external_tokens: int
    ) -> None:
        """`block_ids` (the whole table) are held for the request.

        If `num_external_tokens` is 0 nothing will be loaded (the local hit covers it, or
        an earlier load failed): any lease the request came with is released.
        """

    @abc.abstractmethod
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ConnectorMetadata | None:
        """Drain what is staged. None = nothing to say to the workers."""

    @abc.abstractmethod
    def request_finished(
        self, request: RequestView, block_ids: Sequence[BlockId]
    ) -> KVHandoff | None:
        """The request ended here. Not None = its blocks are leased until `Settled`."""

    @abc.abstractmethod
    def request_aborted(self, request: RequestView) -> None:
        """The request is gone.

        A load in flight is still reported, as received or failed; a handoff that was
        never loaded is released at its owner.
        """

    @abc.abstractmethod
    def release_lease(self, nonce: str) -> None:
        """Nobody will read this lease (the client left). Unknown nonces are ignored."""

    @abc.abstractmethod
    def update_connector_output(self, report: ConnectorReport) -> None:
        """Learn what the workers saw, after the scheduler has."""

    @abc.abstractmethod
    def has_staged(self) -> bool:
        """Whether `build_connector_meta` has something to say (wakes an idle engine)."""


class KVConnectorWorker(abc.ABC):
    """The half beside the model runner. Called by the worker's thread only."""

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
    def start_load_kv(self, metadata: ConnectorMetadata) -> None:
        """Take the step's instructions. Posts; never blocks for asynchronous loads."""

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
