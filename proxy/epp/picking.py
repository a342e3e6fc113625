"""Picks the engines for a gateway's request by the same policies as the proxy.

The gateway always sends the request to a decode engine; prefill engines are not destinations. If
another engine prefills the prompt, a sealed order tells the decode engine which one. The fallbacks
for an unreachable destination are engines that can pair with the same prefill engine. Knows no
gRPC.
"""

from __future__ import annotations

from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from pdserve.dialects import paths
from pdserve.errors import UnavailableError
from pdserve.http.pooling_bodies import POOLING
from pdserve.proxy.bodies import ClientBody
from pdserve.proxy.brain.prompt import UNKNOWN, RoutePrompt
from pdserve.proxy.gate import as_asked, tenant_of
from pdserve.proxy.generation import GENERATED
from pdserve.proxy.routing import Disaggregate
from pdserve.wire.hop import REQUEST_ID_HEADER

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from pdserve.proxy.backend import Backend
    from pdserve.proxy.brain.ledger import LedgerEntry
    from pdserve.proxy.brain.question import PairDecision
    from pdserve.proxy.routing import RunLocally
    from pdserve.proxy.services import Services

NUM_FALLBACKS: Final = 2


@dataclass(frozen=True, slots=True)
class GatewayRequest:
    """A request as a gateway presents it.

    Attributes:
        headers: Names in any case; those that begin with a colon are HTTP/2's.
        body: The whole body; empty if the gateway does not pass it on.
        subset: Endpoints (`ip:port`) that may be picked; None means all.
    """

    headers: Mapping[str, str]
    body: bytes
    subset: frozenset[str] | None

    @property
    def path(self) -> str:
        """The path without its query."""
        return self.headers.get(":path", "").partition("?")[0]

    @property
    def is_computed(self) -> bool:
        """Whether it asks for tokens or vectors; any available engine answers other requests."""
        return self.path in GENERATED and self.headers.get(":method") == "POST"


@dataclass(slots=True)
class Pick:
    """The engines that a request goes to; close it when the request is over.

    Attributes:
        engines: Destinations, the best first.
        prefill: Engine that computes the prompt for the destination; None if there is none.
        reason: Why there is no prefill engine; `default` if there is one.
        yields_s: What engines are told in `YIELDS_HEADER`.
        prefilling, running: Count the request as work of the engines until they are closed.
        work: The same work in the ledger, if pairs are chosen by it.
    """

    engines: list[Backend]
    prefill: Backend | None = None
    reason: str = "default"
    yields_s: float = 0.0
    prefilling: ExitStack = field(default_factory=ExitStack)
    running: ExitStack = field(default_factory=ExitStack)
    work: list[LedgerEntry] = field(default_factory=list)

    @property
    def endpoints(self) -> list[str]:
        """Destinations as gateways name them."""
        return [endpoint_of(engine.url) for engine in self.engines]

    def computed(self) -> None:
        """Note that the prompt is computed, as the answer begins; may be called repeatedly."""
        for entry in self.work:
            entry.computed()
        self.prefilling.close()

    def close(self) -> None:
        """Stop counting the request; may be called repeatedly."""
        self.prefilling.close()
        self.running.close()


