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

Every request passes the same calls of the scheduler half, whatever the connector does with it:
`request_arrived` -> (`get_num_new_matched_tokens` -> `update_state_after_alloc`, both again behind
each load that runs beside the steps -> steps, and perhaps `preempted`, after which it begins again)
-> `request_finished`, however it ended. Whatever the workers report of it comes in between, or
behind that, in `update_connector_output`.

A load runs beside the steps (`Match.is_async`: the request waits for `Received` or `Failed`, and
its blocks are never freed before), or inside the step that the request starts in: then each
layer is waited for (`wait_for_layer_load`) and `wait_for_save` says what did not come.

A save reads the request's blocks while it computes, and may go on behind its end: then
`preempted` or `request_finished` answers with a `Hold`, and nobody gets the blocks before the
workers have reported it as `Settled`.
"""

from __future__ import annotations

import enum
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import msgspec

from pdserve.wire.seal import PROTOCOL
from pdserve.wire.transfer import ConnectorReport, KVShape, Numerics

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from pdserve.config.schema import EngineConfig
    from pdserve.connectors.views import RequestView, StepView
    from pdserve.wire.events import KVEvent
    from pdserve.wire.ids import BlockId, EngineId, Incarnation, RequestId
    from pdserve.wire.request import KVStoreStats
    from pdserve.wire.transfer import (
        ConnectorMetadata,
        Endpoint,
        Failed,
        Fetched,
        KVHandoff,
        Received,
        Settled,
    )


T = TypeVar("T")
HoldKey: TypeAlias = tuple[str, str]
"""Connector and id of a hold."""


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a connector's halves can do.

    Attributes:
        push: It takes tickets, on both sides.
    """

    push: bool = False


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


class KVSource(enum.Enum):
    """Where the KV of a request that arrives is, as far as the queue has to know.

    PLANNED: another engine computes it once the request has blocks here. READY: another engine
    has computed it, and keeps blocks for it until it is loaded. LOCAL: anything else.
    """

    PLANNED = "planned"
    READY = "ready"
    LOCAL = "local"


class Match(msgspec.Struct, frozen=True):
    """Tokens a connector can provide beyond the local prefix hit.

    Attributes:
        num_tokens: How many; 0 = none. They may cover the whole prompt: the last token is
            computed again then, unless the one behind it comes along.
        is_async: The request waits, without blocking a step, until they have arrived. If not,
            they are loaded inside the step that it starts in.
        is_pinned: A peer writes its blocks, or is written from them: it gets those of its whole
            prompt, and of the token behind it, when it starts. It is not preempted until its load
            has arrived or, if nothing is loaded, until it ends.
    """

    num_tokens: int
    is_async: bool
    is_pinned: bool = False


class Hold(msgspec.Struct, frozen=True):
    """A request's blocks are not used for anything else until `Settled` has this id as its nonce.

    Attributes:
        hold_id: Never used before by this connector.
        handoff: Goes to the client's next hop. Only for a request that ended as HANDOFF.
        connector: As in the `Settled` that ends it.
        others: They have to end, too.
    """

    hold_id: str
    handoff: KVHandoff | None = None
    connector: str = ""
    others: tuple[Hold, ...] = ()

    @property
    def keys(self) -> set[HoldKey]:
        """What has to settle: this one, and the others."""
        return {(self.connector, self.hold_id)}.union(*(each.keys for each in self.others))


class ConnectorNews(msgspec.Struct, frozen=True, kw_only=True):
    """What a report means for requests.

    Attributes:
        loaded: Their blocks may be read. With a handoff, its tokens are their first outputs.
        failed: Their loads are over, and nothing writes their blocks any more.
        elsewhere: The same, of loads whose tokens another source has: it is asked for them.
        retried: Loads that have failed and are tried once more, into the same blocks.
        released: Holds that are over.
        ready: Who was told to wait (`get_num_new_matched_tokens` gave None), and is to be asked
            again; and what has happened, for its story.
        fetched: What came from a store, for the request's line; to be told before its first token.
    """

    loaded: Sequence[Received] = ()
    failed: Sequence[Failed] = ()
    elsewhere: Sequence[Failed] = ()
    retried: Sequence[Failed] = ()
    released: Sequence[Settled] = ()
    ready: Sequence[tuple[RequestId, str]] = ()
    fetched: Sequence[Fetched] = ()

    @staticmethod
    def of(report: ConnectorReport) -> ConnectorNews:
        """What a report says by itself."""
        return ConnectorNews(loaded=report.received, failed=report.failed, released=report.settled)


