"""The connector interface: how KV leaves and enters an engine's blocks.

A connector has two halves, which exchange only frozen values. The scheduler half lives beside
the scheduler, decides and counts, and sees no tensor. The worker half lives beside the model
runner, owns a transfer thread, and decides nothing. Messages that need not wait for a step are
sent at once, even while one runs: from the scheduler half's `take_instructions` to the worker
half's `post`, and from `get_finished` back to `update_connector_output`. Messages that belong to
a step travel with it: from `build_connector_meta` to `start_load_kv`.

An engine has one scheduler half, and a worker half per rank, each with its own side channel,
leases and transfers. All ranks get the same metadata. Their reports pass through a `Quorum`, so
the scheduler half learns of a fact once, when every rank has seen it.

Every request goes through the same calls of the scheduler half, whatever the connector does:
`request_arrived` -> (`get_num_new_matched_tokens` -> `update_state_after_alloc`, both repeated
after each load beside the steps -> steps, and perhaps `preempted`, after which this part starts
over) -> `request_finished`, however the request ended. The workers' reports about the request
arrive in `update_connector_output`, during or after these calls.

A load runs either beside the steps (`Match.is_async`: the request waits for `Received` or
`Failed`, and its blocks are not freed before that) or inside the step in which the request
starts. Then the step waits for each layer (`wait_for_layer_load`), and `wait_for_save` returns
the loads that failed.

A save reads the request's blocks while it computes, and may continue after its end: then
`preempted` or `request_finished` returns a `Hold`, and the blocks are not reused until the
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
        push: Whether it accepts tickets, at either end of a push.
    """

    push: bool = False


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of KV memory, as one tensor per rank.

    `[num_blocks, num_layers, num_planes, num_kv_heads, block_size, head_dim]`, contiguous, so
    a block with all its layers is one range of `block_bytes`.

    Attributes:
        num_layers: Layers of this rank's pipeline stage.
        num_planes: 2 (K and V), or 1 for the latent cache of MLA.
        num_kv_heads: KV heads on this rank.
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
        """Bytes of one block in all layers of this rank."""
        num_vectors = self.num_layers * self.num_planes * self.num_kv_heads * self.block_size
        return num_vectors * self.head_dim * self.dtype_bytes

    def shape_of_one_rank(self) -> KVShape:
        """Return the shape of an engine whose only rank this is."""
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
        """Return what two engines must agree on to exchange KV, by name, for messages."""
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
    """Where an arriving request's KV is, as far as the queue needs to know.

    PLANNED: another engine will compute it once the request has blocks here. READY: another
    engine has computed it and keeps it until it is loaded. LOCAL: anything else.
    """

    PLANNED = "planned"
    READY = "ready"
    LOCAL = "local"


class Match(msgspec.Struct, frozen=True):
    """Tokens a connector can provide beyond the local prefix hit.

    Attributes:
        num_tokens: Number of tokens; 0 = none. They may cover the whole prompt: then the last
            token is computed again, unless the token after the prompt comes with them.
        is_async: Whether the request waits, without blocking a step, until they have arrived. If
            not, they are loaded inside the step in which it starts.
        is_pinned: Whether a peer writes into the request's blocks, or is written to from them. At
            its start it gets the blocks for its whole prompt and the token after it. It is not
            preempted until its load has arrived or, if nothing is loaded, until it ends.
    """

    num_tokens: int
    is_async: bool
    is_pinned: bool = False


class Hold(msgspec.Struct, frozen=True):
    """Keeps a request's blocks from other uses until a `Settled` has this id as its nonce.

    Attributes:
        hold_id: An id that this connector has never used before.
        handoff: The handoff to pass on; only for a request that ended as HANDOFF.
        connector: The same as in the `Settled` that ends it.
        others: Holds that must end as well.
    """

    hold_id: str
    handoff: KVHandoff | None = None
    connector: str = ""
    others: tuple[Hold, ...] = ()

    @property
    def keys(self) -> set[HoldKey]:
        """The holds that have to settle: this one and the others."""
        return {(self.connector, self.hold_id)}.union(*(each.keys for each in self.others))


