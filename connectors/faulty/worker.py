"""The worker half: trouble with instructions on their way in, and with facts on their way out.

Time is counted in polls (calls of `get_finished`). It never blocks, and wakes the engine for as
long as it holds something back.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from pdserve.connectors.base import KVConnectorWorker
from pdserve.connectors.faulty.plan import MAX_POLLS_LATE, FaultKind
from pdserve.connectors.handover.instructions import (
    End,
    EndLease,
    Instructions,
    Load,
    PushNews,
    Registered,
    Reserve,
    Watch,
    Withdrawn,
)
from pdserve.wire.ids import RequestId
from pdserve.wire.transfer import ConnectorReport, Fact, Failed, LoadFailure, Received

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from pdserve.connectors.base import KVLayout
    from pdserve.connectors.faulty.plan import Plan
    from pdserve.wire.transfer import ConnectorMetadata, Endpoint

_Fact: TypeAlias = Fact | Registered | Withdrawn

_POLLS_TO_TIMEOUT: Final = 4
_MAX_REMEMBERED: Final = 64

_FIELDS: Final = Instructions.__struct_fields__
_FACTS: Final = ("settled", "received", "failed")
_PUSH_FACTS: Final = ("registered", "withdrawn")


@dataclass(frozen=True, slots=True)
class _Item:
    """One instruction.

    Attributes:
        key: Equal for instructions whose order matters.
    """

    field: str
    what: object
    key: str


class FaultyWorker(KVConnectorWorker):
    """See `KVConnectorWorker`."""

    def __init__(
        self, inner: KVConnectorWorker, wake: Callable[[], None], *, plan: Plan, rank: int
    ) -> None:
        self._inner = inner
        self._rank = rank
        self._wake = wake
        self._plan = plan
        self._num_polls = 0
        self._held: dict[str, deque[tuple[int, _Item]]] = {}
        self._nonces: dict[RequestId, str] = {}
        self._lost: list[tuple[int, Failed]] = []
        self._late: list[tuple[int, str, _Fact]] = []
        self._past_ends: deque[_Item] = deque(maxlen=_MAX_REMEMBERED)
        self._past_facts: deque[tuple[str, _Fact]] = deque(maxlen=_MAX_REMEMBERED)

    def register_kv_caches(self, kv: torch.Tensor, layout: KVLayout) -> Endpoint | None:
        """See `KVConnectorWorker`."""
        return self._inner.register_kv_caches(kv, layout)

    def start_load_kv(self, metadata: ConnectorMetadata) -> bool:
        """See `KVConnectorWorker`."""
        return self._inner.start_load_kv(metadata)

    def wait_for_layer_load(self, layer: int) -> None:
        """See `KVConnectorWorker`."""
        self._inner.wait_for_layer_load(layer)

    def save_kv_layer(self, layer: int) -> None:
        """See `KVConnectorWorker`."""
        self._inner.save_kv_layer(layer)

    def wait_for_save(self) -> Sequence[Failed]:
        """See `KVConnectorWorker`."""
        return self._inner.wait_for_save()

    def post(self, metadata: ConnectorMetadata) -> None:
        """See `KVConnectorWorker`. What is not held back goes on at once."""
        items = self._items(Instructions.from_metadata(metadata))
        if len(items) > 1 and self._plan.strikes(FaultKind.REORDER):
            items = self._reordered(items)
        ready: list[_Item] = []
        for item in items:
            ready += self._admit(item)
        self._send(ready)
        if self._is_holding:
            self._wake()

    def get_finished(self) -> ConnectorReport:
        """See `KVConnectorWorker`."""
        self._num_polls += 1
        self._send(self._due_items())
        report = self._inner.get_finished()
        facts: list[tuple[str, _Fact]] = [
            (name, fact) for name in _FACTS for fact in getattr(report, name)
        ]
        for news in map(PushNews.from_payload, report.payloads):
            facts += [(name, fact) for name in _PUSH_FACTS for fact in getattr(news, name)]
        facts += [("failed", failed) for failed in self._due_losses()]
        told = self._told(facts)
        if self._is_holding:
            self._wake()
        by_name = {
            name: [fact for kind, fact in told if kind == name] for name in _FACTS + _PUSH_FACTS
        }
        pushed = {name: by_name.pop(name) for name in _PUSH_FACTS}
        payloads = PushNews(rank=self._rank, **pushed).to_payloads()  # type: ignore[arg-type]
        return ConnectorReport(faults=report.faults, payloads=payloads, **by_name)  # type: ignore[arg-type]

    def close(self, timeout_s: float) -> None:
        """See `KVConnectorWorker`."""
        self._inner.close(timeout_s)

    @property
    def _is_holding(self) -> bool:
        return bool(self._held or self._lost or self._late)

    # --- instructions

    def _items(self, todo: Instructions) -> list[_Item]:
        items = []
        for name in _FIELDS:
            for what in getattr(todo, name):
                if isinstance(what, Load | Reserve):
                    self._nonces[what.request_id] = what.nonce
                if isinstance(what, str):  # a request's id, or a nonce itself
                    key = self._nonces.get(RequestId(what), what)
                else:
                    key = what.nonce
                items.append(_Item(name, what, key))
        return items

    def _reordered(self, items: list[_Item]) -> list[_Item]:
        """The requests in another order, each one's instructions in theirs."""
        keys = list(dict.fromkeys(item.key for item in items))
        order = {keys[old]: new for new, old in enumerate(self._plan.shuffled(len(keys)))}
        return sorted(items, key=lambda item: order[item.key])

    def _admit(self, item: _Item) -> list[_Item]:
        """What goes on now because of it; some or all of it may be held back."""
        plan, what = self._plan, item.what
        if item.key not in self._held:
            is_load = isinstance(what, Load | Reserve)
            may_drop = is_load or isinstance(what, Watch | End) or item.field == "aborts"
            if may_drop and plan.strikes(FaultKind.DROP):
                if isinstance(what, Load | Reserve):
                    self._lose(what)
                return []
            if plan.strikes(FaultKind.DELAY):
                self._held[item.key] = deque([(self._late_poll(), item)])
                return []
            admitted = [item]
        else:
            self._held[item.key].append((0, item))
            admitted = []
        if isinstance(what, EndLease | End):
            self._past_ends.append(item)
        may_repeat = isinstance(what, Watch | EndLease | End) or item.field == "aborts"
        if admitted and may_repeat and plan.strikes(FaultKind.DUPLICATE):
            admitted.append(item)
        if self._past_ends and plan.strikes(FaultKind.REPLAY):
            admitted.append(self._past_ends[plan.below(len(self._past_ends))])
        return admitted

    def _lose(self, load: Load | Reserve) -> None:
        failed = Failed(
            request_id=load.request_id,
            reason=LoadFailure.TIMEOUT,
            detail="it was lost on the way",
            load_id=load.load_id,
        )
        self._lost.append((self._num_polls + _POLLS_TO_TIMEOUT, failed))
        if isinstance(load, Reserve):  # who gives a push up is not heard of by P any more
            self._post({"unwatches": [load.nonce]})

    def _late_poll(self) -> int:
        return self._num_polls + 1 + self._plan.below(MAX_POLLS_LATE)

    def _due_items(self) -> list[_Item]:
        due: list[_Item] = []
        for key, queue in list(self._held.items()):
            while queue and queue[0][0] <= self._num_polls:
                due.append(queue.popleft()[1])
            if not queue:
                del self._held[key]
        return due

    def _send(self, items: list[_Item]) -> None:
        """Give items to the inner half in their order, as few posts as that takes."""
        batch: dict[str, list[object]] = {}
        place = 0
        for item in items:
            # A post is applied field by field: one that would overtake begins another post.
            if _FIELDS.index(item.field) < place:
                self._post(batch)
                batch = {}
            place = _FIELDS.index(item.field)
            batch.setdefault(item.field, []).append(item.what)
        self._post(batch)

    def _post(self, batch: dict[str, list[object]]) -> None:
        if batch:
            self._inner.post(Instructions(**batch).to_metadata())  # type: ignore[arg-type]

    # --- facts

    def _due_losses(self) -> list[Failed]:
        due = [failed for poll, failed in self._lost if poll <= self._num_polls]
        self._lost = [entry for entry in self._lost if entry[0] > self._num_polls]
        return due

    def _told(self, facts: list[tuple[str, _Fact]]) -> list[tuple[str, _Fact]]:
        """What of these, and of what was held back, is told now."""
        plan = self._plan
        told = [(name, fact) for poll, name, fact in self._late if poll <= self._num_polls]
        self._late = [entry for entry in self._late if entry[0] > self._num_polls]
        for name, fact in facts:
            if isinstance(fact, Received | Failed):
                self._nonces.pop(fact.request_id, None)
            behind = [poll for poll, _, other in self._late if _key(other) == _key(fact)]
            if behind or plan.strikes(FaultKind.LATE_REPORT):
                self._late.append((max(behind, default=self._late_poll()), name, fact))
                continue
            told.append((name, fact))
            if plan.strikes(FaultKind.REPEAT_REPORT):
                told.append((name, fact))
        if self._past_facts and plan.strikes(FaultKind.REPLAY_REPORT):
            told.append(self._past_facts[plan.below(len(self._past_facts))])
        self._past_facts.extend(told)
        return told


def _key(fact: _Fact) -> str:
    """Equal for facts whose order matters."""
    return fact.request_id if isinstance(fact, Received | Failed) else fact.nonce
