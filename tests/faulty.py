"""A connector around another one, in which transport trouble happens on purpose.

    FaultyConnector.around(MemoryConnector(), Plan(seed=7, rates={FaultKind.CORRUPT: 0.1}))

It models what networks, threads and memory do, and no more: between an engine core and its own
connector halves nothing is lost, so an instruction or a report that only travels inside the engine
comes late, twice or in another order, and never not at all. Whatever is dropped ends by somebody's
deadline:

| fault         | strikes                                   | ends by                           |
|---------------|-------------------------------------------|-----------------------------------|
| DROP          | heartbeats that never begin (`Watch`)     | the lease's end at P              |
|               | an abort; an end of a lease from P's side | the load's report; the lease's end |
|               | a load or reservation: nothing moves      | `Failed(TIMEOUT)`, some polls on  |
| DELAY         | an instruction, by some polls             | itself; what follows stays behind |
| DUPLICATE     | what may come twice                       | the receiver ignores the second   |
| REORDER       | instructions about different requests     |                                   |
| REPLAY        | a release, an end of a lease long over    | a nonce that nobody knows any more |
| CORRUPT       | a byte of a block on its way to D         | D's digests                       |
| TRUNCATE      | the rest of a block does not arrive       | D's digests                       |
| LATE_REPORT   | a fact, by some polls                     | itself                            |
| REPEAT_REPORT | a fact comes twice                        | quorum, scheduler: it counts once |
| REPLAY_REPORT | a fact of long ago comes again            | the same                          |
| LATE_FRAME    | a frame between ranks, and what is behind it, by some polls | itself          |
| LOST_LINK     | a link breaks with what is under way      | it is made again                  |
| LATE_COPY     | bytes begin to arrive some polls late     | itself; the transfer's deadline   |

A handoff that is replayed is none of these: it is carried by others than connectors.
Instructions about one request keep their order: that is a property of the thread they go to and
not of a network. What strikes bytes and frames (CORRUPT, TRUNCATE and the last three) needs the
memory connector, whose wire it is: links keep the order of frames, as TCP does, so a frame
that is dropped is a link that breaks.

Time is counted in polls (calls of `get_finished`). Nothing blocks, and the engine is woken for as
long as something is held back.
"""

from __future__ import annotations

import enum
import random
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from pdserve.connectors.base import KVConnectorBase, KVConnectorWorker
from pdserve.connectors.handover.instructions import (
    EndLease,
    Instructions,
    Load,
    PushNews,
    Registered,
    Reserve,
    Watch,
    Withdrawn,
)
from pdserve.connectors.memory import MemoryConnector
from pdserve.connectors.memory.exchange import Spoil, Trouble
from pdserve.wire.ids import RequestId
from pdserve.wire.transfer import ConnectorReport, Fact, Failed, LoadFailure, Received

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    import torch

    from pdserve.connectors.base import ConnectorContext, KVConnectorScheduler, KVLayout
    from pdserve.wire.transfer import ConnectorMetadata, Endpoint

MAX_POLLS_LATE: Final = 6
_Fact: TypeAlias = Fact | Registered | Withdrawn

_POLLS_TO_TIMEOUT: Final = 4
_MAX_REMEMBERED: Final = 64

_FIELDS: Final = Instructions.__struct_fields__
_FACTS: Final = ("settled", "received", "failed")
_PUSH_FACTS: Final = ("registered", "withdrawn")


class FaultKind(enum.Enum):
    """What can go wrong; the table of what each one does is the module's."""

    DROP = "drop"
    DELAY = "delay"
    DUPLICATE = "duplicate"
    REORDER = "reorder"
    TRUNCATE = "truncate"
    CORRUPT = "corrupt"
    REPLAY = "replay"
    LATE_REPORT = "late_report"
    REPEAT_REPORT = "repeat_report"
    REPLAY_REPORT = "replay_report"
    LATE_FRAME = "late_frame"
    LOST_LINK = "lost_link"
    LATE_COPY = "late_copy"