class ConnectorNews(msgspec.Struct, frozen=True, kw_only=True):
    """Consequences of a report for requests.

    Attributes:
        loaded: Loads whose blocks may now be read. The tokens of a handoff, if there is one, are
            the request's first outputs.
        failed: Loads that are over; nothing writes to their blocks any more.
        elsewhere: Failed loads whose tokens another source has; that source is asked next.
        retried: Failed loads that are tried once more, into the same blocks.
        released: Holds that are over.
        ready: Requests for which `get_num_new_matched_tokens` returned None and should be called
            again, each with what has happened, for its story.
        fetched: What a store delivered, for the request's log line, before its first token.
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
        """Return the news of a report that needs no interpretation."""
        return ConnectorNews(loaded=report.received, failed=report.failed, released=report.settled)


class ConnectorContext(msgspec.Struct, frozen=True, kw_only=True):
    """What both halves know about the engine.

    Attributes:
        rank: The worker half's rank within its engine; 0 for the scheduler half.
        layout_digest: Digest of the KV layout. Engines with equal digests can exchange KV, however
            it is spread over their ranks.
        layout_fields: The fields that the digest covers.
        shape: How this engine's KV is spread over its ranks.
        numerics: How the engine rounds; None if unknown.
    """

    config: EngineConfig
    engine_id: EngineId
    incarnation: Incarnation
    layout: KVLayout
    layout_digest: str
    layout_fields: dict[str, str]
    shape: KVShape
    rank: int = 0
    numerics: Numerics | None = None

    @property
    def num_ranks(self) -> int:
        """Ranks of the engine (TP x PP); each has a worker half."""
        return self.shape.num_ranks


def guarded(call: Callable[[], T]) -> T | Exception:
    """Return what `call` returns or, as an error must not affect other requests, its exception."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - see above
        return error


