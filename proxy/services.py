"""What all requests of one proxy share, and what each of them brings, as two values. Knows none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pdserve.config.schema import ProxyConfig
    from pdserve.http.bodies import Bodies
    from pdserve.proxy.admission import Admission
    from pdserve.proxy.backends import Backends
    from pdserve.proxy.bodies import ClientBody
    from pdserve.proxy.breakers import Breakers
    from pdserve.proxy.checks import HealthChecks
    from pdserve.proxy.client import EngineHttp
    from pdserve.proxy.delivery import Delivery
    from pdserve.proxy.metrics import Metrics
    from pdserve.proxy.routing import Router
    from pdserve.proxy.story import Story


@dataclass(frozen=True, slots=True)
class Services:
    """What every request shares.

    Attributes:
        new_nonce: Returns a string never returned before; unguessable outside of tests.
    """

    config: ProxyConfig
    http: EngineHttp
    backends: Backends
    checks: HealthChecks
    breakers: Breakers
    router: Router
    admission: Admission
    bodies: Bodies
    metrics: Metrics
    new_nonce: Callable[[], str]


@dataclass(frozen=True, slots=True)
class Call:
    """One client's request: what it asks, the way back, and what becomes of it.

    Attributes:
        path: The endpoint, the same at the engines.
        until_s: When the request is to be over, by the event loop's clock.
        headers: For the engines.
    """

    body: ClientBody
    delivery: Delivery
    story: Story
    path: str
    until_s: float
    headers: Mapping[str, str]
