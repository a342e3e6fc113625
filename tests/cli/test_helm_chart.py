"""The Helm chart: rendered and linted by Helm, held against Kubernetes' schemas and our flags.

Resources of others (InferencePool, LeaderWorkerSet, ScaledObject and so on) are held against the
schemas of their definitions where PDSERVE_CRDS names a folder with those: none are shipped here.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import pdserve
from pdserve.cli import COMMANDS, make_parser, normalise, settings_of
from pdserve.config.http import ProxyConfig
from tests.cli.process import ROOT

pytestmark = pytest.mark.matrix
CHART = ROOT / "deploy" / "helm" / "pdserve"
NEEDED = {"secret": {"existingSecret": "pdserve"}}
GATEWAY = {
    "gateway": {"enabled": True, "parentRefs": [{"name": "inference"}], "hostnames": ["a.b"]}
}
OWN = ("v1", "apps/v1", "policy/v1", "networking.k8s.io/v1")
"""What Kubernetes itself has."""
VARIANTS: dict[str, dict[str, Any]] = {
    "least": {},
    "gateway": {**GATEWAY, "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}}},
    "scaled": {
        "prefill": {"autoscaling": {"enabled": True}},
        "decode": {"autoscaling": {"enabled": True}},
    },
    "nodes": {
        **GATEWAY,
        "prefill": {"size": 2, "replicas": 3, "autoscaling": {"enabled": True}},
        "decode": {"size": 4, "args": ["-tp", "16"], "nodeSelector": {"gpu": "h100"}},
        "model": {
            "name": "/models/m",
            "servedName": "m",
            "volume": {"persistentVolumeClaim": {"claimName": "models"}},
        },
        "engines": {"securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}},
        "proxy": {"args": ["--prefill-policy", "prefix_sticky"], "podAnnotations": {"a": "b"}},
        "imagePullSecrets": [{"name": "registry"}],
        "envFromSecrets": ["keys"],
        "networkPolicy": {"clients": [{"podSelector": {"matchLabels": {"app": "web"}}}]},
    },
}
LATEST = "1.34"


@pytest.fixture(scope="module", params=VARIANTS)
def resources(request) -> list[dict[str, Any]]:
    """What Kubernetes gets of a variant of the values."""
    return rendered(VARIANTS[request.param])


def rendered(values: dict[str, Any]) -> list[dict[str, Any]]:
    chart = pytest.importorskip("helm_python.chart", reason="needs pdserve[dev-kubernetes]")
    with chart.Chart.load(CHART) as loaded:
        files = loaded.render(NEEDED | values, name="llm", namespace="serving")
    texts = [text for name, text in files.items() if name.endswith(".yaml")]
    return [each for text in texts for each in yaml.safe_load_all(text) if each]


def of_kind(resources: list[dict[str, Any]], *kinds: str) -> list[dict[str, Any]]:
    return [each for each in resources if each["kind"] in kinds]


def templates(resources: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The templates of all pods."""
    found = [each["spec"]["template"] for each in of_kind(resources, "Deployment", "StatefulSet")]
    for each in of_kind(resources, "LeaderWorkerSet"):
        both = each["spec"]["leaderWorkerTemplate"]
        found += [both["leaderTemplate"], both["workerTemplate"]]
    return found


@pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS)
def test_helm_finds_no_fault(values):
    chart = pytest.importorskip("helm_python.chart", reason="needs pdserve[dev-kubernetes]")
    found = chart.lint(CHART, NEEDED | values)
    assert found["errors"] == []
    assert [each for each in found["messages"] if each["severity"] > 1] == []


def test_without_a_secret_nothing_is_installed():
    with pytest.raises(Exception, match=r"secret\.existingSecret"):
        rendered({"secret": {"existingSecret": ""}})


@pytest.mark.parametrize(
    "values", [{"prefil": {}}, {"prefill": {"replica": 2}}, {"proxy": {"replicas": "2"}}], ids=str
)
def test_a_value_that_means_nothing_is_refused(values):
    rendered({})
    with pytest.raises(Exception, match="schema"):
        rendered(values)


def test_every_resource_is_one_that_kubernetes_takes(resources):
    schemas = pytest.importorskip("kubernetes_validate")
    for each in resources:
        if each["apiVersion"] in OWN:
            schemas.validate(each, LATEST, strict=True)


@pytest.mark.skipif("PDSERVE_CRDS" not in os.environ, reason="PDSERVE_CRDS names no folder")
def test_resources_of_others_are_as_their_definitions_say(resources):
    jsonschema = pytest.importorskip("jsonschema")
    known = _definitions(Path(os.environ["PDSERVE_CRDS"]))
    checked = 0
    for each in resources:
        schema = known.get((each["apiVersion"], each["kind"]))
        if schema is not None:
            schema = _closed(schema)
            schema["properties"]["metadata"] = {"type": "object"}
            jsonschema.Draft202012Validator(schema).validate(each)
            checked += 1
        else:
            assert each["apiVersion"] in OWN
    assert checked or len(of_kind(resources, "StatefulSet")) == 2


