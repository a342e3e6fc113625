"""LMCache's scheduler half: what the store has of each prompt, what to load, what to save.

    arrival       look up the prompt's whole chunks; the server takes read locks on what it has
    match         what was found beyond the local hit; None until the server answers, or is late
    start         what was matched is loaded inside the step; the other locks are released
    steps         chunks that were computed since, and that the server lacks, are saved
    end           the same; its blocks are held until the saves are over

Loads run inside the step in which the request starts, so that the model computes a layer while
the next ones arrive. Other requests in the step wait as well, but for less time than computing
the same tokens would take.

A chunk is saved only once a token has been sampled after it: by then no rank has lost a load that
it depends on, and its values are finite. So a later request never loads unverified KV.
"""

from __future__ import annotations

import array
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, assert_never

import msgspec

from pdserve.connectors.base import (
    ConnectorNews,
    Hold,
    KVConnectorScheduler,
    KVSource,
    Match,
)
from pdserve.connectors.lmcache.messages import (
    ChunkLoad,
    ChunkRange,
    ChunkRelease,
    ChunkSave,
    LoadDone,
    LoadUnlocked,
    LookupDone,
    RankProgress,
    SaveBarrier,
    ServerState,
    StoreInstructions,
    read_news,
)
from pdserve.wire.request import KVStoreStats
from pdserve.wire.transfer import ConnectorMetadata, Fetched

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.connectors.base import ConnectorContext
    from pdserve.connectors.lmcache.settings import LMCacheSettings
    from pdserve.connectors.views import RequestView, StepView
    from pdserve.wire.ids import BlockId, RequestId
    from pdserve.wire.transfer import ConnectorReport


@dataclass
class _Tracked:
    """State of one request.

    Attributes:
        looked_up: Its chunks that were looked up, whose read locks it may hold.
        num_found: How many of these, from the first, can be loaded; None = not known yet.
        load: A load that is staged but not yet in a step.
        loaded: The ranks' reports of its load.
        last_release: Ends the lookup's session, once all ranks have unlocked what they loaded.
        num_unlocked: The ranks that have.
        num_outputs_before: Output tokens when it got its blocks; None while it has none.
        next_chunk: The first chunk that is neither saved nor known to be in the store.
        bad_chunk: A chunk that the store has with wrong bytes.
        last_save: The newest session of a save.
    """

    view: RequestView
    looked_up: ChunkRange | None = None
    num_found: int | None = 0
    load: ChunkLoad | None = None
    loaded: list[LoadDone] = field(default_factory=list)
    last_release: ChunkRelease | None = None
    num_unlocked: int = 0
    num_outputs_before: int | None = None
    next_chunk: int = 0
    bad_chunk: int | None = None
    last_save: int = 0


