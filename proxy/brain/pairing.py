"""The joint decision as routing uses it, with its learned times and its records.

Learns from every request that ended well: the time for its prompt, between its tokens and for its
KV transfer. Engines that publish KV events also report what they have learned. Until enough is
known, the other policies decide.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from pdserve.config.policies import SHADOW
from pdserve.proxy.brain.decision import decide
from pdserve.proxy.brain.ledger import WorkLedger
from pdserve.proxy.brain.model import ServiceModel
from pdserve.proxy.brain.question import PairCandidate, RouteQuestion, ServiceObjectives
from pdserve.proxy.brain.record import DecisionLog, DecisionsShown, FitShown, ServedTimes
from pdserve.proxy.brain.work import prompt_work
from pdserve.proxy.story import Mode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from pdserve.config.http import ProxyConfig
    from pdserve.observe.clock import Clock
    from pdserve.observe.linear_fit import LinearFit
    from pdserve.proxy.backend import Backend
    from pdserve.proxy.brain.ledger import LedgerEntry
    from pdserve.proxy.brain.metrics import RouteMetrics
    from pdserve.proxy.brain.prompt import RoutePrompt
    from pdserve.proxy.brain.question import PairDecision
    from pdserve.proxy.brain.record import DecisionRecord
    from pdserve.proxy.brain.work import EngineWork, PromptWork
    from pdserve.proxy.story import Story
    from pdserve.wire.events import RoutingLoad

DWELL_S: Final = 30.0
MAX_SESSIONS: Final = 100_000
_MIN_GAPS: Final = 4


class Sessions:
    """The outcome of each session's last request; only the newest sessions if there are too many.

    Requests of one session (`X-Session-Id`, or `session_id` in the body) are served alike while the
    alternatives are close, so that a flickering choice does not move KV back and forth.
    """

    def __init__(self) -> None:
        self._last: OrderedDict[str, tuple[bool, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._last)

    def was_split(self, name: str, now_s: float) -> bool | None:
        """Return whether a session's last request was split; None if there was none recently."""
        last = self._last.get(name)
        return last[0] if last is not None and now_s - last[1] <= DWELL_S else None

    def note(self, name: str, *, is_split: bool, now_s: float) -> None:
        """Keep a request's outcome."""
        if name:
            self._last[name] = is_split, now_s
            self._last.move_to_end(name)
            if len(self._last) > MAX_SESSIONS:
                self._last.popitem(last=False)


