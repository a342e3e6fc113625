"""Writes docs/metrics.md: vLLM's series, and what each is here; and pdserve's own.

python -m tools.metric_table           # writes it
python -m tools.metric_table --check   # exit code 1 if it is not what would be written
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import CollectorRegistry

from pdserve.config.schema import CacheConfig
from pdserve.observe.vllm_series import VLLM_SERIES, SeriesScope
from pdserve.proxy.epp.exchange import EppMetrics
from pdserve.proxy.metrics import Metrics
from pdserve.server.metrics import ServerMetrics
from pdserve.wire.request import EngineStats
from tools.written import write_or_check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.metrics_core import Metric

DOCUMENT: Final = Path(__file__).parents[1] / "docs" / "metrics.md"
_HEAD: Final = """\
# Metrics

Use this page to build dashboards, alerts and autoscaling. `/metrics` of an engine and of a proxy is
in Prometheus' text format. A series that means the same as one of vLLM's V1 engine has vLLM's name,
so vLLM's boards, alerts and gateways keep working. All other series are `pdserve_*`. A counter's
samples end in `_total`. Every process exports all its series at 0 from its start (a proxy from its
first engine on), without `_created`. `python -m tools.metric_table` writes this page.

## Engines

`vllm:` series have the labels `model_name` and `engine`, as in vLLM. `engine` is the index of the
engine core: `0` if there is only one (`--data-parallel-size`). `pdserve_*` series cover all cores.

## The proxy

To see the whole deployment, scrape only the proxy and point vLLM's board at it. To get `pdserve_*`
series of single engines, scrape the engines as well, and select one `job` in queries. Otherwise
both sources are counted together.

- **Of requests** (`engine="all"`): the proxy observes them as its clients do, including retries,
  hand-overs and its own queue. It counts each request once, although P and D both serve it.
  Latencies cover requests that ended well. `pdserve_stage_duration_seconds` splits them by stage.
- **Of engine cores** (`engine="prefill"`, `"decode"` or `"both"`): sums over the engines of a role.
  Gauges cover the engines that exist now (`kv_cache_usage_perc` is the share of all their blocks).
  Counters never fall: the proxy keeps the counts of engines that die or leave. Each health check
  (`--health-check-interval-secs`, at most 200 a second over all engines) brings the newest
  counts. What an engine counts between its last check and its death is lost.
- **Several proxies** before the same engines each export the engines' sums and their own
  requests. Take the `max` of the former over proxies and the `sum` of the latter.

A prompt that P prefills and D decodes is in both engines' `vllm:prompt_tokens_by_source` (at D as
`external_kv_transfer`), as in vLLM. The proxy's `vllm:prompt_tokens` and `vllm:generation_tokens`
count it once.

## Boards

`configs/grafana/pdserve.json` is pdserve's board. vLLM's boards load unchanged; release 0.33 has
three, in the "examples" of its sources. These commands test a board against a real Prometheus that
scrapes P, D and the proxy under load:

```bash
apt-get install --no-install-recommends prometheus
python -m tests.board                                      # ours; vLLM's: --board grafana.json
python -m tests.board --board grafana.json --draw out.png  # and a picture
```

In November 2026, with the boxed model, 3 clients, 897 requests in 24 s and only the proxy scraped,
none of vLLM's 43 panels was empty (16 of performance_statistics, 14 of query_statistics, 13 of
grafana). Neither was any of the 35 panels that pdserve's board had then. The picture shows the
board's layout and expressions, drawn from Prometheus' answers without Grafana.

![vLLM's board over the proxy](images/vllm-board.png)
"""
_TITLES: Final = {
    SeriesScope.OBSERVED: "Of requests",
    SeriesScope.SUMMED: "Of engine cores",
    SeriesScope.SERVED: "Of the servers of engines",
    SeriesScope.PROCESS: "Of each process, engine or proxy",
    SeriesScope.ABSENT: "Not reported",
}


def document() -> str:
    """Make the page."""
    parts = [_HEAD, "\n## vLLM's series\n"]
    for scope, title in _TITLES.items():
        second = "why" if scope is SeriesScope.ABSENT else "what it says"
        rows = [
            f"| `{series.name}` | {series.kind} | {series.meaning} |\n"
            for series in VLLM_SERIES
            if series.scope is scope
        ]
        parts.append(f"\n### {title}\n| series | type | {second} |\n|---|---|---|\n{''.join(rows)}")
    parts.append("\n## pdserve's series\n")
    for title, registry in _registries():
        rows = [_row(each) for each in registry.collect() if each.name.startswith("pdserve_")]
        parts.append(f"\n### {title}\n{_COLUMNS}{''.join(rows)}")
    return "".join(parts)


_COLUMNS: Final = "| series | type | what it says |\n|---|---|---|\n"


def _registries() -> Iterator[tuple[str, CollectorRegistry]]:
    """Yield the processes that have series of pdserve's own, and those series with all labels."""
    engine: Any = _SeenClient()
    yield "Of an engine", ServerMetrics("", engine, CacheConfig()).registry
    proxy = Metrics()
    proxy.backends.labels("prefill", "ready")
    proxy.route.set_homes({"URL": "prefill"})
    yield "Of the proxy", proxy.registry
    for_gateways = CollectorRegistry()
    EppMetrics(for_gateways)
    yield "Of a proxy with `--epp-port`", for_gateways


class _SeenClient:
    """An engine's client, as far as its series look at it."""

    core_stats = (None,)
    stats = EngineStats(kv_source_tokens={"nixl": 0})
    info = None


def _row(family: Metric) -> str:
    labels = dict.fromkeys(name for each in family.samples for name in each.labels if name != "le")
    names = f"{{{','.join(labels)}}}" if labels else ""
    return f"| `{family.name}{names}` | {family.type} | {family.documentation} |\n"


if __name__ == "__main__":
    sys.exit(write_or_check(DOCUMENT, document()))
