"""The scheduler half: asks every child, lets the cheapest load, and combines their news.

An exception that a child raises over a request ends only that request, at the latest before its
next step; the other children still get every call, exactly once.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from pdserve.connectors.base import (
    ConnectorNews,
    Hold,
    KVConnectorScheduler,
    KVSource,
    Match,
    guarded,
)
from pdserve.connectors.multi.messages import ChildNews, MultiInstructions
from pdserve.connectors.multi.sources import Costs, LoadPlan, choose
from pdserve.wire.request import FinishReason
from pdserve.wire.transfer import ConnectorReport, Failed, Received, Settled

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pdserve.connectors.views import RequestView, StepView
    from pdserve.wire.events import KVEvent
    from pdserve.wire.ids import BlockId, RequestId
    from pdserve.wire.request import KVStoreStats
    from pdserve.wire.transfer import ConnectorMetadata, Fact

_log = logging.getLogger(__name__)

F = TypeVar("F", Settled, Received, Failed)
_NO_PLAN: Final = LoadPlan([], is_async=False)


@dataclass(slots=True)
class _Entry:
    """State of one request.

    Attributes:
        plan: The latest plan, of what was matched last.
        is_pinned: Whether that match was pinned.
        loading: The child that loads beside the steps, and its number of tokens.
        inside: Tokens that each child loads inside the step in which the request starts.
        failed: Children whose loads have failed.
        owed: Holds from a preemption during which another child failed.
        is_over: Whether it has ended while its load has not.
    """

    view: RequestView
    plan: LoadPlan = _NO_PLAN
    is_pinned: bool = False
    loading: tuple[str, int] | None = None
    inside: dict[str, int] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    owed: list[Hold] = field(default_factory=list)
    is_over: bool = False


class MultiScheduler(KVConnectorScheduler):
    """See `KVConnectorScheduler`.

    Args:
        children: Scheduler halves, by the names of their connectors.
        block_size: Tokens per block.
    """

    def __init__(self, children: Mapping[str, KVConnectorScheduler], *, block_size: int) -> None:
        self._children = children
        self._block_size = block_size
        self._entries: dict[RequestId, _Entry] = {}
        self._broken: dict[RequestId, Exception] = {}
        self._starting: list[RequestId] = []
        self._costs = Costs()
        self._faults: Counter[str] = Counter()
        self.hands_over = any(each.hands_over for each in children.values())
        self.num_loaded: Counter[str] = Counter(dict.fromkeys(children, 0))

    @property
    def faults(self) -> Mapping[str, int]:  # type: ignore[override]
        """Faults of all children and its own."""
        faults = self._faults.copy()
        for child in self._children.values():
            faults.update(child.faults)
        return faults

    @property
    def store_stats(self) -> KVStoreStats | None:  # type: ignore[override]
        """Sum over all stores; the first one determines whether it is up."""
        said = [each.store_stats for each in self._children.values()]
        stats = [each for each in said if each is not None]
        return stats[0].plus(stats[1:]) if stats else None

    @property
    def num_open(self) -> int:
        """Number of requests that have not ended, or whose loads have not."""
        return len(self._entries)

    # ---- requests come and go --------------------------------------------------------------

    def request_arrived(self, request: RequestView) -> KVSource:
        """See `KVConnectorScheduler`. If a child refuses, those before it are told of the end."""
        sources: list[KVSource] = []
        taken: list[KVConnectorScheduler] = []
        for child in self._children.values():
            source = guarded(partial(child.request_arrived, request))
            if isinstance(source, Exception):
                for other in taken:
                    guarded(partial(other.request_finished, request, (), ()))
                raise source
            taken.append(child)
            sources.append(source)
        self._entries[request.request_id] = _Entry(request)
        return next((each for each in sources if each is not KVSource.LOCAL), KVSource.LOCAL)

    def preempted(
        self, request: RequestView, block_ids: Sequence[BlockId], generations: Sequence[int]
    ) -> Hold | None:
        """See `KVConnectorScheduler`."""
        entry = self._entries[request.request_id]
        holds, errors = self._let_go(
            lambda child: child.preempted(request, block_ids, generations), self._children
        )
        if errors:  # the request ends next, which returns the others' holds
            entry.owed += holds
            raise next(iter(errors.values()))
        return _together(holds)

    def request_finished(
        self, request: RequestView, block_ids: Sequence[BlockId], generations: Sequence[int]
    ) -> Hold | None:
        """See `KVConnectorScheduler`.

        If a child fails over an end, that is logged, and the others' holds still count.
        """
        entry = self._entries[request.request_id]
        children = dict(self._children)
        holds: list[Hold] = []
        if request.finish_reason is FinishReason.HANDOFF:
            error = self._broken.pop(request.request_id, None)
            if error is not None:
                raise error
            # If this raises, the request ends in another way, which no child has been told yet.
            for name in [name for name, child in children.items() if child.hands_over]:
                hold = children.pop(name).request_finished(request, block_ids, generations)
                holds += [] if hold is None else [_named(hold, name)]
        self._broken.pop(request.request_id, None)
        others, errors = self._let_go(
            lambda child: child.request_finished(request, block_ids, generations), children
        )
        for name, error in errors.items():
            _log.error("%s failed over the end of %s", name, request.request_id, exc_info=error)
            if entry.is_pinned and block_ids:  # a peer may be written from its blocks
                others.append(Hold("", connector=name))
        entry.is_over = True
        if request.request_id in self._starting:
            self._starting.remove(request.request_id)
        if entry.loading is None:
            del self._entries[request.request_id]
        return _together([*holds, *others, *entry.owed])

    def _let_go(
        self,
        end: Callable[[KVConnectorScheduler], Hold | None],
        children: Mapping[str, KVConnectorScheduler],
    ) -> tuple[list[Hold], dict[str, Exception]]:
        """Tell children of an end; return their holds, and the errors of those that failed."""
        holds: list[Hold] = []
        errors: dict[str, Exception] = {}
        for name, child in children.items():
            hold = guarded(partial(end, child))
            if isinstance(hold, Exception):
                errors[name] = hold
            elif hold is not None:
                holds.append(_named(hold, name))
        return holds, errors

    # ---- loads -----------------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: RequestView, num_computed_tokens: int
    ) -> Match | None:
        """See `KVConnectorScheduler`.

        A request does not wait for a store's answer if its whole prompt is available elsewhere.
        """
        entry = self._entries[request.request_id]
        matches: dict[str, Match] = {}
        unknown: list[str] = []
        for name, child in self._children.items():
            match = child.get_num_new_matched_tokens(request, num_computed_tokens)
            if match is None:
                unknown.append(name)
            elif name in entry.failed:
                matches[name] = msgspec.structs.replace(match, num_tokens=0)
            else:
                matches[name] = match
        num_missing = len(request.prompt_token_ids) - num_computed_tokens
        beside = [each.num_tokens for each in matches.values() if each.is_async]
        has_all = max(beside, default=0) >= num_missing
        if any(self._children[name].hands_over or not has_all for name in unknown):
            return None

        def num_behind(name: str, num_tokens: int) -> int:
            child = self._children[name]
            match = child.get_num_new_matched_tokens(request, num_computed_tokens + num_tokens)
            return 0 if match is None or match.is_async else match.num_tokens

        entry.plan = plan = choose(matches, num_behind, self._costs)
        entry.is_pinned = any(each.is_pinned for each in matches.values())
        return Match(plan.num_tokens, plan.is_async, entry.is_pinned)

    def update_state_after_alloc(
        self,
        request: RequestView,
        block_ids: Sequence[BlockId],
        num_external_tokens: int,
        *,
        generations: Sequence[int] = (),
    ) -> None:
        """See `KVConnectorScheduler`.

        Only the child that loads is told of a load beside the steps. All are told of the start,
        those that load last, so that no load has begun if another child fails.
        """
        entry = self._entries[request.request_id]
        plan = entry.plan if num_external_tokens else _NO_PLAN
        parts = dict(plan.parts)
        if not plan.is_async:
            for name in sorted(self._children, key=parts.__contains__):
                self._children[name].update_state_after_alloc(
                    request, block_ids, parts.get(name, 0), generations=generations
                )
            entry.inside = parts
            if parts:
                self._starting.append(request.request_id)
            return
        ((name, num_tokens),) = plan.parts
        self._children[name].update_state_after_alloc(request, block_ids, num_tokens)
        entry.loading = name, num_tokens

    # ---- steps -----------------------------------------------------------------------------

    def build_connector_meta(self, step: StepView) -> ConnectorMetadata | None:
        """See `KVConnectorScheduler`.

        A request over which a child fails is left out of that child's step. It ends before its
        next step, before any child has been told of that one.
        """
        over = next((each for each in step if each in self._broken), None) if self._broken else None
        if over is not None:
            step.get(over)  # attributes the error to this request
            raise self._broken.pop(over)
        num_loading: Counter[str] = Counter()
        lost: list[RequestId] = []
        said: dict[str, ConnectorMetadata | None] = {}
        for name, child in self._children.items():
            said[name], broken = self._said(name, child, step)
            for request_id in self._starting:
                num_tokens = self._entries[request_id].inside.get(name, 0)
                num_loading[name] += num_tokens
                if num_tokens and request_id in broken:
                    lost.append(request_id)
        self._starting.clear()
        self.num_loaded.update(num_loading)
        loads = {name: num_tokens for name, num_tokens in num_loading.items() if num_tokens}
        instructions = MultiInstructions.of(said)
        instructions = msgspec.structs.replace(instructions, num_loading=loads, lost=lost)
        return instructions.to_metadata()

    def _said(
        self, name: str, child: KVConnectorScheduler, step: StepView
    ) -> tuple[ConnectorMetadata | None, set[RequestId]]:
        """Return a child's metadata for a step, and the requests over which it failed."""
        broken: set[RequestId] = set()
        while True:
            left = step.without(broken) if broken else step
            said = guarded(partial(child.build_connector_meta, left))
            if not isinstance(said, Exception):
                return said, broken
            over = {left.asked_about} if left.asked_about in set(left) else set(left)
            _log.error("%s failed over a step with %s", name, sorted(over), exc_info=said)
            if not over:
                return None, broken
            broken |= over
            self._broken.update(dict.fromkeys(over, said))

    def take_instructions(self) -> ConnectorMetadata | None:
        """See `KVConnectorScheduler`."""
        said = {name: child.take_instructions() for name, child in self._children.items()}
        return MultiInstructions.of(said).to_metadata()

    def end_reservations(self) -> None:
        """See `KVConnectorScheduler`."""
        for child in self._children.values():
            child.end_reservations()

    def take_events(self) -> Sequence[KVEvent]:
        """See `KVConnectorScheduler`. Events of all children."""
        return [event for child in self._children.values() for event in child.take_events()]

    # ---- news ------------------------------------------------------------------------------

    def update_connector_output(self, report: ConnectorReport) -> ConnectorNews:
        """See `KVConnectorScheduler`. Each child sees only reports of its own worker halves."""
        payloads: dict[str, list[bytes]] = {name: [] for name in self._children}
        for each in map(ChildNews.from_payload, report.payloads):
            if each.payload is not None:
                payloads[each.child].append(each.payload)
            else:
                self._costs.observe(each.child, each.num_tokens, each.waited_s)
        said: list[ConnectorNews] = []
        for name, child in self._children.items():
            own = ConnectorReport(
                settled=self._of(name, report.settled),
                received=self._of(name, report.received),
                failed=self._of(name, report.failed),
                failing=self._of(name, report.failing),
                given_up=report.given_up,
                kept=report.kept,
                payloads=payloads[name],
            )
            if not own:
                continue
            news = guarded(partial(child.update_connector_output, own))
            if isinstance(news, Exception):
                facts: list[Received | Failed] = [*own.received, *own.failed]
                for fact in facts:  # the loads have ended all the same
                    self._end_load(name, fact.request_id)
                raise news
            said.append(self._combined(name, news))
        kinds = ConnectorNews.__struct_fields__
        return ConnectorNews(
            **{k: [each for one in said for each in getattr(one, k)] for k in kinds}
        )

    def _of(self, name: str, facts: Sequence[F]) -> list[F]:
        return [each for each in facts if self._is_of(name, each)]

    def _is_of(self, name: str, fact: Fact) -> bool:
        """Whether a fact is this child's; failed loads inside a step may name no connector."""
        if fact.connector:
            return fact.connector == name
        entry = self._entries.get(fact.request_id)
        return entry is not None and name in entry.inside

    def _combined(self, name: str, news: ConnectorNews) -> ConnectorNews:
        """Interpret a child's news in the light of the other children."""
        loaded: list[Received] = []
        failed: list[Failed] = []
        elsewhere: list[Failed] = []
        for each in news.loaded:
            num_tokens = self._end_load(name, each.request_id)
            if num_tokens:
                loaded.append(each)
                self.num_loaded[name] += num_tokens
                took_s = each.elapsed_s or each.wait_s + each.transfer_s
                self._costs.observe(name, num_tokens, took_s)
        for lost in news.failed:
            entry = self._entries.get(lost.request_id)
            if entry is None or (entry.loading is None and name in entry.inside):
                if entry is not None:
                    entry.failed.add(name)
            elif self._end_load(name, lost.request_id):
                (elsewhere if self._is_elsewhere(name, entry, lost) else failed).append(lost)
        return msgspec.structs.replace(
            news,
            loaded=loaded,
            failed=failed,
            elsewhere=elsewhere,
            retried=[each for each in news.retried if self._loads(name, each.request_id)],
            released=[msgspec.structs.replace(each, connector=name) for each in news.released],
        )

    def _loads(self, name: str, request_id: RequestId) -> bool:
        entry = self._entries.get(request_id)
        return entry is not None and entry.loading is not None and entry.loading[0] == name

    def _end_load(self, name: str, request_id: RequestId) -> int:
        """End a load beside the steps; return its tokens, 0 if there is no such load."""
        if not self._loads(name, request_id):
            self._faults["report_unknown"] += 1
            return 0
        entry = self._entries[request_id]
        assert entry.loading is not None
        (_, num_tokens), entry.loading = entry.loading, None
        if entry.is_over:
            del self._entries[request_id]
        return num_tokens

    def _is_elsewhere(self, name: str, entry: _Entry, failed: Failed) -> bool:
        """Whether another source has the tokens that failed to arrive.

        To replace an engine whose KV is leased, it must have them all: whether to compute tokens
        here in that engine's place is not decided here. A push, planned elsewhere, has no
        replacement.
        """
        entry.failed.add(name)
        if entry.is_over or entry.is_pinned:
            return False
        size, request = self._block_size, entry.view
        num_valid = failed.num_valid_tokens - failed.num_valid_tokens % size
        num_found = 0
        for other, child in self._children.items():
            if other not in entry.failed:
                match = child.get_num_new_matched_tokens(request, num_valid)
                num_found = max(num_found, 0 if match is None else match.num_tokens)
        num_left = len(request.prompt_token_ids) - num_valid - num_found
        return num_found > 0 and (num_left < size or not self._children[name].hands_over)


def _named(hold: Hold, name: str) -> Hold:
    return msgspec.structs.replace(hold, connector=name)


def _together(holds: Sequence[Hold]) -> Hold | None:
    """Combine holds into one that ends when all of them have; the first may have a handoff."""
    return msgspec.structs.replace(holds[0], others=tuple(holds[1:])) if holds else None
