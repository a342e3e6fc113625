"""Decides who is let in: what a request claims of the places, and whether it is turned away.

Counts what tenants take, and which requests kept their objectives.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from pdserve.errors import OverloadedError
from pdserve.proxy.brain.decision import BIAS
from pdserve.proxy.brain.fairness import OUTPUT_WEIGHT, Claim, always, band_of
from pdserve.proxy.brain.prompt import BYTES_PER_TOKEN
from pdserve.proxy.brain.rejection import rejection
from pdserve.proxy.brain.slo import ServiceObjectives

if TYPE_CHECKING:
    from pdserve.config.http import ProxyConfig
    from pdserve.proxy.brain.fairness import FairPlaces
    from pdserve.proxy.brain.metrics import GateMetrics
    from pdserve.proxy.brain.pairing import Pairing
    from pdserve.proxy.brain.prompt import RoutePrompt
    from pdserve.proxy.outlook import Outlook
    from pdserve.proxy.story import Story

_HELD: Final = 0.5
_HELD_OVER_SHARE: Final = 0.02
"""Shares of a request's objective for the first token: it is held back while every engine has more
to compute than that; the second one is for tenants that have lately had more than their part."""
_HARMLESS: Final = BIAS + 0.1
"""A cost: an engine leaves its role, and nobody comes near to missing an objective."""
_FIRST_OUTPUT: Final = 150.0
"""Output tokens of a request, where nothing is learned."""


class Gate:
    """The entrance of one proxy.

    Args:
        places: Who waits for one.
        pairing: None unless pairs are chosen by what was learned. Without it, and in shadow, nobody
            is turned away or held back, except for lack of a place.
    """

    def __init__(
        self,
        config: ProxyConfig,
        outlook: Outlook,
        places: FairPlaces,
        pairing: Pairing | None,
        metrics: GateMetrics,
    ) -> None:
        self._objectives = ServiceObjectives(config)
        self._rejects_early = config.early_rejection
        self._outlook = outlook
        self._places = places
        self._pairing = pairing
        self._is_obeyed = pairing is not None and not pairing.is_shadow
        self._metrics = metrics

    def claim(self, prompt: RoutePrompt) -> Claim:
        """Return what a request claims."""
        num_tokens = self._prompt_cost(prompt)
        cost = num_tokens + OUTPUT_WEIGHT * self._mean_output
        is_ready = always
        if self._is_obeyed and not prompt.held_s:
            is_ready = functools.partial(self._is_ready, prompt)
        band, goes_round = band_of(prompt.priority), prompt.held_s > 0
        return Claim(prompt.tenant, band, cost, num_tokens, is_ready, goes_round)

    def promising(self, prompt: RoutePrompt) -> RoutePrompt:
        """Return a request that can keep its objectives, given the work that there is.

        One of a tenant whose requests are held back for engines for prompts goes round those that
        wait, if another engine serves it sooner and harms nobody by that; what it would have
        waited is kept with it.

        Raises:
            OverloadedError: It would miss them.
        """
        waiting_s = self._waiting_s(prompt)
        if waiting_s and self._is_obeyed and self._places.is_held_back(prompt.tenant):
            held = replace(prompt, held_s=waiting_s)
            outlook = self._outlook.of(held)
            if outlook is not None and not outlook[1].ttft["held"] and outlook[1].total < _HARMLESS:
                return held
        outlook = self._outlook.of(prompt) if self._rejects_early else None
        if outlook is None:
            return prompt
        question, chosen = outlook
        found = rejection(question, chosen, waiting_s=waiting_s)
        if found is not None and not self._is_obeyed:
            self._metrics.shadow_rejected.labels(found.reason).inc()
        elif found is not None:
            self._metrics.rejected.labels(found.reason).inc()
            raise OverloadedError(found.told, retry_after_s=found.retry_after_s)
        return prompt

    def ended(self, prompt: RoutePrompt, story: Story) -> float:
        """Count what a request has taken; return it as `Claim` counts."""
        stages = story.prefill_stages
        num_computed = self._prompt_cost(prompt)
        if stages is not None:
            num_computed = max(0, stages.prompt_tokens - stages.cached_tokens)
        self._metrics.took(prompt.tenant, num_computed, story.num_output_tokens)
        return num_computed + OUTPUT_WEIGHT * story.num_output_tokens

    def served(self, prompt: RoutePrompt, story: Story) -> None:
        """Note whether a stream that ended well kept its objectives."""
        if not story.streamed or story.first_token_s is None:
            return
        ttft_s = story.first_token_s - story.arrived_s
        num_gaps = max(1, story.num_output_tokens - 1)
        itl_s = (story.last_chunk_s - story.first_token_s) / num_gaps
        self._metrics.compare(
            has_own=prompt.ttft_slo_s is not None or prompt.itl_slo_s is not None,
            keeps_ttft=ttft_s <= self._ttft_slo_s(prompt),
            keeps_itl=itl_s <= self._objectives.itl_s(prompt),
        )

    @property
    def _mean_output(self) -> float:
        return _FIRST_OUTPUT if self._pairing is None else self._pairing.model.mean_output

    def _ttft_slo_s(self, prompt: RoutePrompt) -> float:
        times = None if self._pairing is None else self._pairing.model.times()
        return self._objectives.ttft_s(prompt, times)

    def _waiting_s(self, prompt: RoutePrompt) -> float:
        """Seconds before a request would get a place; 0 while too little is known."""
        if self._pairing is None or not self._pairing.model.is_known:
            return 0.0
        times, num_engines = self._pairing.model.times(), self._outlook.num_prefills
        return self._places.wait_s(
            prompt.tenant, lambda tokens: times.prompt_s(round(tokens), 0) / num_engines
        )

    def _prompt_cost(self, prompt: RoutePrompt) -> float:
        """Tokens of a prompt that have to be computed, as far as is known."""
        if not prompt.num_tokens:
            return prompt.num_bytes / BYTES_PER_TOKEN
        return max(0, prompt.num_tokens - self._outlook.most_known(prompt))

    def _is_ready(self, prompt: RoutePrompt, is_over_share: bool) -> bool:
        """Whether an engine would begin with a request soon.

        A tenant that has had more than its share waits here for an engine that is nearly idle,
        rather than keep others waiting behind it there.
        """
        share = _HELD_OVER_SHARE if is_over_share else _HELD
        limit_s = share * self._ttft_slo_s(prompt)
        can = self._outlook.can_begin_within(limit_s, at_home=is_over_share)
        return can and (not is_over_share or self._outlook.would_begin_within(limit_s, prompt))