class KVConnectorScheduler:
    """The half beside the scheduler: single-threaded, without I/O or a clock of its own.

    Methods that a connector does not override do nothing.

    An exception that a method raises over a request ends only that request, with an error; the
    connector must be left as it was before the call. If `preempted` or `request_finished` raises,
    nothing is in flight in the request's blocks, unless it is pinned. `take_instructions`,
    `take_events` and `end_reservations` concern no single request, and must not raise.

    Attributes:
        hands_over: Whether a request may end as HANDOFF. If not, it is decoded where it was
            prefilled, and handoffs from other engines are refused.
        faults: Counts of events that should stay rare, by name, since the engine started.
        num_loaded: Tokens by source, for a connector with several: those that have arrived beside
            the steps, and those that a step has begun to load.
        store_stats: What a store has done for this engine; None without a store.
    """

    hands_over: bool = False
    num_loaded: Mapping[str, int] = MappingProxyType({})
    faults: Mapping[str, int] = MappingProxyType({})
    store_stats: KVStoreStats | None = None

    def request_arrived(self, request: RequestView) -> KVSource:
        """Accept a request; from now on peers may be met, leases kept alive and KV fetched.

        Of what came with it, only that it is from this deployment has been verified.

        Raises:
            HandoffRefusedError: Its handoff or ticket cannot be trusted or used here; the message
                says why, with both values of whatever differs.
        """
        return KVSource.LOCAL

    def get_num_new_matched_tokens(
        self, request: RequestView, num_computed_tokens: int
    ) -> Match | None:
        """Return what can be loaded beyond the `num_computed_tokens` here (block-aligned, or all).

        Has no side effect. Called whenever the request may start, and again after each load beside
        the steps, to load what follows, also beside the steps. None = not known yet: the request
        stands aside until `ConnectorNews.ready` names it; after a load, None means no tokens. Once
        a load of a request has failed, what matches is computed instead, except after
        `ConnectorNews.elsewhere`.
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
        """Begin a load, or start the request: `block_ids`, its whole table, are held for it.

        Args:
            num_external_tokens: Tokens to load: as many as were matched, or 0 to load nothing
                (the local hit covers them, loads have brought them, or a load has failed).
            generations: The generation of each block if the request starts; empty for a load
                beside the steps.
        """

    def build_connector_meta(self, step: StepView) -> ConnectorMetadata | None:
        """Return what belongs to this step, for `start_load_kv`. None = nothing."""
        return None

    def take_instructions(self) -> ConnectorMetadata | None:
        """Drain the staged instructions that belong to no step, for `post`. None = nothing."""
        return None

    def preempted(
        self, request: RequestView, block_ids: Sequence[BlockId], generations: Sequence[int]
    ) -> Hold | None:
        """Preempt a request, which then waits again. A `Hold` keeps its blocks until `Settled`."""
        return None

    def request_finished(
        self, request: RequestView, block_ids: Sequence[BlockId], generations: Sequence[int]
    ) -> Hold | None:
        """Handle a request's end (see its `finish_reason`); it has no blocks if it never started.

        A load in flight is still reported, as received or failed, and holds the blocks until then.
        A handoff that was never loaded is released at its owner. A `Hold` keeps the blocks, which a
        peer or a save still reads, until `Settled`; HANDOFF always returns one.
        """
        return None

    def end_reservations(self) -> None:
        """Give up what peers hold for requests that cannot start, as leases have all blocks."""

    def update_connector_output(self, report: ConnectorReport) -> ConnectorNews:
        """Take a report of the workers; return what it means for requests.

        Failed loads inside a step are reported too; their consequences are decided already.
        """
        return ConnectorNews.of(report)

    def take_events(self) -> Sequence[KVEvent]:
        """Drain what the connector's own tiers have gained and lost, each with its own `medium`.

        Called after each step if `ConnectorContext.config.cache.events` is enabled, otherwise
        never: then record nothing.
        """
        return ()


class KVConnectorWorker:
    """The half beside the model runner.

    `post` and `get_finished` may be called from any thread, one at a time, even while a step
    runs; the others are called only by the thread that runs steps.
    """

    def register_kv_caches(self, kv: torch.Tensor, layout: KVLayout) -> Endpoint | None:
        """Register the KV memory; called once, after allocation.

        Args:
            kv: `[num_blocks, num_layers, num_planes, num_kv_heads, block_size, head_dim]`.
            layout: The shape and dtype of `kv`.

        Returns:
            The side channel's address, if there is one.
        """
        return None

    def post(self, metadata: ConnectorMetadata) -> None:
        """Take instructions that belong to no step. Never blocks.

        They may come before steps that were planned earlier: a hold must not settle until the
        saves of these have been made.
        """

    def start_load_kv(self, metadata: ConnectorMetadata) -> bool:
        """Take the instructions of the step that is about to run. Never blocks.

        Returns:
            Whether to call the next two methods around each layer of this step. They are called in
            no other step, nor in one without instructions, which a device may replay.
        """
        return False

    def wait_for_layer_load(self, layer: int) -> None:
        """Return once `layer`'s KV may be read."""

    def save_kv_layer(self, layer: int) -> None:
        """Start saving `layer`'s KV, which this step has written, without waiting for the end."""

    def wait_for_save(self) -> Sequence[Failed]:
        """Called once per step, when all of its KV is complete in the device's memory.

        Returns:
            The failed loads inside this step; nothing of them will be written any more.
        """
        return ()

    def get_finished(self) -> ConnectorReport:
        """Return what has happened since the last call, each fact once."""
        return ConnectorReport()

    def close(self, timeout_s: float) -> None:
        """Complete or abandon everything in flight within `timeout_s`. Never hangs."""


class NoSettings(msgspec.Struct, frozen=True):
    """The settings of a connector that has none of its own."""


class KVConnectorBase(msgspec.Struct, frozen=True, kw_only=True):
    """A connector as one value: authors subclass it, and the registry's line names it.

    It is created when the command line is parsed, so its module must import nothing heavy: import
    what the halves need where they are made.

    Attributes:
        name: Its name in `--kv-transfer-config.kv-connector`.
        capabilities: What its halves can do; callers check this, never the class.
        settings: Its own struct of settings, set by `--kv-transfer-config.NAME.FIELD`. Each field
            has a default, and its help text as `msgspec.Meta(description=...)`; `__post_init__`
            refuses invalid values with a `ConfigError`.
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
    """The connector of an engine that exchanges no KV. It stages and reports nothing."""

    name: str = "null"
