"""What the proxy counts of prefixes: how well it knows where they are, and what that takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prometheus_client import Counter, Gauge, Histogram

from pdserve.observe.metrics import STAGE_BUCKETS_S
from pdserve.proxy.brain.prompt import UNREAD
from pdserve.wire.event_reader import ReaderState

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

TOKENIZED: Final = "tokens"
_ERROR_BUCKETS: Final = (0, 16, 64, 256, 1024, 4096, 16_384, 65_536)


class PrefixMetrics:
    """The series of a proxy that looks at prefixes; of others they stay 0."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.prompts = Counter(
            "pdserve_route_prompts",
            "Prompts of 256 tokens and more, by what names their prefixes: tokens, or their bytes, "
            "and why.",
            ["named_by"],
            registry=registry,
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
        for name in (TOKENIZED, *UNREAD):
            self.prompts.labels(name)
        for name in ("events", "routed"):
            self.hit_error.labels(name)
        for state in ReaderState:
            self.cores.labels(state.value)
