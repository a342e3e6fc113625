"""Which of the engines that could take a request should: one pure function per policy.

A policy sees the request and the views of the engines that are fit to serve it, and names
one of them. It keeps no state, reads no clock and draws no random numbers, so the same
question has the same answer here, in a test and in a simulation of thousands of engines.
What makes an engine fit is not a policy's concern: `choose` filters before it asks.

Adding one: a function in this folder and a line in `POLICIES`; the property suite runs on
every entry by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.errors import ConfigError
from pdserve.proxy.policies.least_loaded import least_loaded
from pdserve.proxy.policies.round_robin import round_robin
from pdserve.proxy.policies.views import BackendView, Policy, RouteRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

POLICIES: dict[str, Policy] = {"least_loaded": least_loaded, "round_robin": round_robin}

__all__ = ["POLICIES", "BackendView", "Policy", "RouteRequest", "choose", "policy_named"]


def policy_named(name: str, *, flag: str) -> Policy:
    """Return the policy called `name`.

    Raises:
        ConfigError: There is none; the message lists those there are.
    """
    if name not in POLICIES:
        known = ", ".join(sorted(POLICIES))
        raise ConfigError(f"--{flag} is {name!r}: use one of {known}", param=flag)
    return POLICIES[name]


def choose(
    policy: Policy, request: RouteRequest, views: Sequence[BackendView]
) -> BackendView | None:
    """Let `policy` pick among the available engines; None when there is none. O(len(views))."""
    candidates = [view for view in views if view.available]
    return policy(request, candidates) if candidates else None