class ConnectorContext(msgspec.Struct, frozen=True, kw_only=True):
    """What both halves know of the engine.

    Attributes:
        rank: The worker half's rank within its engine; 0 for the scheduler half.
        num_ranks: Ranks of the engine (TP x PP); each has a worker half.
        layout_digest: Equal digests mean that KV can be exchanged, however it is shared out.
        layout_fields: What it was taken over.
        shape: How this engine's KV is shared out over its ranks.
        numerics: How it rounds; None where that is not known.
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
    numerics: Numerics | None = None


def guarded(call: Callable[[], T]) -> T | Exception:
    """Return what `call` returns, or what it raises.

    A connector is others' code, and one request's trouble with it must not be everybody's.
    """
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - see above
        return error


class KVConnectorScheduler:
    """The half beside the scheduler. One thread, no I/O, no clock of its own.

    What a connector does not override does nothing.

    Whatever a method raises over a request ends that request alone, with an error; the connector
    is left as it was before the call. What ends so at `preempted` or `request_finished` has
    nothing under way in its blocks, unless it is pinned. Only `take_instructions` and `take_events`
    are about no request, and do not fail.

    Attributes:
        hands_over: Whether a request may end as HANDOFF. If not, it is decoded where it was
            prefilled, and what comes from another engine is refused.
        faults: Count by name of what should stay rare, since the engine started.
        num_loaded: Tokens by the source that had them, where a connector has several: those that
            have come beside the steps, and those that a step has begun to load.
        store_stats: What a store has done for this engine; None where there is none.
    """

    hands_over: bool = False
    num_loaded: Mapping[str, int] = MappingProxyType({})
    faults: Mapping[str, int] = MappingProxyType({})
    store_stats: KVStoreStats | None = None

    def request_arrived(self, request: RequestView) -> KVSource:
        """A request is taken: peers may be met, leases kept alive, KV fetched from now on.

        Nothing that came with it has been believed yet, but that it is from this deployment.

        Raises:
            HandoffRefusedError: What it came with cannot be trusted or used here; the message
                says what that is, and names both values of what differs.
        """
        return KVSource.LOCAL

    def get_num_new_matched_tokens(
        self, request: RequestView, num_computed_tokens: int
    ) -> Match | None:
        """Tokens loadable beyond the `num_computed_tokens` (block-aligned, or all) that are here.

        No side effect; called whenever the request may start, and again when a load beside the
        steps has come: what there is behind it is loaded then, also beside the steps. None = not
        known yet: it stands aside, and is asked about again once `ConnectorNews.ready` names it;
        behind a load that is nothing. What is matched of a request of which a load has failed is
        computed, but for `ConnectorNews.elsewhere`.
        """
        return Match(0, is_async=False)

    def update_state_after_alloc(
        self,
        request: RequestView,
        block_ids: Sequence[BlockId],
        num_external_tokens: int,
        *,
        generations: Sequence[int] = (),
    ) -> None:
        """`block_ids` (the whole table) are held for the request: a load begins, or it starts.

        Args:
            num_external_tokens: What is to be loaded: as many as were matched, or 0 if nothing
                will be (the local hit covers it, loads have brought it, or one has failed).
            generations: Of each block, if the request starts; a load has none.
        """

    def build_connector_meta(self, step: StepView) -> ConnectorMetadata | None:
        """What belongs to this step, for `start_load_kv`. None = nothing."""
        return None

    def take_instructions(self) -> ConnectorMetadata | None:
        """Drain what is staged and need not wait for a step, for `post`. None = nothing."""
        return None

    def preempted(
        self, request: RequestView, block_ids: Sequence[BlockId], generations: Sequence[int]
    ) -> Hold | None:
        """The request lost its blocks, and waits again. Not None = they are kept until then."""
        return None

    def request_finished(
        self, request: RequestView, block_ids: Sequence[BlockId], generations: Sequence[int]
    ) -> Hold | None:
        """The request has ended, see its `finish_reason`; it has no blocks if it never started.

        A load in flight is still reported, as received or failed, and holds the blocks until then.
        A handoff that was never loaded is released at its owner. Not None = its blocks, which a
        peer or a save still reads, are kept until `Settled`; always so after HANDOFF.
        """
        return None

    def update_connector_output(self, report: ConnectorReport) -> ConnectorNews:
        """Learn one fact that the workers saw, and say what it means for requests.

        A load inside a step that has failed is told, too; what it means is decided already.
        """
        return ConnectorNews.of(report)

    def take_events(self) -> Sequence[KVEvent]:
        """Drain what the tiers that it owns have gained and lost, each with its own `medium`.

        Called after each step if `ConnectorContext.config.cache.events` is enabled, else never:
        then nothing is to be noted down.
        """
        return ()


class KVConnectorWorker:
    """The half beside the model runner.

    `post` and `get_finished` may be called from any one thread at a time, also while a step
    runs; the others belong to the thread that runs steps.
    """

    def register_kv_caches(self, kv: torch.Tensor, layout: KVLayout) -> Endpoint | None:
        """Once, after allocation.

        Args:
            kv: `[num_blocks, num_layers, num_planes, num_kv_heads, block_size, head_dim]`.
            layout: The same in numbers.

        Returns:
            The side channel's address, if there is one.
        """
        return None

    def post(self, metadata: ConnectorMetadata) -> None:
        """Take instructions that belong to no step. Never blocks."""

    def start_load_kv(self, metadata: ConnectorMetadata) -> bool:
        """Take the instructions of the step that is about to run. Never blocks.

        Returns:
            Whether the next two methods are to be called around each layer of this step. They are
            not in any other step, nor in one that has no instructions: a device may replay those.
        """
        return False

    def wait_for_layer_load(self, layer: int) -> None:
        """Return once `layer`'s KV may be read."""

    def save_kv_layer(self, layer: int) -> None:
        """`layer`'s KV of this step is written. Starts; does not finish."""

    def wait_for_save(self) -> Sequence[Failed]:
        """Once per step, after the forward: the device has this step's KV complete in its memory.

        Returns:
            What of the loads inside this step did not come, and will not be written any more.
        """
        return ()

    def get_finished(self) -> ConnectorReport:
        """What happened since the last call; each fact once."""
        return ConnectorReport()

    def close(self, timeout_s: float) -> None:
        """Complete or abandon what is in flight within `timeout_s`. Never hangs."""


