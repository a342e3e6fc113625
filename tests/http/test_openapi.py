"""`/openapi.json` says what servers do: each path, each answer, each body that is refused.

More examples: `HYPOTHESIS_PROFILE=nightly`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance

from pdserve.http import openapi
from tests.http.served import Served

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow
NUM_EXAMPLES = max(3, hypothesis.settings().max_examples // 20)
# Bodies of many fields, each of which takes seconds to draw.
LARGE = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"]
ALIKE = [each.path for each in openapi.COMMON]
OPERATIONS = {"proxy": openapi.PROXY, "engine": openapi.ENGINE}
engines_schema = schemathesis.openapi.from_dict(openapi.document("engine", openapi.ENGINE))
proxys_schema = schemathesis.openapi.from_dict(
    openapi.document("proxy", openapi.PROXY, without=("kv_transfer_params",))
)
thorough = settings(
    max_examples=NUM_EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck)
)
EXCLUDED = [positive_data_acceptance]
"""Ranges, and fields that exclude one another, are not in the structs."""


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served() as running:
        yield running
        assert running.settle() == 0


@engines_schema.exclude(path=ALIKE).parametrize()
@thorough
def test_an_engine_does_what_its_document_says(case, served):
    case.call_and_validate(base_url=served.urls["engine"], excluded_checks=EXCLUDED)


@proxys_schema.exclude(path=LARGE).parametrize()
@thorough
def test_a_proxy_does_what_its_document_says(case, served):
    case.call_and_validate(base_url=served.urls["proxy"], excluded_checks=EXCLUDED)


def test_the_document_is_what_is_served(served):
    for who, title in (("proxy", "pdserve"), ("engine", "pdserve engine")):
        told = httpx.get(served.urls[who] + "/openapi.json").json()
        assert told["openapi"] == "3.1.0"
        assert told["info"]["title"] == title
        assert set(told["paths"]) == {each.path for each in OPERATIONS[who]}


def test_every_field_of_a_body_is_told_but_what_engines_say_to_one_another(served):
    for who, is_told in (("proxy", False), ("engine", True)):
        schemas = httpx.get(served.urls[who] + "/openapi.json").json()["components"]["schemas"]
        for name in ("CompletionRequest", "ChatRequest"):
            fields = schemas[name]["properties"]
            assert {"stream", "max_tokens", "logit_bias"} <= set(fields)
            assert ("kv_transfer_params" in fields) is is_told


@pytest.mark.parametrize("who", ["proxy", "engine"])
def test_no_path_is_left_out(served, who):
    """What a server routes is told, but for what proxies and engines say to one another."""
    told = {(each.method.upper(), each.path) for each in OPERATIONS[who]}
    app = served.apps[who]
    routed = {
        (route.method, route.resource.canonical)
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    hop = {(method, "/pdserve/register") for method in ("POST", "DELETE")}
    assert routed - hop == told
