"""Which tenants have had more than their share of recent work. Pure: times are passed in."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

RECENT_S: Final = 60.0
_HALF_S: Final = 20.0
"""How long a tenant is reckoned with after its last request, and after how long what it had counts
half."""
_CLEARLY: Final = 1.25
"""How many times the mean is clearly more than a share."""


@dataclass(frozen=True, slots=True)
class _Had:
    """The work a tenant had received by a point in time, with older work decayed."""

    cost: float
    at_s: float

    def at(self, now_s: float) -> float:
        return self.cost * math.exp2((self.at_s - now_s) / _HALF_S)


class RecentWork:
    """The work that each tenant has received recently, with older work decayed.

    The sum of all decays as its parts do, so no question looks at more than one tenant.
    """

    def __init__(self) -> None:
        self._had: OrderedDict[str, _Had] = OrderedDict()  # the least recent first
        self._sum = _Had(0.0, 0.0)

    def add(self, tenant: str, cost: float, now_s: float) -> None:
        """Count work of a tenant, or a correction below 0."""
        self._forget(now_s)
        former = self._had.pop(tenant, None)
        before = 0.0 if former is None else former.at(now_s)
        self._had[tenant] = _Had(max(0.0, before + cost), now_s)
        self._sum = _Had(self._sum.at(now_s) + self._had[tenant].cost - before, now_s)

    def is_over_share(self, tenant: str, now_s: float) -> bool:
        """Return whether a tenant has had clearly more than the mean; amortised O(1)."""
        self._forget(now_s)
        had = self._had.get(tenant)
        limit = _CLEARLY * max(0.0, self._sum.at(now_s))  # which rounding may have left below 0
        return had is not None and had.at(now_s) * len(self._had) > limit

    def _forget(self, now_s: float) -> None:
        """Forget tenants without recent work."""
        while self._had and now_s - (first := next(iter(self._had.values()))).at_s > RECENT_S:
            self._had.popitem(last=False)
            self._sum = _Had(self._sum.at(now_s) - first.at(now_s), now_s)
