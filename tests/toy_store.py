"""A store of KV as a connector, for toy engines and simulations: it is late, loses and raises.

It loads beside the steps or inside them, saves some polls behind the step that computed, and holds
blocks until it has read them. What goes wrong is drawn from a seed. Halves of one process share
what is kept; ids of its holds are those of any other such store, on purpose.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from pdserve.connectors.base import (
    ConnectorNews,
    Hold,
    KVConnectorBase,
    KVConnectorScheduler,
    KVConnectorWorker,
    KVSource,
    Match,
)
from pdserve.wire.ids import BlockHash, BlockId, RequestId
from pdserve.wire.transfer import (
    ConnectorMetadata,
    ConnectorReport,
    Failed,
    LeaseEnd,
    LoadFailure,
    Received,
    Settled,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from pdserve.connectors.base import ConnectorContext, KVLayout
    from pdserve.connectors.views import RequestView, StepView

STORE = "toystore"
MAX_POLLS_LATE = 4
GARBAGE = -77

Blocks = list[tuple[BlockHash, BlockId]]


class StoreError(Exception):
    """What the store raises on purpose."""


@dataclass
class Trouble:
    """What goes wrong, each with its rate from 0 to 1.

    Attributes:
        loses: A block is not there any more when it is loaded.
        is_late: Something is done some polls later than it could be.
        raises: A call of the scheduler half raises.
        struck: How often each has struck.
    """

    seed: int = 0
    loses: float = 0.0
    is_late: float = 0.0
    raises: float = 0.0
    struck: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)

    def strikes(self, name: str) -> bool:
        """Whether it strikes now."""
        rate: float = getattr(self, name)
        has_struck = rate > 0 and self._rng.random() < rate
        self.struck[name] += has_struck
        return has_struck

    def polls(self) -> int:
        """By how many polls something is late."""
        return self._rng.randint(1, MAX_POLLS_LATE) if self.strikes("is_late") else 0

    def quiet(self) -> None:
        """Let nothing go wrong any more."""
        self.loses = self.is_late = self.raises = 0.0


class Load(msgspec.Struct, array_like=True):
    """Blocks to load, behind so many tokens; 0 as its id inside a step."""

    request_id: RequestId
    blocks: list[tuple[BlockHash, BlockId]]
    num_before: int
    load_id: int = 0


class Save(msgspec.Struct, array_like=True):
    """Blocks to save; or a hold to end behind so many saves of steps, which it may overtake."""

    request_id: RequestId
    blocks: list[tuple[BlockHash, BlockId]]
    hold_id: str = ""
    num_before: int = 0


class Orders(msgspec.Struct):
    """To the worker halves."""

    loads: list[Load] = []
    saves: list[Save] = []
    lookups: list[RequestId] = []

    def drain(self) -> ConnectorMetadata | None:
        if not (self.loads or self.saves or self.lookups):
            return None
        metadata = ConnectorMetadata(msgspec.msgpack.encode(self))
        self.loads, self.saves, self.lookups = [], [], []
        return metadata


class ToyStore:
    """What is kept: of a block that every rank has saved, each rank's part."""

    def __init__(self) -> None:
        self._parts: dict[tuple[object, BlockHash], dict[int, torch.Tensor]] = {}

    def __len__(self) -> int:
        return len(self._parts)

    def save(self, shape: Any, rank: int, key: BlockHash, part: torch.Tensor) -> None:
        self._parts.setdefault((_kind(shape), key), {})[rank] = part

    def part(self, shape: Any, rank: int, key: BlockHash) -> torch.Tensor:
        return self._parts[_kind(shape), key][rank]

    def evict(self, number: int) -> None:
        """Forget one of the blocks."""
        if self._parts:
            del self._parts[list(self._parts)[number % len(self._parts)]]

    def has(self, shape: Any, key: BlockHash) -> bool:
        return len(self._parts.get((_kind(shape), key), ())) == shape.num_ranks


def _kind(shape: Any) -> tuple[object, ...]:
    """Engines whose KV lies alike find one another's."""
    return shape.tp_size, shape.stages, shape.block_size


