"""Tests of this folder skip, each by its name, where there is no CUDA device."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def cuda() -> torch.device:
    """The device."""
    if not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} finds no CUDA device")
    return torch.device("cuda", 0)
