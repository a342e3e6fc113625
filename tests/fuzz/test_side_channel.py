"""The side channel, and peers that know the secret and speak nonsense."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.side_channel import SideChannelTarget

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def target() -> Iterator[SideChannelTarget]:
    target = SideChannelTarget()
    yield target
    target.check_service()
    target.close()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_no_frame_ends_a_transfer_thread(target: SideChannelTarget, data: st.DataObject) -> None:
    target.try_one(data)
