"""A proxy and an engine's server, and requests with any value in any field."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.http import HttpTarget

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def target() -> Iterator[HttpTarget]:
    target = HttpTarget()
    yield target
    target.check_service()
    target.close()


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")  # the proxy does
@settings(suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_every_request_is_answered_or_refused_in_one_shape(
    target: HttpTarget, data: st.DataObject
) -> None:
    target.try_one(data)
