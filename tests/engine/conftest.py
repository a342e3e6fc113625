"""One tiny model for all engine tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.tiny_models import write_tiny_model

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a byte tokenizer."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "llama")
