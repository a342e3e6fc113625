"""The short form of `tests.chaos.refusals`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.chaos.refusals import objections, run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.chaos,
    pytest.mark.alone,
    pytest.mark.short_form(""),
]


def test_refused_clients_on_a_busy_machine_cost_a_good_one_no_request(
    model_of: Callable[[str], Path], tmp_path: Path
) -> None:
    result = run(tmp_path, model_of("llama"), 5.0)
    print(f"\n{json.dumps(result)}")
    assert objections(result) == []
