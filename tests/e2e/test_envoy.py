"""Envoy carries the requests, the proxy picks the engines: two prefill and two decode engines."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import re
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import yaml

from tests.e2e.conftest import pd_deployment
from tests.e2e.test_tenants import served_first, shared

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.deployment import Deployment

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.matrix,
    pytest.mark.skipif(
        importlib.util.find_spec("envoy") is None, reason="needs pdserve[dev-kubernetes]"
    ),
]

CONFIG = Path(__file__).parents[2] / "deploy" / "envoy" / "envoy.yaml"
_FILTERS = "type.googleapis.com/envoy.extensions.filters.http"
PATH = "/v1/completions"
PROMPT = "Once upon a time there was a king who counted his sheep every evening, and "
BODY = {"prompt": PROMPT, "max_tokens": 24, "seed": 7, "temperature": 0.8}


@dataclass
class Gateway:
    """An Envoy that asks the deployment's proxy."""

    url: str
    running: Deployment

    def ask(self, **changes: Any) -> dict[str, Any]:
        answer = httpx.post(self.url + PATH, json=BODY | changes, timeout=60, verify=False)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def text(self, **changes: Any) -> str:
        said: str = self.ask(**changes)["choices"][0]["text"]
        return said

    def streamed(self, **changes: Any) -> str:
        """The text of a stream, which must end as it should."""
        body = BODY | changes | {"stream": True}
        with httpx.stream("POST", self.url + PATH, json=body, timeout=60, verify=False) as answer:
            assert answer.status_code == 200
            lines = [line for line in answer.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])

    def legs(self, outcome: str) -> float:
        """Prefill legs of all decode engines that run, by how they ended."""
        series = f'pdserve_prefill_legs_total{{outcome="{outcome}"}}'
        alive = [
            name
            for name, each in self.running.processes.items()
            if name.startswith("decode") and each.popen.poll() is None
        ]
        return sum(self.running.metric(name, series) for name in alive)