class LMCacheScheduler(KVConnectorScheduler):
    """See `KVConnectorScheduler` and the module."""

    def __init__(self, context: ConnectorContext, settings: LMCacheSettings) -> None:
        self._num_ranks = context.num_ranks
        self._block_size = context.layout.block_size
        self._settings = settings
        self._tracked: dict[RequestId, _Tracked] = {}
        self._by_session: dict[int, _Tracked] = {}
        self._last_session = 0
        self._chunk_tokens = 0
        self._staged = StoreInstructions()
        self.store_stats: KVStoreStats = KVStoreStats()
        self._saved_by_rank: dict[int, int] = {}
        self._saved_up_to = 0
        self._pending_saves: deque[tuple[int, int]] = deque()  # session and chunks of each

    # --- requests

    def request_arrived(self, request: RequestView) -> KVSource:
        """See `KVConnectorScheduler`."""
        self._track(request)
        return KVSource.LOCAL

    def get_num_new_matched_tokens(
        self, request: RequestView, num_computed_tokens: int
    ) -> Match | None:
        """See `KVConnectorScheduler`."""
        tracked = self._tracked[request.request_id]
        if tracked.num_found is None:
            return None
        # Without the locks nothing can be loaded.
        num_found = tracked.num_found if self.store_stats.is_up and tracked.looked_up else 0
        num_tokens = num_found * self._chunk_tokens - num_computed_tokens
        return Match(max(0, num_tokens), is_async=False)

    def update_state_after_alloc(
        self,
        request: RequestView,
        block_ids: Sequence[BlockId],
        num_external_tokens: int,
        *,
        generations: Sequence[int] = (),
    ) -> None:
        """See `KVConnectorScheduler`."""
        tracked = self._tracked[request.request_id]
        tracked.num_outputs_before = len(request.output_token_ids)
        num_found = tracked.num_found or 0
        tracked.next_chunk = max(tracked.next_chunk, num_found)
        if tracked.looked_up is None:
            return
        if not num_external_tokens:
            # A request that loads from another source does not wait for the server's answer.
            is_known = tracked.num_found is not None
            self._release(tracked, 0, num_found if is_known else tracked.looked_up.end)
            return
        end_token = num_found * self._chunk_tokens
        first_token = end_token - num_external_tokens
        first = first_token // self._chunk_tokens
        chunks = msgspec.structs.replace(tracked.looked_up, first=first, end=num_found)
        table = list(block_ids[: end_token // self._block_size])
        tracked.load = ChunkLoad(chunks, first_token, table)
        if first:
            self._release(tracked, 0, first, is_last=False)

    def build_connector_meta(self, step: StepView) -> ConnectorMetadata | None:
        """See `KVConnectorScheduler`."""
        loads = []
        for request_id in step:
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            if tracked.load is not None:
                loads.append(tracked.load)
                tracked.load = None
            elif self._end_of_saves(tracked) > tracked.next_chunk:
                self._save(tracked, step.get(request_id).block_ids)
        return ConnectorMetadata(msgspec.msgpack.encode(loads)) if loads else None

    def take_instructions(self) -> ConnectorMetadata | None:
        """See `KVConnectorScheduler`."""
        if not self._staged:
            return None
        staged, self._staged = self._staged, StoreInstructions()
        return ConnectorMetadata(msgspec.msgpack.encode(staged))

    def preempted(
        self, request: RequestView, block_ids: Sequence[BlockId], generations: Sequence[int]
    ) -> Hold | None:
        """See `KVConnectorScheduler`. The request is looked up again, for its next start."""
        hold = self._let_go(request, block_ids)
        self._track(request)
        return hold

    def request_finished(
        self, request: RequestView, block_ids: Sequence[BlockId], generations: Sequence[int]
    ) -> Hold | None:
        """See `KVConnectorScheduler`."""
        return self._let_go(request, block_ids)

    def _track(self, request: RequestView) -> None:
        tracked = self._tracked[request.request_id] = _Tracked(request)
        num_chunks = len(request.prompt_token_ids) // max(1, self._chunk_tokens)
        if not self.store_stats.is_up or not num_chunks or _is_brought(request):
            return
        tokens = request.prompt_token_ids[: num_chunks * self._chunk_tokens]
        tracked.looked_up = self._range(request, tokens, 0, num_chunks)
        tracked.num_found = None
        self._by_session[tracked.looked_up.session] = tracked
        self._staged.lookups.append(tracked.looked_up)
        self.store_stats.num_lookups += 1
        self.store_stats.num_queried_tokens += len(tokens)

    def _let_go(self, request: RequestView, block_ids: Sequence[BlockId]) -> Hold | None:
        """Save what a request leaves in its blocks, if it had any, and cancel what it waits for."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return None
        if self._end_of_saves(tracked) > tracked.next_chunk:
            self._save(tracked, block_ids)
        if tracked.looked_up is not None and tracked.num_outputs_before is None:
            self._release(tracked, 0, tracked.looked_up.end)
        elif tracked.load is not None:
            self._release(tracked, tracked.load.chunks.first, tracked.load.chunks.end)
        if tracked.last_save <= self._saved_up_to:
            return None
        hold_id = f"lmcache {tracked.last_save} {request.request_id}"
        self._staged.saves.append(SaveBarrier(hold_id, request.request_id, tracked.last_save))
        return Hold(hold_id)

    # --- instructions for ranks

    def _range(
        self, request: RequestView, tokens: Sequence[int], first: int, end: int
    ) -> ChunkRange:
        self._last_session += 1
        return ChunkRange(
            session=self._last_session,
            request_id=request.request_id,
            token_ids=array.array("I", tokens).tobytes(),
            salt=request.cache_salt,
            first=first,
            end=end,
        )

    def _release(self, tracked: _Tracked, first: int, end: int, *, is_last: bool = True) -> None:
        assert tracked.looked_up is not None
        chunks = msgspec.structs.replace(tracked.looked_up, first=first, end=end)
        self._staged.releases.append(ChunkRelease(chunks, is_last))
        if is_last:
            self._by_session.pop(chunks.session, None)
            tracked.looked_up = None

    def _end_of_saves(self, tracked: _Tracked) -> int:
        """Return the index after the last chunk that may be saved by now."""
        before, policy = tracked.num_outputs_before, self._settings.save
        num_outputs = len(tracked.view.output_token_ids)
        if before is None or num_outputs <= before or policy == "off" or not self.store_stats.is_up:
            return 0
        num_prompt = len(tracked.view.prompt_token_ids)
        # The newest token's KV is computed by the next step.
        num_tokens = num_prompt + num_outputs - 1 if policy == "all" else num_prompt
        return num_tokens // self._chunk_tokens

    def _save(self, tracked: _Tracked, block_ids: Sequence[BlockId]) -> None:
        """Save the chunks that are ready, from the first one to the last that may wait."""
        first, ready = tracked.next_chunk, self._end_of_saves(tracked)
        tracked.next_chunk = ready
        num_pending = sum(num_chunks for _, num_chunks in self._pending_saves)
        room = max(0, self._settings.max_pending_chunks - num_pending)
        end = min(ready, first + room)
        self.store_stats.num_dropped_chunks += ready - end
        if end == first:
            return
        view, end_token = tracked.view, end * self._chunk_tokens
        tokens = [*view.prompt_token_ids, *view.output_token_ids][:end_token]
        chunks = self._range(view, tokens, first, end)
        bad = tracked.bad_chunk
        replaced = [bad] if bad is not None and first <= bad < end else []
        table = list(block_ids[: end_token // self._block_size])
        self._staged.saves.append(ChunkSave(chunks, table, replaced))
        self._pending_saves.append((chunks.session, end - first))
        tracked.last_save, tracked.bad_chunk = chunks.session, None

    # --- reports of ranks

    def update_connector_output(self, report: ConnectorReport) -> ConnectorNews:
        """See `KVConnectorScheduler`."""
        ready: list[tuple[RequestId, str]] = []
        fetched: list[Fetched] = []
        for payload in report.payloads:
            match read_news(payload):
                case ServerState(chunk_tokens):
                    self.store_stats.is_up = chunk_tokens > 0
                    self._chunk_tokens = chunk_tokens or self._chunk_tokens
                case LookupDone() as found:
                    ready += self._take_lookup(found)
                case LoadDone() as loaded:
                    fetched += self._take_load(loaded)
                case LoadUnlocked(session):
                    self._take_unlocked(session)
                case RankProgress() as progress:
                    self._take_progress(progress)
                case _ as never:
                    assert_never(never)
        return ConnectorNews(released=report.settled, ready=ready, fetched=fetched)

    def _take_lookup(self, found: LookupDone) -> list[tuple[RequestId, str]]:
        """Take the result of a lookup; return the requests that may go on, and why."""
        self.store_stats.num_late_lookups += found.is_late
        tracked = self._by_session.get(found.session)
        if tracked is None or tracked.looked_up is None:
            return []  # it has ended; its locks are released
        tracked.num_found = found.num_chunks
        num_asked = tracked.looked_up.end * self._chunk_tokens
        if not found.num_chunks:
            self._release(tracked, 0, 0)
        what = "the store did not answer in" if found.is_late else "asked the store for"
        num_tokens = found.num_chunks * self._chunk_tokens
        why = f"{what} {found.seconds * 1e3:.1f} ms: it has {num_tokens} of {num_asked} tokens"
        return [(tracked.view.request_id, why)]

    def _take_load(self, loaded: LoadDone) -> list[Fetched]:
        """Take one rank's part of a load; the last one returns what arrived."""
        tracked = self._by_session.get(loaded.session)
        if tracked is None or tracked.looked_up is None:
            return []
        tracked.loaded.append(loaded)
        if len(tracked.loaded) < self._num_ranks:
            return []
        num_good = min(each.num_chunks for each in tracked.loaded)
        num_tokens = (num_good - loaded.first) * self._chunk_tokens
        self.store_stats.num_hit_tokens += num_tokens
        chunks, tracked.looked_up = tracked.looked_up, None
        none = msgspec.structs.replace(chunks, first=0, end=0)
        tracked.last_release = ChunkRelease(none, is_last=True)
        if num_good < (tracked.num_found or 0):
            tracked.next_chunk = min(tracked.next_chunk, num_good)
            tracked.bad_chunk = num_good
        return [
            Fetched(
                request_id=tracked.view.request_id,
                num_tokens=num_tokens,
                num_bytes=sum(each.num_bytes for each in tracked.loaded),
                seconds=max(each.seconds for each in tracked.loaded),
            )
        ]

    def _take_unlocked(self, session: int) -> None:
        """Take one rank's end of a load; the last one ends the session."""
        tracked = self._by_session.get(session)
        if tracked is None:
            return
        tracked.num_unlocked += 1
        if tracked.num_unlocked == self._num_ranks and tracked.last_release is not None:
            self._staged.releases.append(tracked.last_release)
            del self._by_session[session]

    def _take_progress(self, progress: RankProgress) -> None:
        self.store_stats = self.store_stats.plus([progress.stats])
        self._saved_by_rank[progress.rank] = progress.saved_up_to
        if len(self._saved_by_rank) == self._num_ranks:
            self._saved_up_to = min(self._saved_by_rank.values())
        while self._pending_saves and self._pending_saves[0][0] <= self._saved_up_to:
            self._pending_saves.popleft()


def _is_brought(request: RequestView) -> bool:
    """Whether another engine delivers its KV, so that the store need not read a disk for it."""
    is_pushed = request.kv_transfer_params.ticket is not None and not request.remote_decode
    return (is_pushed or request.handoff is not None) and not request.output_token_ids
