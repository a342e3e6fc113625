"""An engine's Prometheus series, as its server observes them.

Names are vLLM's where the meaning is the same, `pdserve_*` otherwise. What the engine cores count
is read from their newest snapshots when somebody scrapes (`counted`); what only the server sees
(latencies, outcomes) is observed as it happens. Every series exists from the start.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram

from pdserve.http.series import HttpSeries
from pdserve.observe.metrics import (
    STAGE_BUCKETS_S,
    exposition,
    loop_lag_histogram,
)
from pdserve.observe.processes import ProcessSeries
from pdserve.observe.request_series import RequestSeries
from pdserve.observe.vllm_series import meaning
from pdserve.server.counted import EngineCollector

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.config.schema import CacheConfig
    from pdserve.engine.client import EngineClient
    from pdserve.observe.request_series import EndedRequest

STAGES = ("server", "queue", "prefill", "kv_wait", "kv_transfer", "handover", "first_step")
"""Parts of the time to an engine's first own token, in order; together they are all of it."""

DISCONNECT_STAGES = ("queue", "decode")
PREFILL_LEGS = ("handed_over", "ended", "refused", "failed")
_EVENT_TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 32)
_PARSED = "vllm:tool_call_parser_invocations"
_PARSING_MODES = ("streaming", "non_streaming")
_PARSING_OUTCOMES = ("tool_call", "no_tool_call")
_REQUEST_TYPES = ("chat_completions", "responses", "other")
_TYPE_OF_PATH = {"/v1/chat/completions": "chat_completions", "/v1/responses": "responses"}
_CHILDREN = {
    "pdserve.engine.process": "core",
    "pdserve.engine.coordinator": "coordinator",
    "pdserve.executor.rank": "rank",
}
"""By their modules."""


class ServerMetrics:
    """The series of one engine.

    Args:
        model_name: Label of every `vllm:` series.
        client: The engine; it need not be ready.
        cache: Its settings.
    """

    def __init__(self, model_name: str, client: EngineClient, cache: CacheConfig) -> None:
        self.registry = CollectorRegistry()
        self._processes = ProcessSeries(_CHILDREN)
        self._model_name = model_name
        self.registry.register(EngineCollector(model_name, client, cache))
        self.http = HttpSeries(self.registry)
        self.loop_lag = loop_lag_histogram(self.registry)
        self._requests = RequestSeries(self.registry)
        self._of_core = [
            self._requests.of(model_name, str(core)) for core in range(len(client.core_stats))
        ]
        stage = Histogram(
            "pdserve_stage_duration_seconds",
            "Parts of the time to this engine's first own token; they sum to it.",
            ["stage"],
            buckets=STAGE_BUCKETS_S,
            registry=self.registry,
        )
        self._stages = {name: stage.labels(name) for name in STAGES}
        self._kv_transfer = Histogram(
            "pdserve_kv_transfer_seconds",
            "First to last byte of a KV load.",
            buckets=STAGE_BUCKETS_S,
            registry=self.registry,
        )
        wait = Histogram(
            "pdserve_kv_transfer_wait_seconds",
            "Time around a KV load in which no bytes moved.",
            ["kind"],
            buckets=STAGE_BUCKETS_S,
            registry=self.registry,
        )
        self._kv_wait = {kind: wait.labels(kind) for kind in ("load", "handover", "step")}
        self._event_tokens = Histogram(
            "pdserve_event_tokens",
            "Tokens of an output: one, and one for each token of a draft that was right.",
            buckets=_EVENT_TOKENS,
            registry=self.registry,
        )
        disconnects = Counter(
            "pdserve_client_disconnects",
            "Connections closed before the answer was complete.",
            ["stage"],
            registry=self.registry,
        )
        self._disconnects = {stage: disconnects.labels(stage) for stage in DISCONNECT_STAGES}
        legs = Counter(
            "pdserve_prefill_legs",
            "Prompts that this engine had prefilled elsewhere itself, by how that ended.",
            ["outcome"],
            registry=self.registry,
        )
        self._prefill_legs = {outcome: legs.labels(outcome) for outcome in PREFILL_LEGS}

        parsed = Counter(
            _PARSED,
            meaning(_PARSED),
            ["model_name", "mode", "outcome", "request_type"],
            registry=self.registry,
        )
        self._parsed = {
            each: parsed.labels(model_name, *each)
            for each in product(_PARSING_MODES, _PARSING_OUTCOMES, _REQUEST_TYPES)
        }

    async def render(self) -> bytes:
        """Return the exposition."""
        return exposition(self.registry) + await self._processes.exposition()

    def first_token(self, core: int, seconds: float) -> None:
        """A choice's first token came `seconds` after its request."""
        self._of_core[core].first_token(seconds)

    def token_gap(self, core: int, seconds: float) -> None:
        """A choice's next token came `seconds` after the one before it."""
        self._of_core[core].token_gap(seconds)

    def event(self, num_tokens: int) -> None:
        """An engine core gave a choice so many tokens at once."""
        self._event_tokens.observe(num_tokens)

    def stages(
        self, core: int, seconds: Mapping[str, float], *, kv_bytes: int, step_wait_s: float = 0.0
    ) -> None:
        """A request's time to its first own token, by stage (a key of `STAGES`).

        Args:
            core: The engine core that served it.
            kv_bytes: Of the KV that it loaded.
            step_wait_s: The part of the handover in which KV lay ready while a step ran.
        """
        for name, value in seconds.items():
            self._stages[name].observe(value)
        observer = self._of_core[core]
        observer.began(queue_s=seconds["queue"], prefill_s=seconds["prefill"])
        if kv_bytes:
            observer.loaded(seconds=seconds["kv_transfer"], num_bytes=kv_bytes)
            self._kv_transfer.observe(seconds["kv_transfer"])
            self._kv_wait["load"].observe(seconds["kv_wait"])
            self._kv_wait["handover"].observe(max(0.0, seconds["handover"] - step_wait_s))
            self._kv_wait["step"].observe(step_wait_s)

    def choice_ended(self, core: int, reason: str, choice: EndedRequest) -> None:
        """A choice ended for `reason`, one of `FINISHED_REASONS`."""
        self._requests.count_ends(self._model_name, str(core), (reason,))
        self._of_core[core].ended(choice)

    def choices_ended(self, core: int, *, num_choices: int, num_longest: int) -> None:
        """All choices of a prompt ended; the longest has so many tokens."""
        self._of_core[core].ended_together(num_choices=num_choices, num_longest=num_longest)

    def parsed(self, path: str, *, is_streamed: bool, has_calls: bool) -> None:
        """Something of an answer to a request with tools was taken apart.

        Args:
            path: Of the endpoint that was asked.
            has_calls: A call gained by it.
        """
        mode = _PARSING_MODES[0 if is_streamed else 1]
        outcome = _PARSING_OUTCOMES[0 if has_calls else 1]
        self._parsed[mode, outcome, _TYPE_OF_PATH.get(path, _REQUEST_TYPES[-1])].inc()

    def disconnected(self, stage: str) -> None:
        """A client left in `stage`, one of `DISCONNECT_STAGES`."""
        self._disconnects[stage].inc()

    def prefill_leg(self, outcome: str) -> None:
        """A prefill leg that this engine sent ended so, one of `PREFILL_LEGS`."""
        self._prefill_legs[outcome].inc()