class Pairing:
    """See the module.

    Args:
        on_change: Called when an engine's work has shrunk.

    Attributes:
        model: The learned service times.
        ledger: The work at each engine.
        log: Its recent decisions.
        is_shadow: Whether its decisions are not obeyed.
    """

    def __init__(
        self,
        config: ProxyConfig,
        clock: Clock,
        metrics: RouteMetrics,
        *,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._objectives = ServiceObjectives(config)
        self._clock = clock
        self._metrics = metrics
        self._sessions = Sessions()
        self._numbers = itertools.count()
        self.ledger = WorkLedger(clock.monotonic_s, on_change, self._computing_s)
        self.model = ServiceModel()
        self.log = DecisionLog()
        self.is_shadow = config.split_policy == SHADOW

    def decide(
        self,
        prompt: RoutePrompt,
        prefills: Sequence[Backend],
        decodes: Sequence[Backend],
        known: Mapping[str, int],
        may_pair: Callable[[str, str], bool],
        *,
        held_s: float = 0.0,
    ) -> PairDecision | None:
        """Return the best pair; None until enough is known for a decision.

        Args:
            prefills, decodes: Engines that may take either part; any may do both.
            known: Tokens of the prompt that engines have, by URL.
            held_s: Seconds that the request would be held back for a prompt engine.
        """
        if not self.model.is_known or not prompt.num_tokens:
            return None
        with self._metrics.seconds.time():
            question = self._question(prompt, prefills, decodes, known, held_s)
            return decide(question, may_pair)

    def note(self, prompt: RoutePrompt, decision: PairDecision) -> None:
        """Record a decision that a request is served by; in shadow, one that it might be."""
        is_split = not decision.chosen.is_local
        self._sessions.note(prompt.session, is_split=is_split, now_s=self._clock.monotonic_s())
        self.log.add(prompt.request_id, decision, self._clock.wall_s())

    def _question(
        self,
        prompt: RoutePrompt,
        prefills: Sequence[Backend],
        decodes: Sequence[Backend],
        known: Mapping[str, int],
        held_s: float,
    ) -> RouteQuestion:
        urls = {each.url for each in prefills}, {each.url for each in decodes}
        engines = {each.url: each for each in (*prefills, *decodes)}
        # Without a name, every engine has its turn.
        name, ledger = prompt.beginning or str(next(self._numbers)), self.ledger
        candidates = [
            PairCandidate(
                url,
                is_prefill=url in urls[0],
                is_decode=url in urls[1],
                hit_tokens=self.model.hit(known.get(url, 0), prompt.num_tokens),
                work=ledger.at(url),
                begun_s=ledger.begun_s(url),
                busy_s=ledger.busy_s(url),
                num_others=ledger.of_others(url).num_requests,
                room_tokens=_room_tokens(engines[url], ledger.at(url)),
            )
            for url in sorted(engines, key=lambda url: preference(name, url))
        ]
        computing = sum(ledger.at(url).num_prompts for url in urls[0] - urls[1])
        computing -= sum(ledger.at(url).num_coming for url in urls[1])
        times = self.model.times()
        return RouteQuestion(
            num_tokens=prompt.num_tokens,
            candidates=tuple(candidates),
            times=times,
            ttft_slo_s=self._objectives.ttft_s(prompt, times),
            itl_slo_s=self._objectives.itl_s(prompt),
            max_output=prompt.max_output,
            held_s=held_s,
            coming=max(0, computing) / max(1, len(urls[1])),
            was_split=self._sessions.was_split(prompt.session, self._clock.monotonic_s()),
            is_shadow=self.is_shadow,
        )

    def heard(self, engine: Backend, load: RoutingLoad) -> None:
        """Record an engine's reported load, unless it has gone."""
        prompts = load.num_prompts
        num_streams = load.num_requests - prompts
        if not engine.is_gone:
            self.ledger.heard(engine.url, num_prompts=prompts, num_streams=num_streams)

    def hold(
        self, engine: Backend, kind: str, prompt: RoutePrompt, num_cached: int
    ) -> AbstractContextManager[LedgerEntry]:
        """Count a leg as work of its engine while the block runs; see `WorkLedger.hold`."""
        url = None if engine.is_gone else engine.url
        num_cached = self.model.hit(num_cached, prompt.num_tokens)
        return self.ledger.hold(url, kind, prompt.num_tokens, num_cached)

    def learn(self, story: Story) -> None:
        """Learn from the measurements of a request that has ended well."""
        model, stages = self.model, story.prefill_stages
        if story.num_output_tokens:  # vectors have none
            model.learn_output(story.num_output_tokens)
        ttft_s = story.served_s if story.streamed else None
        entry = story.prompt_entry
        if entry is not None and stages is not None and story.has_one_choice:
            own = prompt_work(stages.prompt_tokens, stages.cached_tokens)
            computing_s = stages.queue_s + stages.prefill_s
            self.learn_prompt(entry, own, computing_s)
            known = story.known.get("prefill") or story.known.get("local")
            if known is not None:
                model.learn_hit(known.num_tokens, stages.cached_tokens)
            if ttft_s is not None:
                model.learn_hop(ttft_s - stages.kv_wait_s - computing_s)
        gap_s, entry = _gap_s(story), story.stream_entry
        if entry is not None and gap_s is not None:
            self.learn_step(entry, gap_s, story.num_output_tokens)
        stages, known = story.decode_stages, story.known.get("decode")
        wire_s = None
        if stages is not None and stages.kv_bytes and known is not None and stages.kv_transfer_s:
            wire_s = stages.kv_transfer_s
            model.learn_wire(stages.prompt_tokens - known.num_tokens, wire_s)
        record = self.log.of(story.request_id)
        if record is not None and record.decision is story.decision:
            record.measured = ServedTimes(ttft_s=ttft_s, itl_s=gap_s, wire_s=wire_s)
            record.taken = story.taken
            self._metrics.compare(record)
            if record.used is not None and ttft_s is not None:
                model.learn_first(record.used.ttft_s, ttft_s, record.decision.question.times)

    def learn_prompt(self, entry: LedgerEntry, own: PromptWork, seconds: float) -> None:
        """Learn from a prompt's time since it reached its engine.

        That time includes the prompts before it, less their part already computed, and the steps
        of the streams beside them.
        """
        prompts, times = entry.before.plus(own), self.model.times()
        seconds += min(entry.begun_s, times.computing_s(entry.before))
        seconds -= times.beside_s(prompts, entry.streams_before, entry.kv_before)
        if seconds > 0:
            self.model.learn_prompts(prompts, seconds)

    def learn_step(self, entry: LedgerEntry, gap_s: float, num_tokens: int) -> None:
        """Learn from the time between a stream's tokens, less the time for prompts beside it."""
        gap_s -= self.model.times().computing_s(entry.beside) / max(1, num_tokens)
        if gap_s > 0:
            self.model.learn_step(entry.streams_before + 1, entry.kv_before, gap_s)

    def backlog_s(self, engine: Backend) -> float:
        """Return seconds until an engine has computed its present prompts; a cautious guess."""
        work, begun_s = self.ledger.at(engine.url), self.ledger.begun_s(engine.url)
        times = self.model.times()
        return times.caution * times.backlog_s(work, begun_s)

    def _computing_s(self, prompts: PromptWork) -> float:
        return self.model.times().computing_s(prompts)

    def measure(self) -> None:
        """Set the gauges to the current values."""
        for name, fit in self._fits().items():
            self._metrics.model_error.labels(name).set(fit.error if fit.is_known else 0.0)

    def shown(self, decisions: list[DecisionRecord]) -> DecisionsShown:
        """Return the answer of `/debug/decisions`, with some of the decisions."""
        return DecisionsShown(
            is_known=self.model.is_known,
            is_obeyed=not self.is_shadow,
            mean_output_tokens=self.model.mean_output,
            model={
                name: FitShown(
                    samples=fit.num_samples,
                    error=fit.error,
                    weights=fit.weights,
                    reported_share=fit.reported_share,
                )
                for name, fit in self._fits().items()
            },
            num_reporting=self.model.num_reporting,
            decisions=decisions,
        )

    def _fits(self) -> Mapping[str, LinearFit]:
        return {"prefill": self.model.prefill, "step": self.model.step, "wire": self.model.wire}


def _room_tokens(engine: Backend, work: EngineWork) -> int | None:
    """Return the room for KV at an engine, in tokens; None if it does not report its capacity.

    The larger of its reported use and the use known here counts.
    """
    info = engine.info
    if info is None or not info.num_blocks:
        return None
    num_tokens = info.num_blocks * info.block_size
    num_known = work.kv_tokens + work.coming_tokens
    return num_tokens - max(round(engine.kv_usage * num_tokens), num_known)


def _gap_s(story: Story) -> float | None:
    """Return the time between a request's tokens; None if it cannot be derived.

    For an answer in one piece it can if the first token came from another engine. Chunks of several
    choices come side by side.
    """
    if not story.has_one_choice:
        return None
    if len(story.token_gaps) >= _MIN_GAPS:
        return story.token_gaps.median_s
    num, first_s = story.num_output_tokens, story.first_token_s
    is_split = story.mode is Mode.DISAGGREGATED and not story.streamed
    if not is_split or first_s is None or num <= _MIN_GAPS:
        return None
    return (story.clock.monotonic_s() - first_s) / (num - 1)


def preference(name: str, url: str) -> bytes:
    """Return a session's preference for an engine, the same at every proxy.

    Rendezvous hashing: an engine that comes or goes moves only the sessions it gains or loses.
    """
    return hashlib.blake2b(f"{name}\0{url}".encode(), digest_size=8).digest()
