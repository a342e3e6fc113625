"""Grafana's dashboard and Prometheus' rules name only what real processes say."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.cli.process import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.conftest import Boxed

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]

RULES = ROOT / "configs" / "prometheus" / "rules.yml"
SCRAPES = ROOT / "configs" / "prometheus" / "prometheus.yml"
GRAFANA = ROOT / "configs" / "grafana" / "pdserve.json"

JOBS = {"pdserve-proxy": ("proxy",), "pdserve-engine": ("prefill", "decode")}
TARGET_LABELS = {"job", "instance"}
FUNCTIONS = {
    "histogram_quantile", "increase", "max", "min", "min_over_time", "rate", "sum", "vector",
}  # fmt: skip
KEYWORDS = {"by", "without", "and", "or", "unless", "on", "ignoring", "bool"}
SELECTOR = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(\{[^}]*\})?")
MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')
SERIES = re.compile(r"^([^\s{]+)(?:\{(.*)\})? (\S+)$")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

MUST_HAVE = {
    "pdserve-proxy": (
        "pdserve_time_to_first_token_seconds_count{mode}",
        "pdserve_stage_duration_seconds_count{stage}",
        "pdserve_disagg_decisions_total{decision,reason}",
        "pdserve_client_disconnects_total{stage}",
        "pdserve_event_loop_lag_seconds_count",
        "pdserve_inter_token_latency_seconds_count",
        "pdserve_requests_in_flight{stage}",
        "pdserve_kv_ladder_total{rung,reason}",
        "pdserve_kv_mode_total{mode}",
    ),
    "pdserve-engine": (
        "vllm:num_requests_running{model_name,engine}",
        "vllm:num_requests_waiting{model_name,engine}",
        "vllm:kv_cache_usage_perc{model_name,engine}",
        "vllm:prefix_cache_queries_total{model_name,engine}",
        "vllm:prefix_cache_hits_total{model_name,engine}",
        "vllm:prompt_tokens_total{model_name,engine}",
        "vllm:generation_tokens_total{model_name,engine}",
        "vllm:prompt_tokens_by_source_total{model_name,engine,source}",
        "vllm:request_success_total{model_name,engine,finished_reason}",
        "vllm:time_to_first_token_seconds_count{model_name,engine}",
        "vllm:inter_token_latency_seconds_count{model_name,engine}",
        "vllm:request_queue_time_seconds_count{model_name,engine}",
        "pdserve_stage_duration_seconds_count{stage}",
        "pdserve_kv_blocks{state}",
        "pdserve_kv_transfer_seconds_count",
        "pdserve_kv_transfer_wait_seconds_count{kind}",
        "pdserve_kv_transfer_bytes_total",
        "pdserve_kv_transfer_descriptors_total",
        "pdserve_kv_transfer_failures_total{reason}",
        "pdserve_kv_transfer_faults_total{fault}",
        "pdserve_kv_lease_expired_total",
        "pdserve_client_disconnects_total{stage}",
        "pdserve_event_loop_lag_seconds_count",
    ),
}
NOT_ZERO_AT_START = {"pdserve_event_loop_lag_seconds_count", "pdserve_kv_blocks"}

Told = dict[str, list[tuple[dict[str, str], float]]]


@pytest.fixture(scope="module")
def told(boxed_from_start: Boxed) -> dict[str, list[Told]]:
    """Every series of each job's processes, before the first request."""
    texts = boxed_from_start.told_at_start
    return {job: [_told(texts[name]) for name in names] for job, names in JOBS.items()}


def _told(text: str) -> Told:
    found: Told = {}
    for line in text.splitlines():
        if line.startswith("#") or (match := SERIES.match(line)) is None:
            continue
        name, labels, value = match.groups()
        found.setdefault(name, []).append((dict(LABEL.findall(labels or "")), float(value)))
    return found


def rules() -> list[dict[str, str]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def expressions() -> Iterator[str]:
    for rule in rules():
        yield rule["expr"]
    for panel in json.loads(GRAFANA.read_text())["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"].replace("$__rate_interval", "1m")


def test_must_have_series_exist_from_the_start_at_zero(told: dict[str, list[Told]]) -> None:
    for job, wanted in MUST_HAVE.items():
        for series in wanted:
            name, _, labels = series.rstrip("}").partition("{")
            for process in told[job]:
                assert name in process, f"{job} has no {name}"
                for found, value in process[name]:
                    assert set(found) == set(filter(None, labels.split(","))), series
                    if name not in NOT_ZERO_AT_START:
                        assert value == 0, f"{job}: {name}{found} is {value} at the start"


@pytest.mark.parametrize("expression", sorted(set(expressions())))
def test_an_expression_names_only_what_exists(expression: str, told: dict[str, list[Told]]) -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    grouped = set(
        re.split(r"\s*,\s*", ",".join(re.findall(r"\b(?:by|without) \(([^)]*)\)", expression)))
    ) - {""}
    bare = re.sub(r"\b(?:by|without) \([^)]*\)", "", expression)
    bare = re.sub(r"\[[^\]]*\]", "", bare)
    known = set(TARGET_LABELS)
    selectors = [
        (name, labels or "")
        for name, labels in SELECTOR.findall(bare)
        if name not in FUNCTIONS | KEYWORDS
    ]
    assert selectors
    for name, labels in selectors:
        if name in recorded:
            continue
        matchers = MATCHER.findall(labels)
        jobs = next((value.split("|") for label, _, value in matchers if label == "job"), [])
        assert jobs, f"{name}: which job?"
        for job in jobs:
            samples = [sample for process in told[job] for sample in process.get(name, ())]
            assert samples, f"{job} has no {name}"
            for label, _, value in matchers:
                if label in TARGET_LABELS:
                    continue
                values = {found.get(label) for found, _ in samples}
                missing = set(value.split("|")) - values
                assert not missing, f"{name} has no {label} {missing}, only {values}"
            known.update(*(found for found, _ in samples))
    assert grouped <= known, f"no series here has {grouped - known}"


def test_panels_have_names_of_their_own_and_do_not_overlap() -> None:
    panels = json.loads(GRAFANA.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                assert (x, y) not in cells, panel["title"]
                cells.add((x, y))


def test_legends_name_labels_that_their_expression_keeps() -> None:
    for panel in json.loads(GRAFANA.read_text())["panels"]:
        for target in panel.get("targets", ()):
            kept = re.findall(r"\b(?:by) \(([^)]*)\)", target["expr"])
            named = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            outer = {label.strip() for group in kept for label in group.split(",")}
            assert named <= outer, (panel["title"], named)


def test_alerts_say_what_is_wrong_and_what_to_do() -> None:
    for rule in rules():
        if "alert" in rule:
            assert rule["annotations"].keys() == {"summary", "description"}
            assert rule["labels"]["severity"] in {"warning", "critical"}


def test_the_scraped_jobs_are_those_that_the_rules_name() -> None:
    jobs = {job["job_name"] for job in yaml.safe_load(SCRAPES.read_text())["scrape_configs"]}
    assert jobs == set(JOBS)
