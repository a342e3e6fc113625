"""What is counted of the requests that gateways carry."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import Counter, Histogram

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from pdserve.errors import PdserveError
    from pdserve.proxy.epp.picking import Pick

_OUTCOMES = ("pair", "one", "client_error", "shed", "unavailable", "error")
_OF_STATUS = {429: "shed", 503: "unavailable"}
_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 1.0)


class EppMetrics:
    """Series that exist where gateways are answered."""

    def __init__(self, registry: CollectorRegistry) -> None:
        picks = Counter(
            "pdserve_epp_picks",
            "Requests of gateways: engines picked (pair: two; one), or refused, and why.",
            ["outcome"],
            registry=registry,
        )
        self._picks = {outcome: picks.labels(outcome) for outcome in _OUTCOMES}
        self._seconds = Histogram(
            "pdserve_epp_pick_seconds",
            "From the end of a request's body to the choice of its engines, the wait for a place "
            "included.",
            buckets=_BUCKETS_S,
            registry=registry,
        )

    def picked(self, pick: Pick, seconds: float) -> None:
        """A request got its engines."""
        self._picks["one" if pick.prefill is None else "pair"].inc()
        self._seconds.observe(seconds)

    def refused(self, error: PdserveError) -> None:
        """A request got none."""
        other = "error" if error.status >= 500 else "client_error"
        self._picks[_OF_STATUS.get(error.status, other)].inc()