class Plan:
    """Says at each opportunity whether a fault strikes.

    The same seed and the same order of questions give the same answers.

    Args:
        rates: Share of the opportunities of a kind at which it strikes, 0 to 1.
        script: Further opportunities at which it does, counted from 0 for each kind.

    Attributes:
        num_struck: Faults so far.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        rates: Mapping[FaultKind, float] | None = None,
        script: Mapping[FaultKind, Collection[int]] | None = None,
    ) -> None:
        self._rng = random.Random(seed)
        self._rates = dict(rates or {})
        self._script = {kind: frozenset(places) for kind, places in (script or {}).items()}
        self._asked: Counter[FaultKind] = Counter()
        self.num_struck: Counter[FaultKind] = Counter()

    def strikes(self, kind: FaultKind) -> bool:
        """Whether `kind` strikes now; an opportunity is over once it was asked about."""
        place = self._asked[kind]
        self._asked[kind] += 1
        rate = self._rates.get(kind, 0.0)
        struck = place in self._script.get(kind, ()) or (rate > 0 and self._rng.random() < rate)
        self.num_struck[kind] += struck
        return struck

    def below(self, number: int) -> int:
        """A choice among `number` things."""
        return self._rng.randrange(number)

    def shuffled(self, number: int) -> list[int]:
        """An order of `number` things."""
        return self._rng.sample(range(number), number)

    def quiet(self) -> None:
        """Let nothing strike any more, drawn or written down."""
        self._rates.clear()
        self._script.clear()


_SPOILS = ((FaultKind.CORRUPT, Spoil.CORRUPT), (FaultKind.TRUNCATE, Spoil.TRUNCATE))


class FaultyConnector(KVConnectorBase, frozen=True, kw_only=True):
    """See `KVConnectorBase`.

    Attributes:
        inner: Makes the halves that do the work; built over `handover`.
    """

    inner: KVConnectorBase
    plan: Plan

    @classmethod
    def around(cls, inner: KVConnectorBase, plan: Plan) -> FaultyConnector:
        """Wrap a connector, which keeps its name and what it can do."""
        if isinstance(inner, MemoryConnector):
            inner = msgspec.structs.replace(inner, trouble=PlannedTrouble(plan))
        return cls(name=inner.name, capabilities=inner.capabilities, inner=inner, plan=plan)

    def make_scheduler(
        self, context: ConnectorContext, endpoints: Sequence[Endpoint]
    ) -> KVConnectorScheduler:
        return self.inner.make_scheduler(context, endpoints)

    def make_worker(self, context: ConnectorContext, wake: Callable[[], None]) -> FaultyWorker:
        inner = self.inner.make_worker(context, wake)
        return FaultyWorker(inner, wake, plan=self.plan, rank=context.rank)


class PlannedTrouble(Trouble):
    """A lossy link and a late mover of the memory connector. See `Trouble`."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def frame_polls(self) -> int:
        return self._late(FaultKind.LATE_FRAME)

    def loses_link(self) -> bool:
        return self._plan.strikes(FaultKind.LOST_LINK)

    def copy_polls(self) -> int:
        return self._late(FaultKind.LATE_COPY)

    def spoils(self) -> Spoil | None:
        return next((spoil for kind, spoil in _SPOILS if self._plan.strikes(kind)), None)

    def _late(self, kind: FaultKind) -> int:
        return 1 + self._plan.below(MAX_POLLS_LATE) if self._plan.strikes(kind) else 0


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
        return self._inner.register_kv_caches(kv, layout)

    def start_load_kv(self, metadata: ConnectorMetadata) -> bool:
        return self._inner.start_load_kv(metadata)

    def wait_for_layer_load(self, layer: int) -> None:
        self._inner.wait_for_layer_load(layer)

    def save_kv_layer(self, layer: int) -> None:
        self._inner.save_kv_layer(layer)

    def wait_for_save(self) -> Sequence[Failed]:
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
        payloads = PushNews(rank=self._rank, **pushed).to_payloads()
        return ConnectorReport(faults=report.faults, payloads=payloads, **by_name)

    def close(self, timeout_s: float) -> None:
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
        is_end = isinstance(what, EndLease) or item.field == "ends"
        may_repeat = is_end or isinstance(what, Watch) or item.field == "aborts"
        if item.key not in self._held:
            is_load = isinstance(what, Load | Reserve)
            may_drop = is_load or (may_repeat and not isinstance(what, EndLease))
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
        if is_end:
            self._past_ends.append(item)
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
            self._inner.post(Instructions(**batch).to_metadata())

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
