"""The engines behind this proxy: which exist, which fit together, how loaded they are.

Engines from the command line stay for good; others register themselves and stay while they renew
their lease. `checks` finds out their health; `breakers` holds the failures of engines and of their
pairs. Knows only the number of requests. Sends nothing.

Costs: a choice is O(prefill engines x decode engines) at worst, O(engines) as soon as one
compatible pair is found early.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pdserve.config.schema import Role
from pdserve.errors import BadRequestError, HandshakeError
from pdserve.observe.log import log_event
from pdserve.proxy.backend import Backend, BreakerState, Health
from pdserve.proxy.fitting import misfits, why_misfit
from pdserve.proxy.policies import BackendView
from pdserve.wire.seal import PROTOCOL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pdserve.config.http import ProxyConfig
    from pdserve.observe.clock import Clock
    from pdserve.proxy.breakers import Breakers
    from pdserve.wire.hop import Registration
    from pdserve.wire.ids import Incarnation
    from pdserve.wire.request import EngineInfo
    from pdserve.wire.transfer import KVMode

log = logging.getLogger(__name__)

MAX_LEASE_S = 3600.0
_BITS = 64
_MASK = (1 << _BITS) - 1
_GOLDEN = 0x9E3779B97F4A7C15
"""Multiples of the golden ratio lie evenly over a range, however many are taken (Weyl)."""
OUTAGE_MEMORY_S = 600.0
"""How long a deployment that lost the last engine of a role counts as one with an outage; after
that it is one without such engines."""
STARTUP_S = 4.0
"""How long after its start a proxy expects engines to register: those that served before its
restart renew their lease every 3 s."""


class Backends:
    """All engines this proxy knows of.

    Args:
        on_gone: Called with the URL of an engine that is forgotten.
    """

    def __init__(
        self,
        config: ProxyConfig,
        clock: Clock,
        breakers: Breakers,
        *,
        on_gone: Callable[[str], None] = lambda url: None,
    ) -> None:
        self._clock = clock
        self._start_s = clock.monotonic_s()
        self._on_gone = on_gone
        self._breakers = breakers
        self._backends: dict[str, Backend] = {}
        self._by_id: dict[str, Backend] = {}
        self._pools: dict[Role, list[Backend]] = {}
        self._drained: dict[str, Incarnation] = {}
        self._prefill_lost_s = float("-inf")
        self._gone_s = dict.fromkeys(Role, float("-inf"))
        for url in config.prefill:
            self._add(_bare(url), Role.PREFILL, is_static=True)
        for url in config.decode:
            known = self._backends.get(_bare(url))
            if known is None:
                self._add(_bare(url), Role.DECODE, is_static=True)
            else:
                known.role = Role.BOTH
                self._pools.clear()

    def __iter__(self) -> Iterator[Backend]:
        return iter(list(self._backends.values()))

    @property
    def has_lost_prefill(self) -> bool:
        """Whether a prefill engine is known, ready or not, or has vanished recently."""
        return self._is_recent(self._prefill_lost_s) or any(b.role is Role.PREFILL for b in self)

    @property
    def has_lost_decode(self) -> bool:
        """Whether an engine that decodes is known, ready or not, or was until recently.

        One that deregistered counts as well: it may come back.
        """
        decoders = (Role.DECODE, Role.BOTH)
        return any(b.decodes() for b in self) or any(
            self._is_recent(self._gone_s[role]) for role in decoders
        )

    @property
    def has_missing(self) -> bool:
        """Whether waiting may help.

        A known engine is away, the last one of a role has gone, or the proxy has just started and
        none that decodes is known yet.
        """
        if any(not each.available or each.num_late_checks for each in self):
            return True
        if any(map(self._is_recent, self._gone_s.values())):
            return True
        is_starting = self._clock.monotonic_s() - self._start_s < STARTUP_S
        return is_starting and not any(each.decodes() for each in self)

    @property
    def available(self) -> frozenset[Backend]:
        """The engines to which a request may be sent now."""
        return frozenset(backend for backend in self if backend.available)

    def some(self, number: int, num_each: int) -> list[Backend]:
        """Return `num_each` engines of each home role; O(`num_each`).

        Consecutive values of `number` rotate through all engines.
        """
        if not self._pools:
            for each in self._backends.values():
                self._pools.setdefault(each.home, []).append(each)
        places = range(number * num_each, (number + 1) * num_each)
        return [
            pool[(place * _GOLDEN & _MASK) * len(pool) >> _BITS]
            for pool in self._pools.values()
            for place in places
        ]

    def __len__(self) -> int:
        return len(self._backends)

    def _is_recent(self, at_s: float) -> bool:
        return self._clock.monotonic_s() - at_s < OUTAGE_MEMORY_S

    def get(self, url: str) -> Backend | None:
        """Return the engine at a base URL."""
        return self._backends.get(url)

    def give_homes(self, homes: Mapping[str, Role]) -> None:
        """Set the home roles of engines; engines not named keep their own role."""
        for each in self._backends.values():
            home = homes.get(each.url)
            if each.home_role is not home:
                each.home_role = home
                self._pools.clear()

    # --- membership

    def _add(self, url: str, role: Role, *, is_static: bool) -> Backend:
        backend = Backend(url, role, is_static, self._breakers.for_engine())
        self._backends[url] = backend
        self._pools.clear()
        return backend

    def _forget(self, backend: Backend, why: str, *, level: int = logging.INFO) -> None:
        log_event(
            log,
            "engine gone",
            level=level,
            url=backend.url,
            role=backend.role.value,
            reason=why,
        )
        del self._backends[backend.url]
        self._unname(backend)
        self._pools.clear()
        backend.is_gone = True
        self._breakers.forget_pairs(backend.url)
        self._on_gone(backend.url)
        if not any(other.role is backend.role for other in self):
            self._gone_s[backend.role] = self._clock.monotonic_s()

    def _unname(self, backend: Backend) -> None:
        if backend.info is not None and self._by_id.get(backend.info.engine_id) is backend:
            del self._by_id[backend.info.engine_id]

    # --- registration

    def require_fit(self, registration: Registration) -> None:
        """Refuse an engine that does not fit the others.

        Raises:
            BadRequestError: A field is out of range.
            HandshakeError: Its model or KV format differs from that of another engine, of any
                role: each may serve a request alone. One with other weights, or of another
                version, is accepted: it is paired with engines like itself.
        """
        url = _bare(registration.url)
        if not url.startswith(("http://", "https://")):
            raise BadRequestError(f"url is {url!r}: it must be an http URL", param="url")
        if not 0 < registration.lease_s <= MAX_LEASE_S:
            raise BadRequestError(
                f"lease_s is {registration.lease_s:g}: it must be above 0 and at most "
                f"{MAX_LEASE_S:g}",
                param="lease_s",
            )
        engine = registration.engine
        if not self.knows(url, engine) and (why := why_misfit(url, engine, self)):
            raise HandshakeError(why)

    def register(self, registration: Registration) -> Backend:
        """Accept an engine, or renew its lease.

        A new life of a known engine replaces the former one, and is not blamed for its
        failures.

        Raises:
            BadRequestError, HandshakeError: As of `require_fit`.
        """
        self.require_fit(registration)
        url, role, engine = _bare(registration.url), Role(registration.role), registration.engine
        former = self._by_id.get(engine.engine_id)
        if former is not None and former.url != url and not former.is_static:
            assert former.info is not None
            if former.info.incarnation != engine.incarnation:
                self._forget(former, f"restarted as {url}")
        backend = self._backends.get(url)
        if backend is None:
            backend = self._add(url, role, is_static=False)
            backend.is_draining = self._drained.pop(url, None) == engine.incarnation
            log_event(log, "engine registered", url=url, role=backend.role.value)
        elif not backend.is_static and backend.role is not role:
            backend.role = role
            self._pools.clear()
        self._gone_s[backend.role] = float("-inf")
        if backend.role is Role.PREFILL:
            self._prefill_lost_s = float("-inf")
        self.learn(backend, engine)
        if not backend.is_static:
            backend.lease_end_s = self._clock.monotonic_s() + registration.lease_s
        return backend

    def expire(self, backend: Backend) -> None:
        """Forget an engine whose lease ran out; do nothing if it did not, or the engine is gone."""
        if backend.is_gone or self._clock.monotonic_s() <= backend.lease_end_s:
            return
        self._forget(backend, "its lease ran out", level=logging.WARNING)
        if backend.is_draining and backend.info is not None:  # it may come back
            self._drained[backend.url] = backend.info.incarnation
        if backend.role is Role.PREFILL:
            self._prefill_lost_s = self._clock.monotonic_s()

    def deregister(self, url: str) -> None:
        """Stop sending to an engine that deregisters; requests running there go on."""
        backend = self._backends.get(_bare(url))
        if backend is None:
            return
        if backend.is_static:
            backend.health, backend.reason = Health.NOT_READY, "it is shutting down"
        else:
            self._forget(backend, "it deregistered")

    def knows(self, url: str, engine: EngineInfo) -> bool:
        """Return whether this life of an engine was already accepted: others must fit it."""
        known = self.get(_bare(url))
        return (
            known is not None
            and known.info is not None
            and known.info.incarnation == engine.incarnation
            and known.info.layout_digest == engine.layout_digest
        )

    def why_misfit(self, backend: Backend) -> str:
        """Return why an engine that is named on the command line cannot serve beside ready ones."""
        ready = (other for other in self if other.health is Health.READY)
        return why_misfit(backend.url, backend.info, ready) if backend.info else ""

    def counterparts(self, url: str, role: Role) -> Iterator[Backend]:
        """Yield the engines with which one of this role, at `url`, would exchange KV."""
        for other in self:
            pairs = (role is not Role.DECODE and other.decodes()) or (
                role is not Role.PREFILL and other.prefills()
            )
            if other.url != url and other.info is not None and pairs:
                yield other

    def learn(self, backend: Backend, engine: EngineInfo) -> None:
        """Note which engine answers at a URL; a restarted one starts with a clean slate."""
        self._unname(backend)
        former, backend.info = backend.info, engine
        if not backend.is_gone:
            self._by_id[engine.engine_id] = backend
        if former is None or former.incarnation != engine.incarnation:
            others = (other for other in self if other is not backend)
            found = [each for other in others for each in misfits(backend, other)]
            for each in {each.event: each for each in found}.values():  # one pair says enough
                log_event(log, each.event, level=logging.WARNING, reason=each.reason)
        if former is not None and former.incarnation != engine.incarnation:
            log_event(log, "engine restarted", url=backend.url, engine=engine.engine_id)
            self._breakers.renew(backend)
            backend.is_draining = False
            backend.models = []
            backend.lose_legs()

    def max_model_len(self) -> int:
        """The longest context of any engine; 0 if none has said."""
        return max((b.info.max_model_len for b in self if b.info is not None), default=0)

    def view(self, backend: Backend, *, hit_tokens: int = 0) -> BackendView:
        """Return a policy's view of an engine.

        Args:
            hit_tokens: Tokens of the prompt in question that it has.
        """
        return BackendView(
            url=backend.url,
            in_flight=backend.in_flight,
            num_foreign=backend.num_foreign,
            kv_usage=backend.kv_usage,
            age_s=self._clock.monotonic_s() - backend.load_s,
            hit_tokens=hit_tokens,
            pending_tokens=backend.pending_tokens,
        )

    # --- pairs

    def can_pair(self, prefill: Backend, decode: Backend) -> bool:
        """Return whether two engines' KV is interchangeable, as far as they say.

        Equal digests mean the same model, weights and dtype. The distribution over ranks and
        blocks may differ.
        """
        if prefill is decode:
            return False
        ours, theirs = prefill.info, decode.info
        return not (ours and theirs) or ours.layout_digest == theirs.layout_digest

    def can_push(self, prefill: Backend, decode: Backend) -> bool:
        """Return whether both say that one can write into the other's blocks."""
        ours, theirs = prefill.info, decode.info
        return (
            ours is not None
            and theirs is not None
            and ours.layout_digest == theirs.layout_digest
            and ours.protocol == theirs.protocol == PROTOCOL  # the ticket is ours
            and all(e.can_push and e.endpoints and e.kv_shape is not None for e in (ours, theirs))
        )

    def lets_through(self, prefill: Backend, decode: Backend, mode: KVMode) -> bool:
        """Return whether the pair's breaker lets KV through in this mode."""
        return self._breakers.lets_through(prefill, decode, mode)

    def count(self) -> dict[tuple[str, str], int]:
        """Return the number of engines by (role, state); every combination is present."""
        states = [*(health.value for health in Health), "breaker_open", "draining"]
        counts = {(role.value, state): 0 for role in Role for state in states}
        for backend in self:
            state = backend.health.value
            if backend.health is Health.READY and backend.breaker.state is BreakerState.OPEN:
                state = "breaker_open"
            if backend.health is Health.READY and backend.is_draining:
                state = "draining"
            counts[backend.role.value, state] += 1
        return counts


def _bare(url: str) -> str:
    return url.rstrip("/")
