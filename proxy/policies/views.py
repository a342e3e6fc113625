"""What a routing policy may look at: frozen values, no engines, no sockets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """A request as routing sees it.

    Attributes:
        sequence: Counts up by one per choice made by this proxy.
        body_bytes: Size of the request's body, a cheap stand-in for its prompt's length.
    """

    sequence: int
    body_bytes: int = 0


@dataclass(frozen=True, slots=True)
class BackendView:
    """One engine as of now.

    Attributes:
        url: Names the engine.
        available: Healthy, and its breaker lets a request through.
        in_flight: Requests this proxy has running there; exact.
        num_foreign: Requests others have there, by the engine's newest snapshot.
        kv_usage: Share of the engine's KV blocks in use, 0 to 1, by the same snapshot.
        age_s: Age of that snapshot; infinite before the first.
    """

    url: str
    available: bool
    in_flight: int = 0
    num_foreign: int = 0
    kv_usage: float = 0.0
    age_s: float = float("inf")


Policy = Callable[[RouteRequest, Sequence[BackendView]], BackendView]
"""Picks one of the views, which are never empty and all available."""
