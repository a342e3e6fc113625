"""Helpers beside the tests whose asserts say what they saw, as those of the tests do."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite(
    *(f"tests.connectors.{name}" for name in ("halves", "lane_bench", "push_engines"))
)
