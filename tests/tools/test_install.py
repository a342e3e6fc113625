"""pip's settings reach uv."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tools.install import settings_for_uv

if TYPE_CHECKING:
    from pathlib import Path

FILE = """[global]
index-url = https://mirror/simple
find-links =
    /wheels
    /more
timeout = 5
[install]
extra-index-url = https://a/simple https://b/simple
"""


@pytest.fixture
def listed(tmp_path: Path) -> str:
    """What a real pip prints of a file and of variables, which override it."""
    config = tmp_path / "pip.conf"
    config.write_text(FILE)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    given = {"PIP_CONFIG_FILE": str(config), "PIP_TIMEOUT": "7", "PIP_NO_INPUT": "1"}
    command = [sys.executable, "-m", "pip", "config", "list"]
    return subprocess.run(
        command, env={**kept, **given}, check=True, capture_output=True, text=True
    ).stdout


@pytest.mark.slow
def test_uv_has_pips_settings(listed: str) -> None:
    settings = settings_for_uv(listed)
    assert settings is not None
    assert settings["UV_DEFAULT_INDEX"] == "https://mirror/simple"
    assert settings["UV_INDEX"] == "https://a/simple https://b/simple"
    assert settings["UV_FIND_LINKS"] == "/wheels,/more"
    assert settings["UV_HTTP_TIMEOUT"] == "7"


@pytest.mark.slow
def test_a_setting_that_uv_does_not_know_leaves_it_to_pip(listed: str) -> None:
    assert settings_for_uv(f"{listed}install.no-binary='numpy'\n") is None
