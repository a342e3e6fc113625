"""Looks up how much of a prompt each engine has, and learns from the answers.

An engine whose events are complete is looked up in the index. For other engines, and for a prompt
named by its bytes, only the prompts sent there are known.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Final, Protocol

from pdserve.config.policies import looks_at_prefixes
from pdserve.observe.log import log_event
from pdserve.proxy.brain.index import PrefixIndex
from pdserve.proxy.brain.metrics import TOKENIZED, set_by_engine
from pdserve.proxy.brain.prompt import KnownPrefix
from pdserve.wire.event_reader import ReaderState
from pdserve.wire.ids import GRAIN_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pdserve.config.http import ProxyConfig
    from pdserve.observe.clock import Clock
    from pdserve.proxy.backend import Backend
    from pdserve.proxy.backends import Backends
    from pdserve.proxy.bodies import ClientBody
    from pdserve.proxy.brain.metrics import PrefixMetrics
    from pdserve.proxy.brain.prompt import RoutePrompt
    from pdserve.proxy.brain.prompt_reader import PromptReader
    from pdserve.wire.hop import EngineStages

log = logging.getLogger(__name__)

_EXPECTED_S: Final = 10.0
"""How long a prompt that was sent to an engine counts as its own before its events say so."""
_MOST_HOLDERS: Final = 64
"""Of a prompt's beginning, of which it is said how much they have: those with most, and of equals
others for each request."""
_UNKNOWN_GRAINS: Final = 1024
"""Room of an engine that does not say how much it has."""
_MIN_GRAINS: Final = 16
_SHRINK: Final = 0.9


class Feed(Protocol):
    """The source of engines' events for the index."""

    def start(self) -> None:
        """See `EventFeed.start`."""

    async def stop(self) -> None:
        """See `EventFeed.stop`."""

    def exact(self, url: str) -> Sequence[int]:
        """See `EventFeed.exact`."""

    def states(self) -> Sequence[ReaderState]:
        """See `EventFeed.states`."""

    def lags_s(self) -> Mapping[str, float]:
        """See `EventFeed.lags_s`."""

    def resyncs(self) -> Mapping[str, int]:
        """See `EventFeed.resyncs`."""

    @property
    def num_resyncs(self) -> int:
        """See `EventFeed.num_resyncs`."""


class RoutedPrefixes:
    """The prefixes of an engine that publishes no KV events, estimated from prompts sent to it.

    It is assumed to have the prefixes sent last, as many as it has room for. If its answers say
    that it had less, less room is assumed; if it had as much, more room.

    Args:
        owner: URL of the engine.
        max_grains: Limit on its room, as it reports.

    Attributes:
        num_grains: Assumed room, in grains.
    """

    def __init__(self, index: PrefixIndex, owner: str, max_grains: int) -> None:
        self._index = index
        self._max_grains = max(_MIN_GRAINS, max_grains)
        self._recent: OrderedDict[int, None] = OrderedDict()
        self.num_grains = self._max_grains
        self.bit = index.open(owner)

    def sent(self, grains: Sequence[int]) -> None:
        """Note a prompt that was sent there. The end of a prefix is forgotten first."""
        recent = self._recent
        self._index.add(self.bit, [grain for grain in grains if grain not in recent])
        for grain in reversed(grains):
            recent[grain] = None
            recent.move_to_end(grain)
        self._forget_oldest()

    def answered(self, grains: Sequence[int], *, num_expected: int, num_found: int) -> None:
        """Learn how many of a prompt's expected grains the engine had."""
        if num_found < num_expected:
            lacking = [grain for grain in grains[num_found:num_expected] if grain in self._recent]
            room = int(self.num_grains * _SHRINK)
            self.num_grains = max(_MIN_GRAINS, room)
            for grain in lacking:
                del self._recent[grain]
            self._index.remove(self.bit, lacking)
            self._forget_oldest()
            self.sent(grains)  # which the engine has now
        else:
            self.num_grains = min(self._max_grains, self.num_grains + num_found)

    def close(self) -> None:
        """Leave the index for good."""
        self._index.retire(self.bit)

    def _forget_oldest(self) -> None:
        gone = []
        while len(self._recent) > self.num_grains:
            gone.append(self._recent.popitem(last=False)[0])
        self._index.remove(self.bit, gone)


