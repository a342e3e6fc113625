"""Handoffs that no request owns."""

from __future__ import annotations

from pdserve.config.schema import Role
from pdserve.observe.clock import ManualClock
from pdserve.proxy.backend import Backend, Breaker
from pdserve.proxy.client import EngineHttp
from pdserve.proxy.handoff import Handoff
from pdserve.proxy.metrics import Metrics
from pdserve.proxy.story import Story


def empty_handoff(prefill_url: str) -> Handoff:
    """A handoff of an engine that has not given it yet."""
    clock = ManualClock()
    prefill = Backend(prefill_url, Role.PREFILL, True, Breaker(clock, 3, 1.0))
    return Handoff(prefill, EngineHttp(secret=""), Metrics(), Story("a", "/", clock))