class NoSettings(msgspec.Struct, frozen=True):
    """Of a connector that has no settings of its own."""


class KVConnectorBase(msgspec.Struct, frozen=True, kw_only=True):
    """A connector, as one value: what an author subclasses, and the registry's line names.

    It is made when the command line is read, so its module imports nothing heavy: what the halves
    need is imported when they are made.

    Attributes:
        name: What `--kv-transfer-config.kv-connector` calls it.
        capabilities: What its halves can do; asked for instead of its class.
        settings: What it may be told by `--kv-transfer-config.NAME.FIELD`, in a struct of its own.
            Each field has a default, and its help as `msgspec.Meta(description=...)`;
            `__post_init__` refuses what cannot be with a `ConfigError`.
    """

    name: str
    capabilities: Capabilities = Capabilities()
    settings: msgspec.Struct = NoSettings()

    def make_scheduler(
        self, context: ConnectorContext, endpoints: Sequence[Endpoint]
    ) -> KVConnectorScheduler:
        """Make the scheduler half; `endpoints` are the worker halves', in rank order."""
        return KVConnectorScheduler()

    def make_worker(self, context: ConnectorContext, wake: Callable[[], None]) -> KVConnectorWorker:
        """Make the worker half; it calls `wake` from any thread when `get_finished` has news."""
        return KVConnectorWorker()


class NullConnector(KVConnectorBase, frozen=True, kw_only=True):
    """The connector of an engine that exchanges KV with nobody. It stages and reports nothing."""

    name: str = "null"