@contextlib.contextmanager
def envoy(
    directory: Path, running: Deployment, *, filters: tuple[dict[str, Any], ...] = ()
) -> Iterator[Gateway]:
    """Run Envoy with the configuration that is shipped, at free ports.

    Args:
        filters: To stand before the one that asks the proxy.
    """
    config = yaml.safe_load(CONFIG.read_text())
    resources = config["static_resources"]
    manager = resources["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    manager["http_filters"] = [*filters, *manager["http_filters"]]
    config["admin"]["address"]["socket_address"]["port_value"] = 0
    resources["listeners"][0]["address"]["socket_address"]["port_value"] = 0
    found = re.search(r"gateways are answered address=\S+:(\d+)", running.processes["proxy"].log)
    assert found is not None
    ports = {
        "epp": [int(found[1])],
        "engines": [
            int(each.url.rpartition(":")[2])
            for name, each in running.processes.items()
            if name.startswith("decode")
        ],
    }
    for cluster in resources["clusters"]:
        endpoints = cluster["load_assignment"]["endpoints"][0]
        endpoints["lb_endpoints"] = [
            {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": p}}}}
            for p in ports[cluster["name"]]
        ]
    written, admin = directory / "envoy.yaml", directory / "admin"
    written.write_text(yaml.safe_dump(config))
    spec = importlib.util.find_spec("envoy")
    assert spec is not None
    assert spec.origin is not None
    binary = Path(spec.origin).parent / "_bin" / "envoy"
    options = ["--use-dynamic-base-id", "--concurrency", "1", "-l", "warning"]
    with (directory / "envoy.log").open("wb") as log:
        popen = subprocess.Popen(
            [binary, "-c", written, *options, "--admin-address-path", admin],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        yield Gateway(f"http://{_listening(popen, admin)}", running)
    finally:
        popen.terminate()
        popen.wait(20)


def _listening(popen: subprocess.Popen[bytes], admin: Path) -> str:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        assert popen.poll() is None
        with contextlib.suppress(OSError, httpx.HTTPError, ValueError):
            listeners = httpx.get(f"http://{admin.read_text()}/listeners?format=json", verify=False)
            local = listeners.json()["listener_statuses"][0]["local_address"]["socket_address"]
            clusters = httpx.get(f"http://{admin.read_text()}/clusters", verify=False).text
            if re.search(r"^epp::.*health_flags::healthy$", clusters, re.MULTILINE):
                return f"{local['address']}:{local['port_value']}"
        time.sleep(0.05)
    raise AssertionError("Envoy is not ready")


@pytest.fixture
def running(tmp_path, model_of) -> Iterator[Deployment]:
    flags = ("--epp-port", "0", "--prefill-policy", "round_robin", "--decode-policy", "round_robin")
    with pd_deployment(
        tmp_path, model_of("llama"), prefills=2, decodes=2, proxy_flags=flags
    ) as deployment:
        yield deployment


def _ask_in_turns(gateway: Gateway, expected: str, num: int) -> None:
    for index in range(num):
        said = gateway.streamed() if index % 2 else gateway.text()
        assert said == expected, index


def test_requests_through_envoy_are_served_by_pairs_while_engines_are_killed(tmp_path, running):
    expected = httpx.post(f"{running.url('proxy')}{PATH}", json=BODY, timeout=60, verify=False)
    said = expected.json()["choices"][0]["text"]
    with envoy(tmp_path, running) as gateway:
        _ask_in_turns(gateway, said, 8)
        assert gateway.legs("handed_over") == 8
        assert gateway.legs("failed") == 0
        served = [
            running.metric(name, 'pdserve_prefill_legs_total{outcome="handed_over"}')
            for name in ("decode", "decode1")
        ]
        assert min(served) >= 2
        models = httpx.get(f"{gateway.url}/v1/models", timeout=10, verify=False)
        assert models.json()["data"]

        running.processes["decode1"].kill()
        _ask_in_turns(gateway, said, 6)  # at once: those that were to go there go on elsewhere

        running.processes["prefill1"].kill()
        _ask_in_turns(gateway, said, 6)
        assert gateway.legs("handed_over") >= 10

        running.processes["decode"].kill()
        deadline = time.monotonic() + 20
        told = ""
        while told != "application/json":  # Envoy's own words, until the proxy has noticed
            assert time.monotonic() < deadline
            answer = httpx.post(gateway.url + PATH, json=BODY, timeout=60, verify=False)
            assert answer.status_code == 503
            told = answer.headers["content-type"]
        assert answer.json()["error"]["type"] == "service_unavailable_error"


def test_many_streams_through_envoy_at_once_are_whole_and_nothing_stays_held(tmp_path, running):
    async def all_of(gateway: Gateway, num: int) -> set[str]:
        return set(await asyncio.gather(*(asyncio.to_thread(gateway.streamed) for _ in range(num))))

    with envoy(tmp_path, running) as gateway:
        said = gateway.text()
        assert asyncio.run(all_of(gateway, 24)) == {said}
        body = BODY | {"max_tokens": 400, "stream": True, "ignore_eos": True}
        for _ in range(3):  # who leaves in the middle
            with httpx.stream(
                "POST", gateway.url + PATH, json=body, timeout=60, verify=False
            ) as answer:
                next(answer.iter_bytes())
        engines = ("prefill", "prefill1", "decode", "decode1")
        running.wait_nothing_held(*engines, timeout_s=20.0)


def test_envoys_subset_is_obeyed_and_an_empty_one_is_503(tmp_path, running):
    hint = {
        "name": "envoy.filters.http.header_to_metadata",
        "typed_config": {
            "@type": f"{_FILTERS}.header_to_metadata.v3.Config",
            "request_rules": [
                {
                    "header": "x-subset",
                    "on_header_present": {
                        "metadata_namespace": "envoy.lb.subset_hint",
                        "key": "x-gateway-destination-endpoint-subset",
                        "type": "STRING",
                    },
                }
            ],
        },
    }
    only = running.url("decode1").removeprefix("http://")
    with envoy(tmp_path, running, filters=(hint,)) as gateway:
        for subset, status in ((only, 200), (only, 200), (only, 200), ("10.1.2.3:1", 503)):
            answer = httpx.post(
                gateway.url + PATH,
                json=BODY,
                headers={"x-subset": subset},
                timeout=60,
                verify=False,
            )
            assert answer.status_code == status, answer.text
        assert running.metric("decode", 'pdserve_prefill_legs_total{outcome="handed_over"}') == 0


def test_through_envoy_a_prompt_passes_that_of_a_tenant_over_its_share(tmp_path):
    with shared(tmp_path, "--epp-port", "0") as running, envoy(tmp_path, running) as gateway:
        assert served_first(running, gateway.url) == ["modest", "greedy"]
