"""What all requests of one proxy share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.config.http import ProxyConfig
    from pdserve.http.bodies import Bodies
    from pdserve.observe.clock import Clock
    from pdserve.proxy.admission import AdmissionQueue
    from pdserve.proxy.backends import Backends
    from pdserve.proxy.brain.homes import HomeRoles
    from pdserve.proxy.brain.pairing import Pairing
    from pdserve.proxy.brain.prefixes import Prefixes
    from pdserve.proxy.breakers import Breakers
    from pdserve.proxy.checks import HealthChecks
    from pdserve.proxy.client import EngineHttp
    from pdserve.proxy.gate import Gate
    from pdserve.proxy.live import LiveRequests
    from pdserve.proxy.metrics import Metrics
    from pdserve.proxy.routing import Router


@dataclass(frozen=True, slots=True)
class Services:
    """The parts that all requests share.

    Attributes:
        clock: Measures requests and leases.
        prefixes: None unless a policy looks at them.
        pairing: None unless pairs are chosen by what was learned.
        homes: None unless those choices are also obeyed.
        new_nonce: Returns a string never returned before; unguessable outside of tests.
    """

    config: ProxyConfig
    clock: Clock
    http: EngineHttp
    backends: Backends
    checks: HealthChecks
    breakers: Breakers
    router: Router
    prefixes: Prefixes | None
    pairing: Pairing | None
    homes: HomeRoles | None
    admission: AdmissionQueue
    gate: Gate
    bodies: Bodies
    live: LiveRequests
    metrics: Metrics
    new_nonce: Callable[[], str]
