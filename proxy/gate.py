"""Decides which requests are admitted: tenant, claim on places, early rejection.

Counts tenants' use, and the requests that met their objectives.
"""

from __future__ import annotations

import functools
import hashlib
import math
from typing import TYPE_CHECKING, Any, Final

import msgspec
from aiohttp import hdrs

from pdserve.config.schema import Role
from pdserve.errors import BadRequestError, OverloadedError
from pdserve.http.access import engine_headers
from pdserve.http.protocol import Objectives
from pdserve.proxy.admission import CRITICAL, OUTPUT_WEIGHT, Claim, band_of
from pdserve.proxy.brain.candidates import FEW
from pdserve.proxy.brain.decision import BIAS
from pdserve.proxy.brain.prompt import BYTES_PER_TOKEN, RoutePrompt
from pdserve.proxy.brain.question import ServiceObjectives
from pdserve.proxy.brain.rejection import rejection
from pdserve.wire.seal import UNREADABLE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.config.http import ProxyConfig
    from pdserve.proxy.admission import FairPlaces
    from pdserve.proxy.backend import Backend
    from pdserve.proxy.backends import Backends
    from pdserve.proxy.bodies import ClientBody
    from pdserve.proxy.brain.pairing import Pairing
    from pdserve.proxy.brain.question import PairDecision
    from pdserve.proxy.brain.rejection import Rejection
    from pdserve.proxy.metrics import GateMetrics
    from pdserve.proxy.routing import Router
    from pdserve.proxy.story import Story

_MS: Final = 1e-3
SESSION_HEADER: Final = "X-Session-Id"
_MAX_NAME_CHARS: Final = 256
"""Of the names of tenants and sessions."""
_HELD: Final = 0.5
_HELD_OVER_SHARE: Final = 0.02
"""Shares of a request's objective for the first token: it is held back while every engine has more
to compute than that; the second one is for tenants that have lately had more than their part."""
YIELD_S: Final = 1.0
"""How much later other tenants' prompts may come and still go first, at engines too."""
_HARMLESS: Final = BIAS + 0.1
"""A cost: an engine leaves its role, and nobody comes near to missing an objective."""
_LOOK_S: Final = 1e-4
"""For each engine: how long it stays true that none of many would begin soon."""
_FIRST_OUTPUT: Final = 150.0
"""Output tokens of a request, where nothing is learned."""


def tenant_of(config: ProxyConfig, headers: Mapping[str, str]) -> str:
    """Return the tenant charged for a request: as named by the deployment's gateway, or by its key.

    Unchecked keys could be made up, and are ignored.
    """
    if config.tenant_header and (name := _name_in(headers, config.tenant_header)):
        return name
    if not config.api_keys:
        return ""
    key = engine_headers((), headers).get(hdrs.AUTHORIZATION, "")
    return f"key-{hashlib.blake2b(key.encode(), digest_size=4).hexdigest()}"


def as_asked(
    body: ClientBody, headers: Mapping[str, str], *, request_id: str, tenant: str
) -> RoutePrompt:
    """Return a request with its own wishes: session, priority, objectives, limits.

    Raises:
        BadRequestError: An objective is invalid.
    """
    slo = field_of(body, "slo", Objectives | None) or Objectives()
    session = _name_in(headers, SESSION_HEADER) or field_of(body, "session_id", str | None) or ""
    return RoutePrompt(
        body.num_bytes,
        needs_equal_text=body.needs_equal_text(),
        request_id=request_id,
        tenant=tenant,
        priority=field_of(body, "priority", int | None) or 0,
        session=session[:_MAX_NAME_CHARS],
        ttft_slo_s=None if slo.ttft_ms is None else slo.ttft_ms * _MS,
        itl_slo_s=None if slo.itl_ms is None else slo.itl_ms * _MS,
        model=body.model,
        max_output=body.max_output,
    )


