"""Totals of a deployment under vLLM's names: the engines' counts and the proxy's tokens.

Each check brings a snapshot of an engine. Its increase since the previous one is added to the
sums of its role, so that these never fall when an engine dies. A life of an engine counts from its
first snapshot here, and its counts between its last one and its death are lost (a health check's
interval at most). Gauges are sums over the engines present. An engine to which several URLs lead
counts once.

The label `engine` is a role for sums over engines, and `ALL` for the proxy's own counts.
"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import TYPE_CHECKING, Final

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from pdserve.observe.engine_series import SeriesCounts, cache_family, counts_of, engine_families
from pdserve.observe.vllm_series import meaning
from pdserve.proxy.backend import Health
from pdserve.wire.request import EngineLoad

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from prometheus_client.metrics_core import Metric

    from pdserve.proxy.backend import Backend
    from pdserve.proxy.story import Story
    from pdserve.wire.request import EngineStats

ALL: Final = "all"
_PROMPT, _OUTPUT = "vllm:prompt_tokens", "vllm:generation_tokens"
"""Counted here: a prompt that one engine prefills and another one receives is in both's counts."""


class Totals(Collector):
    """The sums of one proxy.

    Attributes:
        model_name: The name the engines serve; empty until one has given it. Without it nothing
            is reported.
    """

    def __init__(self) -> None:
        self.model_name = ""
        self._sums: dict[str, SeriesCounts] = {}
        self._backends: Collection[Backend] = ()
        # By engine and life, the one of its URLs that brought the newest snapshot.
        self._newest: weakref.WeakValueDictionary[tuple[str, str], Backend]
        self._newest = weakref.WeakValueDictionary()
        self._ended = {_PROMPT: 0, _OUTPUT: 0}
        self._told = {_PROMPT: 0, _OUTPUT: 0}

    def add(self, backend: Backend, stats: EngineStats) -> None:
        """Take an engine's newest snapshot."""
        if not self.model_name and backend.models:
            self.model_name = backend.models[0]["id"]
        life = "" if backend.info is None else backend.info.incarnation
        former_life, former = self._counted_as(backend).snapshot or ("", None)
        before = former if former_life == life else None
        if life and before is not None and stats.num_steps < before.num_steps:
            return  # of two checks at once, the later one has been read first
        backend.snapshot = (life, stats)
        if backend.info is not None:
            self._newest[backend.info.engine_id, life] = backend
        counts = _engines_own(stats)
        sums = self._sums.setdefault(backend.role.value, dict.fromkeys(counts, 0.0))
        if before is not None:
            known = _engines_own(before)
            for key, number in counts.items():
                # An engine of another make may begin again without saying so; drafts of one engine
                # have more positions than those of another.
                sums[key] = sums.get(key, 0.0) + max(0.0, number - known.get(key, 0.0))

    def ended(self, story: Story) -> None:
        """Count the tokens of a request that is over."""
        self._ended[_PROMPT] += story.num_known_prompt_tokens
        self._ended[_OUTPUT] += story.num_output_tokens

    def look(self, backends: Collection[Backend], running: Iterable[Story]) -> None:
        """Note how things stand, for the next `collect`.

        Args:
            running: The requests that are not over.
        """
        self._backends = backends
        names = [backend.models[0]["id"] for backend in backends if backend.models]
        if names and self.model_name not in names:
            self.model_name = names[0]
        prompt, output = self._ended[_PROMPT], self._ended[_OUTPUT]
        for story in running:
            prompt += story.num_known_prompt_tokens
            output += story.num_output_tokens
        # A stream's counts, taken from its events, may be corrected at its end.
        self._told[_PROMPT] = max(self._told[_PROMPT], prompt)
        self._told[_OUTPUT] = max(self._told[_OUTPUT], output)

    def collect(self) -> Iterator[Metric]:
        """Yield the families; called by the registry at each scrape, after `look`."""
        if not self.model_name:
            return
        for name, number in self._told.items():
            family = CounterMetricFamily(name, meaning(name), labels=("model_name", "engine"))
            family.add_metric((self.model_name, ALL), number)
            yield family
        known: dict[str, list[Backend]] = {role: [] for role in self._sums}
        for backend in self._backends:
            # None yet of one that has just changed its role.
            of_role = known.get(backend.role.value)
            is_first = self._counted_as(backend) is backend
            if backend.snapshot is not None and of_role is not None and is_first:
                of_role.append(backend)
        loads = {role: _load_of(backends) for role, backends in known.items()}
        yield from engine_families(self.model_name, self._sums, loads)
        yield cache_family(
            {role: _cache_labels(backends) for role, backends in known.items() if backends}
        )

    def _counted_as(self, backend: Backend) -> Backend:
        info = backend.info
        key = ("", "") if info is None else (info.engine_id, info.incarnation)
        return self._newest.get(key, backend)


def _engines_own(stats: EngineStats) -> SeriesCounts:
    counts = counts_of(stats)
    for name in (_PROMPT, _OUTPUT):
        del counts[name, ""]
    return counts


def _load_of(backends: Iterable[Backend]) -> EngineLoad:
    loads = [
        backend.snapshot[1]
        for backend in backends
        if backend.snapshot is not None and backend.health is not Health.UNREACHABLE
    ]
    blocks: Counter[str] = Counter()
    for load in loads:
        blocks.update(load.blocks)
    return EngineLoad(
        num_running=sum(load.num_running for load in loads),
        num_waiting=sum(load.num_waiting for load in loads),
        num_receiving=sum(load.num_receiving for load in loads),
        blocks=blocks,
        num_blocks=sum(load.num_blocks for load in loads),
    )


def _cache_labels(backends: Iterable[Backend]) -> dict[str, str]:
    """Return the cache labels of a role's engines; several values are listed side by side."""
    infos = [backend.info for backend in backends if backend.info is not None]
    return {
        "block_size": ",".join(sorted({str(info.block_size) for info in infos})),
        "cache_dtype": ",".join(sorted({info.dtype for info in infos})),
        "num_gpu_blocks": str(sum(info.num_blocks for info in infos)),
    }