class Prefixes:
    """See the module.

    Args:
        feed: Brings events into `index`.
        backends: The engines.
    """

    def __init__(
        self,
        reader: PromptReader,
        index: PrefixIndex,
        feed: Feed,
        backends: Backends,
        clock: Clock,
        metrics: PrefixMetrics,
    ) -> None:
        self._reader = reader
        self._index = index
        self._feed = feed
        self._backends = backends
        self._clock = clock
        self._metrics = metrics
        self._routed: dict[str, tuple[object, RoutedPrefixes]] = {}
        self._has_reported_misread = False

    async def start(self) -> None:
        """Read the tokenizer and start listening to the engines.

        Raises:
            ConfigError: The tokenizer cannot be used.
        """
        await asyncio.to_thread(self._reader.load)
        self._feed.start()

    async def stop(self) -> None:
        """Stop the work that `start` began."""
        await self._feed.stop()
        self._reader.close()

    async def read(self, body: ClientBody) -> RoutePrompt:
        """Return a request's prompt; never raises for what is in it."""
        start_s = self._clock.monotonic_s()
        prompt = await self._reader.read(body)
        if prompt.grains:
            self._metrics.prompts.labels(prompt.unread or TOKENIZED).inc()
            self._metrics.read.observe(self._clock.monotonic_s() - start_s)
        return prompt

    def known(self, prompt: RoutePrompt) -> dict[str, int]:
        """Return how many tokens of a prompt engines have, by URL; those with none are left out.

        O(grains): if all of a large fleet has the prompt's beginning, only some with most of it.
        """
        if not prompt.grains:
            return {}
        found: dict[str, int] = {}
        now_s, turn = self._clock.monotonic_s(), zlib.crc32(prompt.request_id.encode())
        depths = self._index.depths(prompt.grains, now_s, at_most=_MOST_HOLDERS, turn=turn)
        for bit, depth in depths.items():
            url = self._index.owner(bit)
            exact = () if prompt.unread else self._feed.exact(url)
            if not exact or bit in exact:
                found[url] = max(found.get(url, 0), depth * GRAIN_TOKENS)
        return found

    def sent(self, prompt: RoutePrompt, engine: Backend) -> KnownPrefix:
        """Note that an engine will compute a prompt, or receive its KV; return its known prefix."""
        if not prompt.grains:
            return KnownPrefix(0, is_exact=False)
        known = self.known(prompt)
        exact = () if prompt.unread else self._feed.exact(engine.url)
        if exact and engine.url not in known and len(known) >= _MOST_HOLDERS:
            known[engine.url] = self._index.depth_of(exact, prompt.grains) * GRAIN_TOKENS
        if exact:
            until_s = self._clock.monotonic_s() + _EXPECTED_S
            for bit in exact:
                self._index.expect(bit, prompt.grains, until_s)
        else:
            self._routed_of(engine).sent(prompt.grains)
        most = max((n for url, n in known.items() if self._is_like(url, engine)), default=0)
        return KnownPrefix(known.get(engine.url, 0), bool(exact), most)

    def _is_like(self, url: str, engine: Backend) -> bool:
        """Return whether the engine at a URL could have taken another one's part."""
        other = self._backends.get(url)
        return other is not None and other.role is engine.role

    def answered(
        self, prompt: RoutePrompt, engine: Backend, known: KnownPrefix, stages: EngineStages
    ) -> None:
        """Compare an engine's assumed part of a prompt with the part it reports."""
        if not prompt.grains or not stages.prompt_tokens or stages.num_choices != 1:
            return
        if not prompt.unread and stages.prompt_tokens != prompt.num_tokens:
            self._tell_misread(prompt, engine, stages)
            return
        error = abs(known.num_tokens - stages.cached_tokens)
        self._metrics.hit_error.labels("events" if known.is_exact else "routed").observe(error)
        if not known.is_exact:
            num_found = -(-stages.cached_tokens // GRAIN_TOKENS)
            self._routed_of(engine).answered(
                prompt.grains,
                num_expected=known.num_tokens // GRAIN_TOKENS,
                num_found=num_found,
            )

    def measure(self) -> None:
        """Set the gauges to the current values."""
        states = Counter(self._feed.states())
        for state in ReaderState:
            self._metrics.cores.labels(state.value).set(states[state])
        self._metrics.entries.set(len(self._index))
        self._metrics.resyncs.set(self._feed.num_resyncs)
        set_by_engine(self._metrics.lag, self._feed.lags_s())
        set_by_engine(self._metrics.gaps, self._feed.resyncs())

    def lags_s(self) -> Mapping[str, float]:
        """Return seconds since engines that publish KV events were last heard, by URL."""
        return self._feed.lags_s()

    def _routed_of(self, engine: Backend) -> RoutedPrefixes:
        """Return the record of prompts sent to this life of an engine."""
        info = engine.info
        life = None if info is None else info.incarnation
        known = self._routed.get(engine.url)
        if known is not None:
            if known[0] == life:
                return known[1]
            known[1].close()
        room = _UNKNOWN_GRAINS
        if info is not None:
            room = info.num_blocks * info.block_size // GRAIN_TOKENS
        routed = RoutedPrefixes(self._index, engine.url, room)
        self._routed[engine.url] = life, routed
        for url in self._routed.keys() - {each.url for each in self._backends}:
            self._routed.pop(url)[1].close()
        return routed

    def _tell_misread(self, prompt: RoutePrompt, engine: Backend, stages: EngineStages) -> None:
        """Count a prompt that the engine has tokenized differently; log it once."""
        self._metrics.misread.inc()
        if not self._has_reported_misread:
            self._has_reported_misread = True
            log_event(
                log,
                "prompts are tokenized here otherwise than at an engine: its KV is not found",
                level=logging.WARNING,
                engine=engine.url,
                tokens_here=prompt.num_tokens,
                tokens_there=stages.prompt_tokens,
                remedy="give --tokenizer and --chat-template what the engines have",
            )


def make_prefixes(
    config: ProxyConfig,
    backends: Backends,
    clock: Clock,
    metrics: PrefixMetrics,
    make_feed: Callable[[PrefixIndex], Feed],
) -> Prefixes | None:
    """Return the prefixes for a proxy's policies; None if they look at none.

    Args:
        make_feed: Creates the source of engines' events.
    """
    names = (config.prefill_policy, config.decode_policy, config.split_policy)
    if not looks_at_prefixes(*names):
        return None
    # Tokenizers are needed only to look at prefixes.
    from pdserve.proxy.brain.prompt_reader import PromptReader

    index = PrefixIndex()
    reader = PromptReader(config, backends.max_model_len)
    return Prefixes(reader, index, make_feed(index), backends, clock, metrics)
