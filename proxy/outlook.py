"""What a request has before it, before it is sent anywhere: where it would go, and how soon.

Nothing is known unless pairs are chosen by what was learned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.config.schema import Role
from pdserve.proxy.brain.decision import decide

if TYPE_CHECKING:
    from pdserve.proxy.backend import Backend
    from pdserve.proxy.backends import Backends
    from pdserve.proxy.brain.pairing import Pairing
    from pdserve.proxy.brain.prefixes import Prefixes
    from pdserve.proxy.brain.prompt import RoutePrompt
    from pdserve.proxy.brain.question import PairCost, RouteQuestion
    from pdserve.proxy.routing import Router


class Outlook:
    """Looks at engines as the router would."""

    def __init__(
        self,
        router: Router,
        backends: Backends,
        prefixes: Prefixes | None,
        pairing: Pairing | None,
    ) -> None:
        self._router = router
        self._backends = backends
        self._prefixes = prefixes
        self._pairing = pairing

    def of(self, prompt: RoutePrompt) -> tuple[RouteQuestion, PairCost] | None:
        """Return what is known of a request and of the engines, and where it would be sent now.

        None if too little is known, or no engine is there.
        """
        if self._pairing is None or self._prefixes is None:
            return None
        if not self._pairing.model.is_known or not prompt.num_tokens:
            return None
        by_url = {each.url: each for each in self._router.considered(prompt, None, ())}
        prefills = [each for each in by_url.values() if each.home is not Role.DECODE]
        decodes = [each for each in by_url.values() if each.home is not Role.PREFILL]
        known = self._prefixes.known(prompt)
        question = self._pairing.question(prompt, prefills, decodes, known)

        def may_pair(prefill: str, decode: str) -> bool:
            return self._router.pairs(by_url[prefill], by_url[decode], prompt)

        decision = decide(question, may_pair)
        return None if decision is None else (question, decision.chosen)

    @property
    def num_prefills(self) -> int:
        """Engines that prompts are for; 1 if there is none."""
        return max(
            1, sum(each.available and each.home is not Role.DECODE for each in self._backends)
        )

    def most_known(self, prompt: RoutePrompt) -> int:
        """Tokens of a prompt that some engine has."""
        known = {} if self._prefixes is None else self._prefixes.known(prompt)
        return max(known.values(), default=0)

    def can_begin_within(self, limit_s: float, *, at_home: bool) -> bool:
        """Whether some engine will have computed the prompts that it has within `limit_s`.

        Where others have some it may be done before it says so, and would wait: that counts, too.

        Args:
            at_home: Only engines whose home role includes prefill count.
        """
        if self._pairing is None:
            return True
        able = [
            each
            for each in self._backends
            if each.available and not (at_home and each.home is Role.DECODE)
        ]
        return not able or any(self._begins_within(limit_s, each) for each in able)

    def would_begin_within(self, limit_s: float, prompt: RoutePrompt) -> bool:
        """The same of where a request would be sent now, if prompts are for that engine first."""
        found = self.of(prompt)
        engine = None if found is None else self._backends.get(found[1].prefill)
        return engine is None or engine.home is Role.DECODE or self._begins_within(limit_s, engine)

    def _begins_within(self, limit_s: float, engine: Backend) -> bool:
        if self._pairing is None:
            return True
        untold_s = self._pairing.ledger.untold_s(engine.url)
        return self._pairing.backlog_s(engine) <= limit_s + untold_s