def _name_in(headers: Mapping[str, str], header: str) -> str:
    """Return the name in a header; what aiohttp escaped, as it is not UTF-8, is replaced."""
    given = headers.get(header, "").encode("utf-8", "surrogateescape")
    return given.decode("utf-8", "replace")[:_MAX_NAME_CHARS]


def field_of(body: ClientBody, name: str, kind: object) -> Any:
    """Return a field's value; None if it is absent.

    Raises:
        BadRequestError: It is of another kind.
    """
    raw = body.fields.get(name)
    try:
        return None if raw is None else msgspec.json.decode(raw, type=kind)
    except UNREADABLE as error:
        message = str(error).partition(" - at ")[0]
        raise BadRequestError(f"{name}: {message}", param=name, code="invalid_type") from None


class Gate:
    """The entrance of one proxy.

    Args:
        places: The places and the requests that wait for one.
        pairing: None unless pairs are chosen by what was learned. Without it, and in shadow, no
            request is turned away or held back, except for lack of a place.
    """

    def __init__(
        self,
        config: ProxyConfig,
        router: Router,
        backends: Backends,
        pairing: Pairing | None,
        places: FairPlaces,
        metrics: GateMetrics,
    ) -> None:
        self._objectives = ServiceObjectives(config)
        self._rejects_early = config.early_rejection
        self._router = router
        self._backends = backends
        self._pairing = pairing
        self._places = places
        self._is_obeyed = pairing is not None and not pairing.is_shadow
        self._metrics = metrics
        # By whether a tenant is over its share: until when no engine begins sooner, and than what.
        self._soonest = dict.fromkeys((False, True), (0.0, 0.0))

    @property
    def decides(self) -> bool:
        """Whether pairs of engines are chosen now by what was learned."""
        return self._is_obeyed and self._pairing is not None and self._pairing.model.is_known

    def claim(self, prompt: RoutePrompt) -> Claim:
        """Return the claim of a request that can meet its objectives, given the current work.

        If its tenant's requests are held back for prompt engines, it passes those that wait when
        another engine serves it sooner without harm to others; the wait it avoids is recorded
        with its decision.

        Raises:
            OverloadedError: It would miss them.
        """
        num_tokens = self._prompt_cost(prompt)
        cost = num_tokens + OUTPUT_WEIGHT * self._mean_output
        claim = Claim(prompt.tenant, band_of(prompt.priority), cost, num_tokens)
        if self._is_obeyed:
            claim.is_ready = functools.partial(self._is_ready, prompt, claim)
        waiting_s = self._waiting_s(prompt)
        if waiting_s and self._is_obeyed and self._places.is_held_back(prompt.tenant):
            around = self._router.outlook(prompt, held_s=waiting_s)
            if around and not around.chosen.ttft["held"] and around.chosen.total < _HARMLESS:
                claim.goes_round, claim.decision = True, around
                return claim
        if self._rejects_early:
            claim.decision = self._promising(prompt, waiting_s)
        return claim

    def _promising(self, prompt: RoutePrompt, waiting_s: float) -> PairDecision | None:
        """Return where a request would be sent now.

        Raises:
            OverloadedError: It would miss its objectives there.
        """
        decision = self._router.outlook(prompt)
        found = None if decision is None else self._rejection(prompt, decision, waiting_s)
        if found is not None and not self._is_obeyed:
            self._metrics.shadow_rejected.labels(found.reason).inc()
        elif found is not None:
            self._metrics.rejected.labels(found.reason).inc()
            raise OverloadedError(found.in_words, retry_after_s=found.retry_after_s)
        return decision

    def _rejection(
        self, prompt: RoutePrompt, decision: PairDecision, waiting_s: float
    ) -> Rejection | None:
        # A prompt that waits, and yields to others, may be passed by one of its length.
        passed_s = 0.0
        if waiting_s and self.yields_s(prompt):
            passed_s = decision.chosen.ttft["prefill"]
        return rejection(decision, waiting_s=waiting_s, passed_s=passed_s)

    def yields_s(self, prompt: RoutePrompt) -> float:
        """Return for how many seconds engines let other tenants' prompts pass this one."""
        may_yield = band_of(prompt.priority) > CRITICAL
        return YIELD_S if may_yield and self._places.is_over_share(prompt.tenant) else 0.0

    def ended(self, prompt: RoutePrompt, story: Story) -> float:
        """Count a request's cost; return it in the units of `Claim`."""
        stages = story.prefill_stages
        if stages is not None:
            num_computed: float = max(0, stages.prompt_tokens - stages.cached_tokens)
        elif story.is_refused or story.first_leg_s is None:
            num_computed = 0
        else:
            num_computed = self._prompt_cost(prompt)
        self._metrics.took(prompt.tenant, num_computed, story.num_output_tokens)
        return num_computed + OUTPUT_WEIGHT * story.num_output_tokens

    def served(self, prompt: RoutePrompt, story: Story) -> None:
        """Note whether a stream that ended well met its objectives."""
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
        """Return seconds before a request would get a place; 0 while too little is known."""
        if self._pairing is None or not self._pairing.model.is_known:
            return 0.0
        times = self._pairing.model.times()

        def expected_s(num_tokens: float) -> float:
            return times.caution * times.prompt_s(round(num_tokens), 0) / self._num_prefills

        return self._places.wait_s(prompt.tenant, expected_s)

    def _prompt_cost(self, prompt: RoutePrompt) -> float:
        """Return tokens of a prompt that have to be computed, as far as known."""
        if not prompt.num_tokens:
            return prompt.num_bytes / BYTES_PER_TOKEN
        return max(0, prompt.num_tokens - max(self._router.known(prompt).values(), default=0))

    def _is_ready(self, prompt: RoutePrompt, claim: Claim, is_over_share: bool) -> bool:
        """Return whether an engine would begin with a request soon.

        A tenant that has had more than its share waits here for an engine that is nearly idle,
        rather than keep others waiting behind it there; what it was found ready for is its
        decision.
        """
        share = _HELD_OVER_SHARE if is_over_share else _HELD
        limit_s = share * self._ttft_slo_s(prompt)
        if not self._is_any_within(limit_s, is_over_share):
            return False
        if not is_over_share:
            return True
        found = claim.decision = self._router.outlook(prompt)
        engine = None if found is None else self._backends.get(found.chosen.prefill)
        return engine is None or engine.home is Role.DECODE or self._begins_in_s(engine) <= limit_s

    def _is_any_within(self, limit_s: float, is_over_share: bool) -> bool:
        """Return whether an engine would begin with a prompt within `limit_s`, or there is none.

        That none of many engines would stays true for a moment: each of them reports ten times a
        second, and each time all would be looked at.
        """
        assert self._pairing is not None  # no request is held back without
        now_s, (until_s, least_s) = self._pairing.ledger.now_s(), self._soonest[is_over_share]
        if now_s < until_s and limit_s < least_s:
            return False
        least_s = math.inf
        for each in self._backends:
            if each.available and not (is_over_share and each.home is Role.DECODE):
                least_s = min(least_s, self._begins_in_s(each))
                if least_s <= limit_s:
                    return True
        num = len(self._backends)
        if least_s < math.inf and num > FEW:
            self._soonest[is_over_share] = now_s + _LOOK_S * num, least_s
        return least_s == math.inf

    @property
    def _num_prefills(self) -> int:
        """Number of engines for prompts; 1 if there is none."""
        return max(
            1, sum(each.available and each.home is not Role.DECODE for each in self._backends)
        )

    def _begins_in_s(self, engine: Backend) -> float:
        """Return seconds until an engine will have computed its prompts.

        Others' prompts may be done before it reports that; this allows for that delay.
        """
        assert self._pairing is not None
        return self._pairing.backlog_s(engine) - self._pairing.ledger.report_delay_s(engine.url)
