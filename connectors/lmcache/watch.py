"""The thread that looks prompts up, releases locks and watches the server's health.

Rank 0's thread looks up for the whole engine. A lookup that is not answered in time counts as a
miss; the locks that it may hold are released once the server has reported them. Until then other
lookups get little time, as a tier behind the server may hang.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from pdserve.config.tiers import LMCACHE_VERSION
from pdserve.connectors.lmcache.client import StoreGoneError
from pdserve.connectors.lmcache.messages import ChunkRelease, LookupDone, ServerState
from pdserve.errors import ConfigError
from pdserve.observe.log import log_event

if TYPE_CHECKING:
    from pdserve.connectors.lmcache.client import PendingLookup
    from pdserve.connectors.lmcache.messages import ChunkRange, StoreInstructions
    from pdserve.connectors.lmcache.moving import StoreLink
    from pdserve.connectors.lmcache.settings import LMCacheSettings

_log = logging.getLogger(__name__)

_POLL_S = 0.0005
_POLL_UNWANTED_S = 0.05
_SHARE_BEHIND_LATE = 0.05
"""Share of the time-out that lookups get while another one is late."""
_FORGET_S = 60.0
"""Seconds until an unanswered lookup is forgotten: by then the server has lost it, too."""


@dataclass
class _Lookup:
    """A lookup in progress.

    Attributes:
        is_wanted: Whether its request still waits for it; not if it was reported as late.
        is_late: Whether the server accepted the lookup but did not finish it in time.
    """

    chunks: ChunkRange
    pending: PendingLookup
    began_s: float
    is_wanted: bool = True
    is_late: bool = False


class StoreWatch(threading.Thread):
    """See the module.

    Args:
        block_size: Tokens per block of the engine; a chunk is a whole number of blocks.
        tells: Whether it reports the server's state; true for one rank, which also looks up.

    Attributes:
        is_refused: Whether the server answers, but can never serve this engine.
    """

    def __init__(
        self, link: StoreLink, settings: LMCacheSettings, *, block_size: int, tells: bool
    ) -> None:
        super().__init__(name="lmcache-watch", daemon=True)
        self._link = link
        self._settings = settings
        self._block_size = block_size
        self._tells = tells
        self._inbox: queue.SimpleQueue[ChunkRange | ChunkRelease | None] = queue.SimpleQueue()
        self._lookups: dict[int, _Lookup] = {}
        self._locked: dict[int, ChunkRange] = {}
        self._releases: list[Any] = []  # futures of the last ones
        self._ping: Any = None
        self._next_ping_s = 0.0
        self.is_refused = False
        self._warned_stages: set[str] = set()

    def post(self, instructions: StoreInstructions) -> None:
        """Queue lookups and releases."""
        for lookup in instructions.lookups:
            self._inbox.put(lookup)
        for release in instructions.releases:
            self._inbox.put(release)

    def are_read(self, chunks: ChunkRange) -> None:
        """Pass the locks on these chunks to a load; the session's end stays here."""
        if chunks.session in self._locked:
            self._locked[chunks.session] = msgspec.structs.replace(chunks, first=0, end=0)

    def connect(self) -> None:
        """Connect to the server and report its state; if it is down, log that and return.

        Raises:
            ConfigError: The server can never serve this engine.
        """
        link, client = self._link, self._link.client
        try:
            client.connect()
            self._require_whole_blocks()
        except ConfigError:
            self.is_refused = True
            raise
        except StoreGoneError as error:
            log_event(
                _log,
                "the KV store is not there: prompts are computed until it is",
                level=logging.WARNING,
                why=str(error),
                remedy="start `pdserve kv-server`, or look at --kv-transfer-config.lmcache.url",
            )
            return
        link.found()
        self._say(client.chunk_tokens)
        log_event(_log, "the KV store is there", chunk_tokens=client.chunk_tokens)
        # An HTTP side that does not say its version is asked for no more: lookups wait meanwhile.
        if self._tells and self._name_other_version():
            self._name_other_stages()

    def _require_whole_blocks(self) -> None:
        chunk_tokens = self._link.client.chunk_tokens
        if chunk_tokens % self._block_size:
            raise ConfigError(
                f"the LMCache server has chunks of {chunk_tokens} tokens (--chunk-size), "
                f"which is not a multiple of --block-size {self._block_size}: change one of them",
                param="kv-transfer-config.lmcache.url",
            )

    def close(self) -> None:
        """End the thread, if it runs."""
        self._inbox.put(None)
        if self.ident is not None:
            self.join()

    def run(self) -> None:
        """Serve until closed."""
        self._next_ping_s = time.monotonic() + self._settings.heartbeat_s
        is_open = True
        while is_open:
            try:
                is_open = self._turn()
            except Exception as error:  # noqa: BLE001 - no request may wait forever
                _log.exception("asking the store is broken")
                self._link.lost(error)
                self._give_up()
        self._give_all_back()

    def _turn(self) -> bool:
        """Process at most one instruction, and the server's answers; False: the end."""
        now_s = time.monotonic()
        wait_s = max(0.0, self._next_ping_s - now_s)
        wanted = next((each for each in self._lookups.values() if each.is_wanted), None)
        if wanted is not None:
            if self._inbox.empty():
                wanted.pending.wait(now_s, min(wait_s, _POLL_S))
            wait_s = 0.0
        elif self._lookups or self._ping is not None:
            wait_s = min(wait_s, _POLL_UNWANTED_S)
        try:
            taken = self._inbox.get(wait_s > 0.0, wait_s)
        except queue.Empty:
            pass
        else:
            if taken is None:
                return False
            self._take(taken)
        now_s = time.monotonic()
        self._poll(now_s)
        self._look_after_server(now_s)
        return True

    def _give_up(self) -> None:
        """Report a miss for every lookup that is waited for."""
        lookups, self._lookups = self._lookups, {}
        for session, lookup in lookups.items():
            if lookup.is_wanted:
                taken_s = time.monotonic() - lookup.began_s
                self._link.tell(LookupDone(session, 0, taken_s, is_late=True))

    def _give_all_back(self) -> None:
        if not self._link.is_up:
            return
        lost = [each.chunks for each in self._lookups.values()]
        for chunks in (*self._locked.values(), *lost):
            self._releases += self._link.client.release(chunks, is_last=True)
        deadline_s = time.monotonic() + self._settings.timeout_s
        for release in self._releases:
            release.wait(max(0.0, deadline_s - time.monotonic()))

    # --- the server

    def _look_after_server(self, now_s: float) -> None:
        link, settings = self._link, self._settings
        if link.was_lost.is_set():
            link.was_lost.clear()
            self._say(0)
        if self._ping is None and now_s >= self._next_ping_s:
            self._next_ping_s = now_s + max(settings.heartbeat_s, settings.timeout_s)
            self._ping = link.client.ping()
        if self._ping is None:
            return
        if self._ping.query():
            self._ping = None
            if not link.is_up and not self.is_refused:
                self._come_back()
        elif now_s > self._next_ping_s:
            self._ping = None
            link.lost(StoreGoneError(f"no answer to a ping within {settings.heartbeat_s:g} s"))

    def _see_its_end(self) -> None:
        """Wait for nothing from a server whose process has ended."""
        if self._link.is_up and self._link.client.has_server_ended():
            self._link.lost(StoreGoneError("its process has ended"))
            self._give_up()

    def _name_other_version(self) -> str:
        found = self._link.client.http.version()
        if found not in ("", LMCACHE_VERSION):
            log_event(
                _log,
                "the KV store is another version of LMCache, which nobody has tried",
                level=logging.WARNING,
                there=found,
                here=LMCACHE_VERSION,
                remedy="start `pdserve kv-server` instead",
            )
        return found

    def _name_other_stages(self) -> None:
        """Warn once of each set of other stages in the store, as a miss does not show its cause."""
        for stages in self._link.client.other_stages():
            if stages not in self._warned_stages:
                self._warned_stages.add(stages)
                log_event(
                    _log,
                    "an engine's KV in the store is not taken: it has other pipeline stages",
                    level=logging.WARNING,
                    there=stages,
                    here=self._link.client.stages,
                    remedy="give both the same --pipeline-parallel-size",
                )

    def _come_back(self) -> None:
        for each in self._lookups.values():
            each.is_late = False
        try:
            self.connect()
        except ConfigError as error:
            log_event(_log, "the KV store is of no use", level=logging.ERROR, why=str(error))

    def _say(self, chunk_tokens: int) -> None:
        if self._tells:
            self._link.tell(ServerState(chunk_tokens))

    # --- prompts

    def _take(self, taken: ChunkRange | ChunkRelease) -> None:
        now_s = time.monotonic()
        if not isinstance(taken, ChunkRelease):
            self._see_its_end()
            if not self._link.is_up:
                self._link.tell(LookupDone(taken.session, 0, 0.0, is_late=True))
                return
            try:
                pending = self._link.client.lookup(taken)
            except Exception:
                self._link.tell(LookupDone(taken.session, 0, 0.0, is_late=True))
                raise
            self._lookups[taken.session] = _Lookup(taken, pending, now_s)
            return
        lookup = self._lookups.get(taken.chunks.session)
        if lookup is not None:
            lookup.is_wanted = False
            return
        if taken.is_last:
            self._locked.pop(taken.chunks.session, None)
        # Also while the server does not answer: one that was only stopped has the locks still.
        self._releases = self._link.client.release(taken.chunks, is_last=taken.is_last)

    def _poll(self, now_s: float) -> None:
        if self._lookups:
            self._see_its_end()
        timeout_s = self._settings.timeout_s
        is_slow = any(each.is_late for each in self._lookups.values())
        for session, lookup in list(self._lookups.items()):
            taken_s = now_s - lookup.began_s
            has_answered = lookup.pending.has_answered
            patience_s = timeout_s * _SHARE_BEHIND_LATE if is_slow and has_answered else timeout_s
            if lookup.pending.poll(now_s):
                del self._lookups[session]
                self._finish(lookup, taken_s)
            elif lookup.is_wanted and taken_s > patience_s:
                lookup.is_wanted, lookup.is_late = False, has_answered
                self._link.tell(LookupDone(session, 0, taken_s, is_late=True))
                if not has_answered:
                    late = f"no answer to a lookup in {taken_s:.1f} s"
                    self._link.lost(StoreGoneError(late))
            elif taken_s > _FORGET_S:
                del self._lookups[session]

    def _finish(self, lookup: _Lookup, taken_s: float) -> None:
        num_chunks = lookup.pending.num_chunks or 0
        if lookup.is_wanted:
            self._locked[lookup.chunks.session] = lookup.chunks
            self._link.tell(LookupDone(lookup.chunks.session, num_chunks, taken_s))
        else:
            self._link.client.release(lookup.chunks, is_last=True)
