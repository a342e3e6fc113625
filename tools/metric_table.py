"""Writes docs/metrics.md: vLLM's series, and what each is here.

python -m tools.metric_table           # writes it
python -m tools.metric_table --check   # exit code 1 if it is not what would be written
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from pdserve.observe.vllm_series import VLLM_SERIES, SeriesScope
from tools.written import write_or_check

DOCUMENT: Final = Path(__file__).parents[1] / "docs" / "metrics.md"
_HEAD: Final = """\
# Metrics

`/metrics` of an engine and of a proxy is Prometheus' text format. What vLLM's V1 engine counts has
vLLM's name where the meaning is the same, so its boards, alerts and gateways go on working;
everything else is `pdserve_*`. The table is written by `python -m tools.metric_table`; every
process tells of all its series from its start on (a proxy from the first engine on), at 0, and
none says when it was made (`_created`).

## Engines

As vLLM's do, `vllm:` series have the labels `model_name` and `engine`; the latter is the index of
the engine core, `0` where there is one (`--data-parallel-size`). `pdserve_*` series are of all
cores together.

## The proxy

Scraped alone, a proxy shows the deployment under the same names: point vLLM's board at it. Scrape
its engines as well for `pdserve_*` series of single engines, and select a `job` then, or what both
tell is counted twice.

- **Of requests** (`engine="all"`): observed by the proxy itself, as its clients saw them: retries,
  hand-overs and the queue of the proxy included, and each request once, although P and D have
  served it. Latencies are of requests that ended well. How they split by stage is in
  `pdserve_stage_duration_seconds`.
- **Of engine cores** (`engine="prefill"`, `"decode"` or `"both"`): sums over the engines of a role.
  Gauges are of those that are there now (`kv_cache_usage_perc` is the share of all their blocks).
  Counters never fall: what an engine has counted is kept when it dies or leaves. Each health check
  (`--health-check-interval-secs`; there are 200 a second at most, however many engines there are)
  brings the newest counts, from the first one of an engine's life on; what it counts between its
  last check and its death is lost.
- Several proxies before the same engines all tell the engines' sums, and each its own requests:
  `max` the former over proxies, `sum` the latter.

A prompt that is prefilled on P and decoded on D is in both engines' `vllm:prompt_tokens_by_source`
(at D as `external_kv_transfer`), as with vLLM. The proxy's `vllm:prompt_tokens` and
`vllm:generation_tokens` count it once.

## Boards

`configs/grafana/pdserve.json` is ours. vLLM's load as they are;
of its release 0.33 there are three (in its sources, below "examples"). Both are played
against a real Prometheus that scrapes P, D and the proxy under load:

```bash
apt-get install --no-install-recommends prometheus
python -m tests.board                                      # ours; vLLM's: --board grafana.json
python -m tests.board --board grafana.json --draw out.png  # and a picture
```

In November 2026, with the model of the tree, 3 clients and 897 requests in 24 s, none of vLLM's 43
panels was empty with the proxy scraped alone (16 of performance_statistics, 14 of query_statistics,
13 of grafana), and none of the 35 that ours had then. Grafana itself is in none of the registries
that our tests use: the picture is of its board's layout and expressions, drawn from what Prometheus
answers.

![vLLM's board over the proxy](images/vllm-board.png)
"""
_TITLES: Final = {
    SeriesScope.OBSERVED: "Of requests",
    SeriesScope.SUMMED: "Of engine cores",
    SeriesScope.SERVED: "Of the servers of engines",
    SeriesScope.PROCESS: "Of each process, engine or proxy",
    SeriesScope.ABSENT: "Not here",
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
    return "".join(parts)


if __name__ == "__main__":
    sys.exit(write_or_check(DOCUMENT, document()))
