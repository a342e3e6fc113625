"""Routing policies: one pure function each, which picks among the eligible engines.

A policy sees the request and the views of the engines that are fit to serve it, and names
one of them. It keeps no state, reads no clock and draws no random numbers, so the same
question has the same answer here, in a test and in a simulation of thousands of engines.
What makes an engine fit is not a policy's concern: it is shown no other.

Adding one: a function in this folder and its line in `config/policies.py`. The command line and the
property suite take all from there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import cast

from pdserve.config.policies import POLICIES, PREDICTED, SHADOW, SPLIT_POLICIES
from pdserve.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """A request as routing sees it.

    Attributes:
        sequence: Counts up by one per choice made by this proxy.
        body_bytes: Size of the request's body, a cheap stand-in for its prompt's length.
        prompt_tokens: Of its prompt; 0 unless the policy is one that looks at prefixes.
    """

    sequence: int
    body_bytes: int = 0
    prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class BackendView:
    """One engine as of now.

    Attributes:
        url: Names the engine.
        in_flight: Requests this proxy has running there; exact.
        num_foreign: Requests others have there, by the engine's newest snapshot.
        kv_usage: Share of the engine's KV blocks in use, 0 to 1, by the same snapshot.
        age_s: Age of that snapshot; infinite before the first.
        hit_tokens: Leading tokens of the request's prompt whose KV it has; like the next, 0 unless
            the policy is one that looks at prefixes.
        pending_tokens: Prompt tokens of this proxy's requests there that the engine did not have
            already: to be computed where it prefills, to be kept where it decodes.
    """

    url: str
    in_flight: int = 0
    num_foreign: int = 0
    kv_usage: float = 0.0
    age_s: float = float("inf")
    hit_tokens: int = 0
    pending_tokens: int = 0


Policy = Callable[[RouteRequest, Sequence[BackendView]], BackendView]
"""Picks one of the views, which are never empty."""


SplitPolicy = Callable[[RouteRequest, BackendView, BackendView], str]
"""Says why a request is not to be split between the first and the second engine, but served whole
by the second; empty: it is split."""


def policy_named(name: str, *, flag: str) -> Policy:
    """Return the policy called `name`.

    Raises:
        ConfigError: There is none; the message lists those there are.
    """
    return cast("Policy", _named(POLICIES, name, flag))


def split_policy_named(name: str, *, flag: str) -> SplitPolicy:
    """Return the split policy called `name`; of `predicted`, the one until enough is known.

    Of `shadow` it is the one that is obeyed.

    Raises:
        ConfigError: There is none; the message lists those there are.
    """
    always = SPLIT_POLICIES["always"]
    known = {**SPLIT_POLICIES, PREDICTED: always, SHADOW: always}
    return cast("SplitPolicy", _named(known, name, flag))


def _named(policies: Mapping[str, str], name: str, flag: str) -> object:
    if name not in policies:
        known = ", ".join(sorted(policies))
        raise ConfigError(f"--{flag} is {name!r}: use one of {known}", param=flag)
    return resolve_name(policies[name])