class Picker:
    """See the module."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def pick(self, request: GatewayRequest, held: AsyncExitStack) -> Pick:
        """Return the engines for a request, which count it until the pick is closed.

        Args:
            held: Takes over the request's place in admission, until the request is over.

        Raises:
            BadRequestError: The request's body cannot be read.
            OverloadedError: There is no place for it, or it would miss its objectives.
            UnavailableError: No engine can take it now.
        """
        if not request.is_computed:
            return await self._again(
                lambda: Pick([self._alone(self._named(request.subset))], reason="any")
            )
        services = self._services
        tenant = tenant_of(services.config, request.headers)
        services.admission.require_room(tenant)
        body = self._body_of(request)
        request_id = request.headers.get(REQUEST_ID_HEADER, "")
        prompt = as_asked(body, request.headers, request_id=request_id, tenant=tenant)
        is_whole = request.path in POOLING or body.ends_with_first_token()
        if services.prefixes is not None and not is_whole:
            prompt = prompt.named_as(await services.prefixes.read(body))
        claim = services.gate.claim(prompt)
        picked: list[Pick] = []

        def choose(decision: PairDecision | None = None) -> Pick:
            among = self._named(request.subset)
            plan = None
            if not is_whole:
                plan = services.router.plan(prompt, among=among, decision=decision)
            pick = self._counted(self._picked(plan, prompt, among), prompt, among)
            pick.yields_s = services.gate.yields_s(prompt)
            return pick

        def granted() -> None:
            with suppress(UnavailableError):  # `_again` looks at the engines again
                picked.append(choose(claim.decision))
                held.callback(picked[0].close)

        if services.gate.decides:
            claim.grant = granted
        await held.enter_async_context(services.admission.place(claim))
        return picked[0] if picked else await self._again(choose)

    async def _again(self, choose: Callable[[], Pick]) -> Pick:
        """Choose; if no engine is available, check the absent ones and choose again."""
        try:
            return choose()
        except UnavailableError:
            await self._services.checks.look_again()
            return choose()

    def _picked(
        self,
        plan: Disaggregate | RunLocally | None,
        prompt: RoutePrompt,
        among: Collection[Backend] | None,
    ) -> Pick:
        """Pick the engines of a plan.

        Args:
            plan: None if one engine has to do everything.
        """
        if plan is None:
            return Pick([self._alone(among)], reason="prompt_only")
        router = self._services.router
        if not isinstance(plan, Disaggregate):
            can_serve = plan.engine.decodes() and (among is None or plan.engine in among)
            return Pick([plan.engine if can_serve else self._alone(among)], reason=plan.reason)
        preferred = plan.preferred
        if preferred is None or not router.can_decode_for(plan.prefill, preferred, prompt):
            others: list[Backend] = []
            if among is not None:
                others = [each for each in self._services.backends if each not in among]
            preferred = router.decode_for(plan.prefill, prompt, (), without=others)
        if preferred is None:
            raise UnavailableError(
                "no decode engine can read the prefill engine's KV",
                code="no_decode_available",
            )
        return Pick([preferred], plan.prefill, plan.reason)

    def _alone(self, among: Collection[Backend] | None) -> Backend:
        """Return the engine with the least to do.

        Raises:
            UnavailableError: No engine that decodes is ready.
        """
        engines = [each for each in among or self._services.backends if each.available]
        decodes = [each for each in engines if each.decodes()]
        if not decodes:
            raise UnavailableError("no decode engine is ready", code="no_decode_available")
        return min(decodes, key=lambda each: each.in_flight)

    def _named(self, subset: frozenset[str] | None) -> list[Backend] | None:
        """Return the engines of a subset that decode; None if no subset is given.

        Raises:
            UnavailableError: The subset has no such engines.
        """
        if subset is None:
            return None
        engines = (each for each in self._services.backends if each.decodes())
        named = [each for each in engines if endpoint_of(each.url) in subset]
        if not named:
            raise UnavailableError(
                f"none of the {len(subset)} endpoints that the gateway allows is a known decode "
                "engine",
                code="no_engine_in_subset",
            )
        return named

    def _body_of(self, request: GatewayRequest) -> ClientBody:
        """Return a request's body in the engines' protocol.

        Raises:
            BadRequestError: The body cannot be read.
        """
        dialect = paths.dialect_of(request.path, request.body, "")
        data = request.body if dialect is None else dialect.chat_body()
        return ClientBody(data, created=int(self._services.clock.wall_s()), fallback_seed=0)

    def _counted(self, pick: Pick, prompt: RoutePrompt, among: Collection[Backend] | None) -> Pick:
        """Add the engines to fall back on, and count the request as work of the first ones."""
        first, prefill = pick.engines[0], pick.prefill
        spare = (
            each
            for each in sorted(among or self._services.backends, key=lambda each: each.in_flight)
            if each is not first
            and each.available
            and each.decodes()
            and (prefill is None or self._services.router.can_decode_for(prefill, each, prompt))
        )
        pick.engines += islice(spare, NUM_FALLBACKS)
        if prefill is not None:
            pick.prefilling.enter_context(self._at(prefill, "prefill", prompt, pick.work))
        kind = "local" if prefill is None else "receive"
        pick.running.enter_context(self._at(first, kind, prompt, pick.work))
        return pick

    @contextmanager
    def _at(
        self, engine: Backend, kind: str, prompt: RoutePrompt, work: list[LedgerEntry]
    ) -> Iterator[None]:
        """Count a request as work of an engine while the block runs, and add it to `work`."""
        prefixes, pairing = self._services.prefixes, self._services.pairing
        known = UNKNOWN if prefixes is None else prefixes.sent(prompt, engine)
        num_tokens = prompt.num_tokens - known.num_tokens
        engine.in_flight += 1
        engine.pending_tokens += num_tokens
        with ExitStack() as stack:
            if pairing is not None:
                held = pairing.hold(engine, kind, prompt, known.num_tokens)
                work.append(stack.enter_context(held))
            try:
                yield
            finally:
                engine.in_flight -= 1
                engine.pending_tokens -= num_tokens


@lru_cache(maxsize=4096)
def endpoint_of(url: str) -> str:
    """Return the `ip:port` of an engine's base URL, an IPv6 address in brackets."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
