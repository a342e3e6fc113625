"""Chooses the engines of a request: a pair, one alone, or none.

Chooses; sends nothing. Decides which engines qualify, and whether a request is split at all; the
policies choose among several engines.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pdserve.config.http import KVTransfer
from pdserve.config.policies import PREDICTED, SHADOW
from pdserve.config.schema import Role
from pdserve.errors import UnavailableError
from pdserve.proxy.brain.candidates import Candidates
from pdserve.proxy.fitting import differ_in_text
from pdserve.proxy.policies import RouteRequest, policy_named, split_policy_named
from pdserve.proxy.policies.splitting import always
from pdserve.proxy.story import NotPushed
from pdserve.wire.transfer import KVMode

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from pdserve.config.http import ProxyConfig
    from pdserve.proxy.backend import Backend
    from pdserve.proxy.backends import Backends
    from pdserve.proxy.brain.pairing import Pairing
    from pdserve.proxy.brain.prefixes import Prefixes
    from pdserve.proxy.brain.prompt import RoutePrompt
    from pdserve.proxy.brain.question import PairCost, PairDecision
    from pdserve.proxy.policies import BackendView, Policy


@dataclass(frozen=True, slots=True)
class Disaggregate:
    """Prefill at `prefill`, and decode elsewhere.

    Attributes:
        decode: The decode engine of a push, in which both take part from the start; else None: it
            is chosen when the handoff has arrived.
        reason: Reason for the split.
        decision: The joint decision that chose the pair, if any; in shadow, the one that would
            have.
        preferred: The decode engine of that decision.
    """

    prefill: Backend
    decode: Backend | None = None
    reason: str = "default"
    decision: PairDecision | None = None
    preferred: Backend | None = None


@dataclass(frozen=True, slots=True)
class RunLocally:
    """One engine does everything, because of `reason`.

    Attributes:
        is_outage: Whether it replaces an engine that exists but cannot be used now.
        decision: As of `Disaggregate`.
    """

    engine: Backend
    reason: str
    is_outage: bool = False
    decision: PairDecision | None = None


@dataclass(frozen=True, slots=True)
class _Wish:
    """The request for which engines are chosen.

    Attributes:
        failed: Engines to try last.
        may_push: Whether this request's KV may be pushed.
        decision: Made before; to be followed if it still can be.
    """

    prompt: RoutePrompt
    failed: Collection[Backend] = ()
    may_push: bool = False
    decision: PairDecision | None = None


class Router:
    """Applies the policies to the engines there are.

    Args:
        prefixes: Knows each engine's part of a prompt; None: no policy looks at that.
        pairing: Chooses both engines at once; None: the policies choose one after the other.
    """

    def __init__(
        self,
        config: ProxyConfig,
        backends: Backends,
        prefixes: Prefixes | None,
        pairing: Pairing | None,
    ) -> None:
        self._backends = backends
        self._prefixes = prefixes
        self._pairing = pairing
        self._kv_mode = config.kv_mode
        self._prefill_policy = policy_named(config.prefill_policy, flag="prefill-policy")
        self._decode_policy = policy_named(config.decode_policy, flag="decode-policy")
        self._split = split_policy_named(config.split_policy, flag="split-policy")
        self._is_shadow = config.split_policy == SHADOW
        self._undecided = "cold" if config.split_policy == PREDICTED else "default"
        self._prefill_sequence = itertools.count()
        self._decode_sequence = itertools.count()
        self._split_sequence = itertools.count()
        self._candidates = None if pairing is None else Candidates(backends, self.known)

    def plan(
        self,
        prompt: RoutePrompt,
        *,
        failed: Collection[Backend] = (),
        may_push: bool = False,
        layout: str | None = None,
        among: Collection[Backend] | None = None,
        decision: PairDecision | None = None,
    ) -> Disaggregate | RunLocally:
        """Decide how to serve a request. Engines in `failed` come last.

        Args:
            among: Engines that may decode; None: any. Where none does, one that prefills may serve.
            decision: The choice on which the request was admitted; None: it is to be made.
            layout: Layout of the request's stream so far: engines with others are left out. None
                if it has not begun.
            may_push: Whether this request's KV may be pushed. If so, a decode engine that can
                push is preferred to one that cannot.

        Raises:
            UnavailableError: No engine can take it now.
        """
        if among is not None:
            ready: Sequence[Backend] = self._ready(layout)
        else:
            ready = self._decided_among(decision) or self.considered(prompt, layout, failed)
        self._check(ready, layout)
        wish = _Wish(prompt, failed, may_push, decision)
        decodes = [b for b in ready if b.decodes() and (among is None or b in among)]
        if not decodes:
            return self._locally(wish, ready, "no_decode", is_outage=True)
        prefills = [backend for backend in ready if backend.home is Role.PREFILL]
        if not prefills:
            dedicated = [backend for backend in decodes if backend.home is Role.DECODE]
            prefills = [b for b in ready if b.home is Role.BOTH] if dedicated else []
            if not prefills:
                reason = "no_prefill" if dedicated else "colocated"
                is_outage = self._backends.has_lost_prefill
                return self._locally(wish, decodes, reason, is_outage=is_outage)
        paired = [each for each in prefills if self._serves(wish, each, decodes)]
        if not paired:
            return self._locally(wish, decodes, "no_pair", is_outage=True)
        decided = self._decided(wish, paired, decodes)
        if decided is not None and not self._is_shadow:
            return decided
        plan = self._chosen_in_turn(wish, paired, decodes)
        return plan if decided is None else replace(plan, decision=decided.decision)

    def _chosen_in_turn(
        self, wish: _Wish, prefills: Sequence[Backend], decodes: Sequence[Backend]
    ) -> Disaggregate | RunLocally:
        """Return the policies' plan, with the engines chosen one after the other."""
        number = next(self._prefill_sequence)
        prefill = self._choose(self._prefill_policy, number, wish, prefills)
        assert prefill is not None
        if self._split is not always:
            number = next(self._split_sequence)  # or those that are split would skip every other
            local = self._choose(self._decode_policy, number, wish, decodes)
            assert local is not None
            seen = self._views(wish.prompt, (prefill, local))
            if reason := self._split(_shown(wish.prompt), *seen):
                return RunLocally(local, reason)
        receivers = [each for each in decodes if self._pushes(wish, prefill, each)]
        if receivers:
            decode = self._choose_decode(wish, receivers)
            return Disaggregate(prefill, decode, self._undecided)
        return Disaggregate(prefill, reason=self._undecided)

    def _decided(
        self, wish: _Wish, prefills: Sequence[Backend], decodes: Sequence[Backend]
    ) -> Disaggregate | RunLocally | None:
        """Return the joint decision's plan; None if there is none, or too little is known."""
        if self._pairing is None:
            return None
        first = [each for each in prefills if each not in wish.failed]
        second = [each for each in decodes if each not in wish.failed]
        second = [each for each in second if each.home is not Role.PREFILL]
        by_url = {each.url: each for each in (*first, *second)}

        def may_pair(prefill: str, decode: str) -> bool:
            return self._serves(wish, by_url[prefill], (by_url[decode],))

        decision = wish.decision
        if decision is None or not _can_follow(decision.chosen, by_url, may_pair):
            known = self.known(wish.prompt)
            decision = self._pairing.decide(wish.prompt, first, second, known, may_pair)
        if decision is None:
            return None
        self._pairing.note(wish.prompt, decision)
        chosen = decision.chosen
        prefill, decode = by_url[chosen.prefill], by_url[chosen.decode]
        if chosen.is_local:
            return RunLocally(decode, decision.reason, decision=decision)
        pushed = decode if self._pushes(wish, prefill, decode) else None
        return Disaggregate(prefill, pushed, decision.reason, decision, decode)

    def outlook(self, prompt: RoutePrompt, *, held_s: float = 0.0) -> PairDecision | None:
        """Return where a request would be sent now.

        None if too little is known, there is no engine, or pairs are not chosen by what is known.

        Args:
            held_s: Seconds that it would be held back for a prompt engine.
        """
        if self._pairing is None:
            return None
        by_url = {each.url: each for each in self.considered(prompt, None, ())}
        prefills = [each for each in by_url.values() if each.home is not Role.DECODE]
        decodes = [each for each in by_url.values() if each.home is not Role.PREFILL]

        def may_pair(prefill: str, decode: str) -> bool:
            return self._may_share(by_url[prefill], by_url[decode], prompt)

        known = self.known(prompt)
        return self._pairing.decide(prompt, prefills, decodes, known, may_pair, held_s=held_s)

    def known(self, prompt: RoutePrompt) -> Mapping[str, int]:
        """Return how many tokens of a prompt engines have, by URL; none if no policy asks."""
        return {} if self._prefixes is None else self._prefixes.known(prompt)

    def considered(
        self, prompt: RoutePrompt, layout: str | None, failed: Collection[Backend]
    ) -> Sequence[Backend]:
        """Return the engines that a plan considers: all that are ready, or some of many."""
        some = self._candidates and self._candidates.of(prompt, layout, failed)
        return some or self._ready(layout)

    def _decided_among(self, decision: PairDecision | None) -> Sequence[Backend]:
        """Return the engines that a decision was made among; none if one is not ready any more."""
        if decision is None:
            return ()
        found = [self._backends.get(each.url) for each in decision.question.candidates]
        ready = [each for each in found if each is not None and each.available]
        return ready if len(ready) == len(found) else ()

    def _views(self, prompt: RoutePrompt, engines: Iterable[Backend]) -> list[BackendView]:
        """Return a policy's view of engines."""
        known = self.known(prompt)
        return [self._backends.view(each, hit_tokens=known.get(each.url, 0)) for each in engines]

    def _serves(self, wish: _Wish, prefill: Backend, decodes: Iterable[Backend]) -> bool:
        """Return whether KV can reach one of those engines from this one, by pull or push."""
        return any(
            self._pulls(prefill, each, wish.prompt) or self._pushes(wish, prefill, each)
            for each in decodes
        )

    def _may_share(self, prefill: Backend, decode: Backend, prompt: RoutePrompt) -> bool:
        """Return whether two engines can share a request."""
        can_pair = self._backends.can_pair(prefill, decode)
        return can_pair and not (prompt.needs_equal_text and differ_in_text(prefill, decode))

    def _pulls(self, prefill: Backend, decode: Backend, prompt: RoutePrompt) -> bool:
        """Return whether a request can be pulled over this pair."""
        may_share = self._may_share(prefill, decode, prompt)
        return may_share and self._backends.lets_through(prefill, decode, KVMode.PULL)

    def _pushes(self, wish: _Wish, prefill: Backend, decode: Backend) -> bool:
        """Return whether a request should be pushed over this pair."""
        backends = self._backends
        if self._kv_mode is KVTransfer.PULL or not wish.may_push:
            return False
        may_share = self._may_share(prefill, decode, wish.prompt)
        if not (may_share and backends.can_push(prefill, decode)):
            return False
        if backends.lets_through(prefill, decode, KVMode.PUSH):
            return True
        insists = self._kv_mode is KVTransfer.PUSH
        return insists and backends.lets_through(prefill, decode, KVMode.PULL)

    def why_pulled(self, prefill: Backend) -> NotPushed | None:
        """Return why a request from this engine is not pushed; None if pushes are switched off."""
        if self._kv_mode is KVTransfer.PULL:
            return None
        can = prefill.info is not None and prefill.info.can_push
        can = can and any(
            each.decodes() and self._backends.can_push(prefill, each) for each in self._backends
        )
        return NotPushed.DISTRUSTED if can else NotPushed.ENGINES

    def decode_for(
        self,
        prefill: Backend,
        prompt: RoutePrompt,
        failed: Collection[Backend],
        *,
        without: Collection[Backend] = (),
    ) -> Backend | None:
        """Return a decode engine that can get KV from `prefill`; None if there is none.

        Args:
            without: Engines that are left out altogether.
        """
        candidates = [
            backend
            for backend in self._backends
            if backend not in without and self._can_decode_for(prefill, backend, prompt)
        ]
        return self._choose_decode(_Wish(prompt, failed), candidates)

    def can_decode_for(self, prefill: Backend, decode: Backend, prompt: RoutePrompt) -> bool:
        """Return whether a decode engine can be sent a handoff from `prefill` now."""
        is_known = self._backends.get(decode.url) is decode
        return is_known and self._can_decode_for(prefill, decode, prompt)

    def _can_decode_for(self, prefill: Backend, decode: Backend, prompt: RoutePrompt) -> bool:
        is_fit = decode.available and decode.decodes()
        return is_fit and self._pulls(prefill, decode, prompt)

    def local_engine(
        self,
        prompt: RoutePrompt,
        failed: Collection[Backend],
        *,
        layout: str | None = None,
        ends_with_prompt: bool = False,
    ) -> Backend:
        """Return an engine that can do everything: decode engines first, then any.

        Args:
            ends_with_prompt: Whether only the prompt is computed: prefill engines come first.

        Raises:
            UnavailableError: No engine is ready; or none has this layout, if there is one.
        """
        ready = self._ready(layout)
        untried = [backend for backend in ready if backend not in failed]
        last = Role.DECODE if ends_with_prompt else Role.PREFILL
        for pool in (
            [backend for backend in untried if backend.role is not last],
            untried,
            [backend for backend in ready if backend.role is not last],
            ready,
        ):
            if (engine := self._choose_decode(_Wish(prompt), pool)) is not None:
                return engine
        raise self._nobody("decode", layout)

    def _ready(self, layout: str | None) -> list[Backend]:
        """Return the engines available now; one that names no layout fits any."""
        ready = [backend for backend in self._backends if backend.available]
        return [b for b in ready if layout is None or b.layout in (None, layout)]

    def check_ready(self) -> None:
        """Check that requests can be served now.

        Raises:
            UnavailableError: Not now.
        """
        self._check(self._ready(None), None)

    def _check(self, ready: Sequence[Backend], layout: str | None) -> None:
        """Check that one of these engines can do everything, or all that is needed now."""
        if not ready:
            raise self._nobody("prefill", layout)
        if not any(b.decodes() for b in ready) and not self._backends.has_lost_decode:
            raise self._nobody("decode", layout)

    def _locally(
        self, wish: _Wish, engines: Sequence[Backend], reason: str, *, is_outage: bool
    ) -> RunLocally:
        engine = self._choose_decode(wish, engines)
        assert engine is not None
        return RunLocally(engine, reason, is_outage)

    def _choose_decode(self, wish: _Wish, candidates: Sequence[Backend]) -> Backend | None:
        number = next(self._decode_sequence)
        return self._choose(self._decode_policy, number, wish, candidates)

    def _choose(
        self, policy: Policy, number: int, wish: _Wish, candidates: Sequence[Backend]
    ) -> Backend | None:
        engines = [each for each in candidates if each not in wish.failed] or candidates
        if not engines:
            return None
        chosen = policy(_shown(wish.prompt, number), self._views(wish.prompt, engines))
        return self._backends.get(chosen.url)

    def _nobody(self, role: str, layout: str | None) -> UnavailableError:
        """Return the error that says which role is missing, why, and what to do."""
        if layout is not None and (others := self._ready(None)):
            message = "no ready engine has the weights with which this stream started"
            return UnavailableError(
                message,
                code="weights_replaced",
                detail=f"{message}: its layout is {layout}, and "
                + ", ".join(f"{each.url} has {each.layout}" for each in others[:5]),
            )
        known = [b for b in self._backends if (b.prefills() if role == "prefill" else b.decodes())]
        if known:
            states = "; ".join(f"{b.url}: {b.absence}" for b in known[:5])
            message = (
                f"no {role} engine is ready ({len(known)} known): the proxy's log and dashboard "
                "show the reason"
            )
            detail = f"no {role} engine is ready: {states}"
        else:
            detail = message = (
                f"no {role} engine is known: start one with "
                f"`pdserve {role} MODEL --proxy URL`, or name it with --{role} URL"
            )
        return UnavailableError(
            message,
            code="no_prefill_available" if role == "prefill" else "no_decode_available",
            detail=detail,
        )


def _shown(prompt: RoutePrompt, number: int = 0) -> RouteRequest:
    """Return a policy's view of a request."""
    return RouteRequest(number, prompt.num_tokens)


def _can_follow(
    chosen: PairCost, engines: Collection[str], may_pair: Callable[[str, str], bool]
) -> bool:
    """Return whether a pair can be used, of these engines."""
    if chosen.prefill not in engines or chosen.decode not in engines:
        return False
    return chosen.is_local or may_pair(chosen.prefill, chosen.decode)
