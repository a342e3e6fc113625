"""What comes over HTTP from proxies and engines: refused or taken, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.control import HopTarget, RegistrationTarget

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fuzz.core import Target


@pytest.mark.parametrize("make", [HopTarget, RegistrationTarget])
@given(data=st.data())
def test_whatever_comes_over_the_control_plane_is_taken_or_refused(
    make: Callable[[], Target], data: st.DataObject
) -> None:
    target = make()
    try:
        target.try_one(data)
        target.check_service()
    finally:
        target.close()
