"""`pdserve doctor` says whether UCX moves messages here."""

from __future__ import annotations

import pytest

from pdserve.commands import doctor
from pdserve.commands.findings import Grade


def test_the_rate_between_two_processes_is_measured() -> None:
    (finding,) = doctor.ucx()
    assert finding.verdict is Grade.OK
    assert "messages of 8 MiB at" in finding.text


def test_a_transport_that_is_not_there_is_a_warning_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_TLS", "none_such")
    (finding,) = doctor.ucx()
    assert finding.verdict is Grade.WARN
    assert "pdserve[ucx]" in (finding.remedy or "")