class ToyStoreScheduler(KVConnectorScheduler):
    """See `KVConnectorScheduler`."""

    def __init__(self, connector: ToyStoreConnector, context: ConnectorContext) -> None:
        self._store, self._trouble = connector.store, connector.trouble
        self._is_async, self._may_wait = connector.is_async, connector.may_wait
        self._shape, self._load_ids = context.shape, itertools.count(1)
        self._orders = Orders()
        self._hold_ids = itertools.count()
        self._inside: dict[RequestId, Load] = {}
        self._unknown: set[RequestId] = set()
        self._num_saved: dict[RequestId, int] = {}
        self._num_saves = 0

    def request_arrived(self, request: RequestView) -> KVSource:
        self._raise_perhaps()
        if self._may_wait and request.handoff is None:
            self._unknown.add(request.request_id)
            self._orders.lookups.append(request.request_id)
        return KVSource.LOCAL

    def _raise_perhaps(self) -> None:
        if self._trouble.strikes("raises"):
            raise StoreError("on purpose")

    def _found(self, request: RequestView) -> Sequence[BlockHash]:
        hashes = request.prompt_block_hashes
        lacks = [not self._store.has(self._shape, each) for each in hashes]
        return hashes[: [*lacks, True].index(True)]

    def get_num_new_matched_tokens(
        self, request: RequestView, num_computed_tokens: int
    ) -> Match | None:
        self._raise_perhaps()
        if request.request_id in self._unknown:
            return None
        num_tokens = len(self._found(request)) * self._shape.block_size - num_computed_tokens
        return Match(max(0, num_tokens), is_async=self._is_async)

    def update_state_after_alloc(
        self,
        request: RequestView,
        block_ids: Sequence[BlockId],
        num_external_tokens: int,
        *,
        generations: Sequence[int] = (),
    ) -> None:
        self._raise_perhaps()
        if generations:
            self._num_saved[request.request_id] = 0
        if not num_external_tokens:
            return
        found = list(zip(self._found(request), block_ids, strict=False))
        first = len(found) - num_external_tokens // self._shape.block_size
        load = Load(request.request_id, found[first:], first * self._shape.block_size)
        if self._is_async:
            load.load_id = next(self._load_ids)
            self._orders.loads.append(load)
        else:
            self._inside[request.request_id] = load

    def build_connector_meta(self, step: StepView) -> ConnectorMetadata | None:
        for request_id in step:
            step.get(request_id)
            self._raise_perhaps()
        orders, size = Orders(), self._shape.block_size
        for request_id in step:
            view, blocks, _, _, end = step.get(request_id)
            if view.is_unproven:
                continue
            first = self._num_saved.get(request_id, 0)
            full = slice(first, end // size)
            todo = list(zip(view.prompt_block_hashes[full], blocks[full], strict=False))
            if todo:
                orders.saves.append(Save(request_id, todo))
                self._num_saves += 1
            self._num_saved[request_id] = max(first, end // size)
        orders.loads = [self._inside.pop(each) for each in step if each in self._inside]
        return orders.drain()

    def take_instructions(self) -> ConnectorMetadata | None:
        return self._orders.drain()

    def preempted(
        self, request: RequestView, block_ids: Sequence[BlockId], generations: Sequence[int]
    ) -> Hold | None:
        if not self._num_saved.get(request.request_id):  # with nothing under way
            self._raise_perhaps()
        return self._hold(request, block_ids)

    def request_finished(
        self, request: RequestView, block_ids: Sequence[BlockId], generations: Sequence[int]
    ) -> Hold | None:
        self._inside.pop(request.request_id, None)
        self._unknown.discard(request.request_id)
        hold = self._hold(request, block_ids)
        self._num_saved.pop(request.request_id, None)
        return hold

    def _hold(self, request: RequestView, block_ids: Sequence[BlockId]) -> Hold | None:
        if not block_ids or not self._num_saved.get(request.request_id):
            return None
        hold = Hold(f"hold {next(self._hold_ids)}")
        end = Save(request.request_id, [], hold.hold_id, self._num_saves)
        self._orders.saves.append(end)
        self._num_saved[request.request_id] = 0
        return hold

    def update_connector_output(self, report: ConnectorReport) -> ConnectorNews:
        news = ConnectorNews.of(report)
        found = [RequestId(each.decode()) for each in report.payloads]
        ready = [each for each in found if each in self._unknown]
        self._unknown -= set(ready)
        return msgspec.structs.replace(news, ready=[(each, "looked up") for each in ready])


class ToyStoreWorker(KVConnectorWorker):
    """See `KVConnectorWorker`. Time is counted in polls."""

    def __init__(
        self, connector: ToyStoreConnector, context: ConnectorContext, wake: Callable[[], None]
    ) -> None:
        self._store, self._trouble = connector.store, connector.trouble
        self._shape, self._rank, self._wake = context.shape, context.rank, wake
        self._num_polls = 0
        self._step = Orders()
        self._failed: list[Failed] = []
        self._valid: list[int] = []
        self._todo: deque[tuple[int, Load | Save | RequestId]] = deque()
        self._num_saves = 0
        self._early: list[Save] = []

    def register_kv_caches(self, kv: torch.Tensor, layout: KVLayout) -> None:
        self._kv = kv

    def post(self, metadata: ConnectorMetadata) -> None:
        orders = msgspec.msgpack.decode(metadata.payload, type=Orders)
        for each in orders.loads:
            self._later(each)
        self._early += orders.saves
        self._end_holds()
        if self._rank == 0:
            for request_id in orders.lookups:
                self._later(request_id)

    def _end_holds(self) -> None:
        """Put the ends of holds behind the saves of steps that they wait for."""
        early, self._early = self._early, []
        for each in early:
            if each.num_before > self._num_saves:
                self._early.append(each)
            else:
                self._later(each)

    def _later(self, what: Load | Save | RequestId) -> None:
        self._todo.append((self._num_polls + self._trouble.polls(), what))
        self._wake()

    def start_load_kv(self, metadata: ConnectorMetadata) -> bool:
        self._step = msgspec.msgpack.decode(metadata.payload, type=Orders)
        self._failed = []
        self._valid = [self._num_valid(each) for each in self._step.loads]
        for load, num_valid in zip(self._step.loads, self._valid, strict=True):
            if num_valid < len(load.blocks):
                self._failed.append(self._failure(load, num_valid))
        return bool(self._step.loads)

    def wait_for_layer_load(self, layer: int) -> None:
        for load, num_valid in zip(self._step.loads, self._valid, strict=True):
            self._copy(load, num_valid, slice(layer, layer + 1))

    def wait_for_save(self) -> Sequence[Failed]:
        step, self._step, self._valid = self._step, Orders(), []
        failed, self._failed = self._failed, []
        for each in step.saves:
            self._later(each)
        self._num_saves += len(step.saves)
        self._end_holds()
        return failed

    def get_finished(self) -> ConnectorReport:
        self._num_polls += 1
        report = ConnectorReport(settled=[], received=[], failed=[], payloads=[])
        # In order: what was ordered first has happened first.
        while self._todo and self._todo[0][0] <= self._num_polls:
            self._do(self._todo.popleft()[1], report)
        if self._todo:
            self._wake()
        return report

    def _do(self, what: Load | Save | RequestId, report: ConnectorReport) -> None:
        if isinstance(what, str):
            report.payloads.append(what.encode())
        elif isinstance(what, Save):
            for key, block in what.blocks:
                self._store.save(self._shape, self._rank, key, self._kv[block].clone())
            if what.hold_id:
                released = LeaseEnd.RELEASED
                settled = Settled(request_id=what.request_id, end=released, nonce=what.hold_id)
                report.settled.append(settled)
        else:
            num_valid = self._num_valid(what)
            self._copy(what, num_valid, slice(None))
            if num_valid < len(what.blocks):
                report.failed.append(self._failure(what, num_valid))
                return
            num_bytes = len(what.blocks) * self._kv[0].nbytes
            report.received.append(
                Received(
                    request_id=what.request_id,
                    num_bytes=num_bytes,
                    num_descriptors=len(what.blocks),
                    wait_s=0.0,
                    transfer_s=1e-6,
                    load_id=what.load_id,
                )
            )

    def _num_valid(self, load: Load) -> int:
        lost = [
            self._trouble.strikes("loses") or not self._store.has(self._shape, key)
            for key, _ in load.blocks
        ]
        return [*lost, True].index(True)

    def _copy(self, load: Load, num_valid: int, layers: slice) -> None:
        for index, (key, block) in enumerate(load.blocks):
            if index < num_valid:
                self._kv[block, layers] = self._store.part(self._shape, self._rank, key)[layers]
            else:
                self._kv[block, layers] = GARBAGE

    def _failure(self, load: Load, num_valid: int) -> Failed:
        return Failed(
            request_id=load.request_id,
            reason=LoadFailure.DIGEST,
            detail="lost on purpose",
            load_id=load.load_id,
            num_valid_tokens=load.num_before + num_valid * self._shape.block_size,
        )


class ToyStoreConnector(KVConnectorBase, frozen=True, kw_only=True):
    """See `KVConnectorBase`.

    Attributes:
        is_async: It loads beside the steps.
        may_wait: It has to look first what there is.
    """

    name: str = STORE
    store: ToyStore = msgspec.field(default_factory=ToyStore)
    trouble: Trouble = msgspec.field(default_factory=Trouble)
    is_async: bool = False
    may_wait: bool = False

    def make_scheduler(self, context: ConnectorContext, endpoints: Any) -> ToyStoreScheduler:
        return ToyStoreScheduler(self, context)

    def make_worker(self, context: ConnectorContext, wake: Callable[[], None]) -> ToyStoreWorker:
        return ToyStoreWorker(self, context, wake)
