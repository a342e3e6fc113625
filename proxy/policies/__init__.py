"""Which of the engines that could take a request should: one pure function per policy.

A policy sees the request and the views of the engines that are fit to serve it, and names
one of them. It keeps no state, reads no clock and draws no random numbers, so the same
question has the same answer here, in a test and in a simulation of thousands of engines.
What makes an engine fit is not a policy's concern: `choose` filters before it asks.

Adding one: a function in this folder and its line in `config/policies.py`. The command line and the
property suite take all from there.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING, cast

from pdserve.config.policies import POLICIES
from pdserve.errors import ConfigError
from pdserve.proxy.policies.views import BackendView, Policy, RouteRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["BackendView", "Policy", "RouteRequest", "choose", "policy_named"]


def policy_named(name: str, *, flag: str) -> Policy:
    """Return the policy called `name`.

    Raises:
        ConfigError: There is none; the message lists those there are.
    """
    if name not in POLICIES:
        known = ", ".join(sorted(POLICIES))
        raise ConfigError(f"--{flag} is {name!r}: use one of {known}", param=flag)
    return cast("Policy", resolve_name(POLICIES[name]))


def choose(
    policy: Policy, request: RouteRequest, views: Sequence[BackendView]
) -> BackendView | None:
    """Let `policy` pick among the available engines; None when there is none. O(len(views))."""
    candidates = [view for view in views if view.available]
    return policy(request, candidates) if candidates else None