def _definitions(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    found = {}
    for path in folder.glob("*.yaml"):
        for each in yaml.load_all(path.read_text(), Loader=yaml.CSafeLoader):
            if each and each.get("kind") == "CustomResourceDefinition":
                spec = each["spec"]
                for version in spec["versions"]:
                    key = f"{spec['group']}/{version['name']}", spec["names"]["kind"]
                    found[key] = version["schema"]["openAPIV3Schema"]
    return found


def _closed(schema: Any) -> Any:
    """A schema that takes no fields that it does not name, as the API server drops them."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    is_open = schema.get("x-kubernetes-preserve-unknown-fields") or "properties" not in schema
    closed = {} if is_open or schema.get("type") != "object" else {"additionalProperties": False}
    return {name: _closed(each) for name, each in schema.items()} | closed


def test_every_command_line_is_one_of_pdserve_and_listens_where_it_is_asked(resources):
    parser = make_parser()
    for template in templates(resources):
        [container] = template["spec"]["containers"]
        if "args" not in container:
            continue
        given = vars(parser.parse_args(normalise(container["args"])))
        given.pop("command")
        [command] = [each for each in COMMANDS if each.name == container["args"][0]]
        values = settings_of(command.table(), given, {})
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        assert int(str(values["port"].value)) == ports["http"]
        if "epp" in ports:
            assert int(str(values["epp-port"].value)) == ports["epp"]
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert container[probe]["httpGet"]["port"] == "http"


def test_every_selector_finds_pods_and_every_named_port_is_there(resources):
    pods = templates(resources)

    def found(selector: dict[str, str]) -> list[dict[str, Any]]:
        return [p for p in pods if selector.items() <= p["metadata"]["labels"].items()]

    for each in of_kind(resources, "Service"):
        chosen = found(each["spec"]["selector"])
        assert chosen, each["metadata"]["name"]
        for port in each["spec"]["ports"]:
            named = [p["name"] for p in chosen[0]["spec"]["containers"][0]["ports"]]
            assert port["targetPort"] in named
    for each in of_kind(resources, "PodDisruptionBudget", "PodMonitor", "InferencePool"):
        assert found(each["spec"]["selector"]["matchLabels"]), each["metadata"]["name"]
    for each in of_kind(resources, "NetworkPolicy"):
        assert found(each["spec"]["podSelector"]["matchLabels"])
    for each in of_kind(resources, "Deployment", "StatefulSet"):
        wanted = each["spec"]["selector"]["matchLabels"]
        assert wanted.items() <= each["spec"]["template"]["metadata"]["labels"].items()


def test_where_nobody_else_may_reach_engines_no_rule_lets_everybody_in():
    """Kubernetes takes a rule whose `from` is empty as one for all."""
    values = {**GATEWAY, "networkPolicy": {"platform": [], "clients": [{"podSelector": {}}]}}
    for each in of_kind(rendered(values), "NetworkPolicy"):
        assert all(rule.get("from") for rule in each["spec"]["ingress"]), each


def test_engines_register_at_the_name_that_stands_for_all_proxies(resources):
    [service] = [
        each
        for each in of_kind(resources, "Service")
        if each["spec"].get("clusterIP") == "None" and each["metadata"]["name"].endswith("-all")
    ]
    assert service["spec"]["publishNotReadyAddresses"]
    url = f"http://{service['metadata']['name']}.serving:{service['spec']['ports'][0]['port']}"
    for template in templates(resources):
        [container] = template["spec"]["containers"]
        if container.get("args", ["proxy"])[0] != "proxy":
            assert url in container["args"]


def test_a_gateways_pool_is_the_decode_engines_and_its_picker_is_there(resources):
    for pool in of_kind(resources, "InferencePool"):
        spec = pool["spec"]
        assert spec["selector"]["matchLabels"]["app.kubernetes.io/component"] == "decode"
        [picker] = [
            each
            for each in of_kind(resources, "Service")
            if each["metadata"]["name"] == spec["endpointPickerRef"]["name"]
        ]
        ports = [each["port"] for each in picker["spec"]["ports"]]
        assert spec["endpointPickerRef"]["port"]["number"] in ports
        [route] = of_kind(resources, "HTTPRoute")
        assert route["spec"]["rules"][0]["backendRefs"][0]["name"] == pool["metadata"]["name"]


def test_nobody_is_root_or_killed_while_it_drains(resources):
    needed_s = ProxyConfig().drain_delay_s + ProxyConfig().shutdown_timeout_s + 5.0
    for template in templates(resources):
        spec = template["spec"]
        assert spec["terminationGracePeriodSeconds"] >= needed_s
        assert spec["securityContext"]["runAsNonRoot"]
        assert not spec["automountServiceAccountToken"]
        [container] = spec["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert not container["securityContext"]["allowPrivilegeEscalation"]
        assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
        mounted = {each["name"] for each in container["volumeMounts"]}
        assert mounted == {each["name"] for each in spec["volumes"]}


def test_proxies_whose_streams_get_longer_may_be_given_longer_until_they_are_killed():
    [proxies] = of_kind(rendered({"proxy": {"terminationGracePeriodSeconds": 615}}), "Deployment")
    assert proxies["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 615


def test_what_is_scaled_has_no_number_of_its_own_and_is_asked_for_series_that_there_are(resources):
    known = (ROOT / "docs" / "metrics.md").read_text()
    for each in of_kind(resources, "ScaledObject"):
        target = each["spec"]["scaleTargetRef"]
        [scaled] = [
            other
            for other in of_kind(resources, target["kind"])
            if other["metadata"]["name"] == target["name"]
        ]
        assert scaled["apiVersion"] == target["apiVersion"]
        assert "replicas" not in scaled["spec"]
        query = each["spec"]["triggers"][0]["metadata"]["query"]
        for series in re.findall(r"vllm:\w+", query):
            assert f"`{series}`" in known
        assert re.fullmatch(r'\w+\(vllm:\w+\{namespace="serving",pod=~"[^"]+"\}\)', query)


def test_the_chart_is_of_this_version():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == pdserve.__version__
