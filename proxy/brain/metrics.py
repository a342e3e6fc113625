"""Metrics of routing: how well prefixes are known, and how accurate predictions were."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Final

from prometheus_client import Counter, Gauge, Histogram

from pdserve.observe.metrics import STAGE_BUCKETS_S, counter_of
from pdserve.proxy.brain.prompt import UNREAD
from pdserve.wire.event_reader import ReaderState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prometheus_client import CollectorRegistry

    from pdserve.proxy.brain.question import PairCost
    from pdserve.proxy.brain.record import DecisionRecord

TOKENIZED: Final = "tokens"
TIMES: Final = ("ttft", "itl", "wire")
"""What a decision predicts."""
FITS: Final = ("prefill", "step", "wire")
"""What it predicts by."""
_MAX_ENGINES: Final = 20
_OTHERS: Final = "others"
_CHANGES: Final = ("none", "engines", "split")
_RATIO_BUCKETS: Final = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
_DECISION_BUCKETS_S: Final = (2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 2e-2)
_ERROR_BUCKETS: Final = (0, 16, 64, 256, 1024, 4096, 16_384, 65_536)


class PrefixMetrics:
    """The series of a proxy that looks at prefixes; for others they stay 0."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.prompts = counter_of(
            registry,
            "pdserve_route_prompts",
            "Prompts of 256 tokens and more, by what names their prefixes: tokens, or their bytes, "
            "and why.",
            named_by=(TOKENIZED, *UNREAD),
        )
        self.read = Histogram(
            "pdserve_route_prompt_read_seconds",
            "How long it took to name a prompt's prefixes.",
            registry=registry,
            buckets=STAGE_BUCKETS_S,
        )
        self.hit_error = Histogram(
            "pdserve_index_hit_error_tokens",
            "Difference of the prefix that an engine was taken to have and the one it says it had, "
            "by how that was known: up to 255 tokens are no error, for names are of 256.",
            ["known_by"],
            registry=registry,
            buckets=_ERROR_BUCKETS,
        )
        self.misread = Counter(
            "pdserve_route_prompts_misread",
            "Prompts that the proxy has tokenized otherwise than the engine.",
            registry=registry,
        )
        self.entries = Gauge(
            "pdserve_index_entries", "Prefixes whose holders are known.", registry=registry
        )
        self.cores = Gauge(
            "pdserve_index_cores",
            "Engine cores whose KV events are read, by how their readers are.",
            ["state"],
            registry=registry,
        )
        self.resyncs = Gauge(
            "pdserve_index_resyncs",
            "How often the events of a core had to be asked for, at first and after losses.",
            registry=registry,
        )
        self.lag = Gauge(
            "pdserve_index_lag_seconds",
            "Since an engine's KV events were heard last; of the engines that lag most.",
            ["engine"],
            registry=registry,
        )
        self.gaps = Gauge(
            "pdserve_index_gaps",
            "How often an engine's KV events had to be asked for, at first and after losses; of "
            "the engines with most of them.",
            ["engine"],
            registry=registry,
        )
        for gauge in (self.lag, self.gaps):
            gauge.labels(_OTHERS)
        for name in ("events", "routed"):
            self.hit_error.labels(name)
        for state in ReaderState:
            self.cores.labels(state.value)


def set_by_engine(gauge: Gauge, values: Mapping[str, float]) -> None:
    """Set a gauge for the engines with the highest values; a series for each is too many."""
    gauge.clear()
    for url in heapq.nlargest(_MAX_ENGINES, values, key=lambda url: values[url]):
        gauge.labels(url).set(values[url])
    gauge.labels(_OTHERS).set(
        max(heapq.nlargest(_MAX_ENGINES + 1, values.values())[_MAX_ENGINES:], default=0.0)
    )


class RouteMetrics:
    """The series of a proxy that chooses pairs by what it has learned.

    For others they stay 0, except the homes of engines, which are then their roles.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.seconds = Histogram(
            "pdserve_route_seconds",
            "What a choice of a pair took.",
            registry=registry,
            buckets=_DECISION_BUCKETS_S,
        )
        self._prediction_error = Histogram(
            "pdserve_route_prediction_error_ratio",
            "By how much a predicted time was off, over what it was: to the first token, between "
            "tokens, of KV on its way.",
            ["term"],
            registry=registry,
            buckets=_RATIO_BUCKETS,
        )
        self._regret = Counter(
            "pdserve_route_regret_seconds",
            "By how much first tokens came later than the pair that was not chosen was predicted "
            "to give them.",
            registry=registry,
        )
        self._shadow = counter_of(
            registry,
            "pdserve_shadow_decisions",
            "Requests that a choice of a pair was made for and not obeyed, by what it would have "
            "changed: nothing, the engines, or whether there are two (none, engines, split).",
            change=_CHANGES,
        )
        self.model_error = Gauge(
            "pdserve_route_model_error_ratio",
            "Mean relative error of what was learned, of late.",
            ["term"],
            registry=registry,
        )
        self.home_moves = counter_of(
            registry,
            "pdserve_home_moves",
            "Engines for both that the load had change their home role, by what it became.",
            to=("prefill", "decode"),
        )
        self._homes = Gauge(
            "pdserve_engine_home",
            "1 for an engine and what it is for first: its role, or the half of it that the load "
            "asks for most. Of many engines those that come first by URL.",
            ["engine", "role"],
            registry=registry,
        )
        for name in TIMES:
            self._prediction_error.labels(name)
        for name in FITS:
            self.model_error.labels(name)

    def set_homes(self, homes: Mapping[str, str]) -> None:
        """Set the engines' home roles, by URL."""
        self._homes.clear()
        for url in heapq.nsmallest(_MAX_ENGINES, homes):
            self._homes.labels(url, homes[url]).set(1)

    def compare(self, record: DecisionRecord) -> None:
        """Count a decision's error, for a request that has ended well.

        In shadow, the prediction for the engines actually used is compared.
        """
        decision, measured, done = record.decision, record.measured, record.used
        assert measured is not None
        if done is None:
            return
        spurned = decision.other
        if decision.question.is_shadow:
            spurned = None if done.way == decision.chosen.way else decision.chosen
            self._shadow.labels(_difference(done, decision.chosen)).inc()
        predicted = {"ttft": done.ttft_s, "itl": done.itl_s, "wire": done.wire_s}
        found = {"ttft": measured.ttft_s, "itl": measured.itl_s, "wire": measured.wire_s}
        for name, seconds in found.items():
            if seconds:
                error = abs(predicted[name] - seconds) / seconds
                self._prediction_error.labels(name).observe(error)
        if spurned is not None and measured.ttft_s is not None:
            self._regret.inc(max(0.0, measured.ttft_s - spurned.ttft_s))


def _difference(taken: PairCost, chosen: PairCost) -> str:
    """Return which of `_CHANGES` following the choice would have meant."""
    if taken.is_local is not chosen.is_local:
        return "split"
    return "none" if taken.way == chosen.way else "engines"
