"""What a data set produces: requests and a description of them."""

from __future__ import annotations

import msgspec

from pdserve.bench.records import Planned


class RequestPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of a run before arrivals are drawn.

    Attributes:
        requests: Requests by `index`. Those of a data set with its own times have `at_s`.
        description: The data set and its parameters in words, for `Run.dataset`.
        notes: Sentences for readers of the figures: what was left out and how much, and what was
            repeated.
    """

    requests: list[Planned]
    description: str
    notes: list[str] = []
