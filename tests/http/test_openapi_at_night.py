"""What of `/openapi.json` takes longest: large bodies, and what engines do as proxies do."""

from __future__ import annotations

import pytest

from tests.http.test_openapi import (
    ALIKE,
    EXCLUDED,
    LARGE,
    engines_schema,
    proxys_schema,
    served,
    thorough,
)

pytestmark = pytest.mark.matrix
__all__ = ["served"]


@engines_schema.include(path=ALIKE).parametrize()
@thorough
def test_an_engine_does_what_the_proxy_before_it_does(case, served):
    case.call_and_validate(base_url=served.urls["engine"], excluded_checks=EXCLUDED)


@proxys_schema.include(path=LARGE).parametrize()
@thorough
def test_a_proxy_does_so_with_large_bodies(case, served):
    case.call_and_validate(base_url=served.urls["proxy"], excluded_checks=EXCLUDED)
