"""Routing policies: one pure function each, which picks among the eligible engines.

A policy sees the request and the views of the engines that are fit to serve it, and names
one of them. It keeps no state, reads no clock and draws no random numbers, so the same
question has the same answer here, in a test and in a simulation of thousands of engines.
What makes an engine fit is not a policy's concern: it is shown no other.

To add one, write a function in this folder and add its name to `config/policies.py`, from which the
command line and the property suite take all of them.
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
        sequence: Number that increases by one with each choice of this proxy.
        prompt_tokens: Length of its prompt; 0 unless the policy looks at prefixes.
    """

    sequence: int
    prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class BackendView:
    """The current state of one engine.

    Attributes:
        url: The engine's base URL, which identifies it.
        in_flight: Exact number of this proxy's requests running there.
        num_foreign: Requests from other sources, according to the engine's newest snapshot.
        kv_usage: Share of the engine's KV blocks in use, 0 to 1, from the same snapshot.
        age_s: Age of that snapshot; infinite before the first.
        hit_tokens: Leading tokens of the request's prompt whose KV it has; like `pending_tokens`,
            0 unless the policy looks at prefixes.
        pending_tokens: Prompt tokens of this proxy's requests there that the engine did not have
            already: still to compute on a prefill engine, held on a decode engine.
    """

    url: str
    in_flight: int = 0
    num_foreign: int = 0
    kv_usage: float = 0.0
    age_s: float = float("inf")
    hit_tokens: int = 0
    pending_tokens: int = 0


Policy = Callable[[RouteRequest, Sequence[BackendView]], BackendView]
"""Picks one of the views, of which there is at least one."""


SplitPolicy = Callable[[RouteRequest, BackendView, BackendView], str]
"""Returns the reason to serve a request entirely on the second engine, or an empty string to split
it between the first and the second."""


def policy_named(name: str, *, flag: str) -> Policy:
    """Return the policy called `name`.

    Raises:
        ConfigError: No such policy exists; the message lists those that do.
    """
    return cast("Policy", _named(POLICIES, name, flag))


def split_policy_named(name: str, *, flag: str) -> SplitPolicy:
    """Return the split policy called `name`.

    For `predicted` this is the policy used until enough is known, for `shadow` the one obeyed.

    Raises:
        ConfigError: No such policy exists; the message lists those that do.
    """
    always = SPLIT_POLICIES["always"]
    known = {**SPLIT_POLICIES, PREDICTED: always, SHADOW: always}
    return cast("SplitPolicy", _named(known, name, flag))


def _named(policies: Mapping[str, str], name: str, flag: str) -> object:
    if name not in policies:
        known = ", ".join(sorted(policies))
        raise ConfigError(f"--{flag} is {name!r}: use one of {known}", param=flag)
    return resolve_name(policies[name])
