"""The location of the model that comes with pdserve."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pdserve

BOXED: Final = "boxed"
"""What to write for MODEL to get it, and for its heads."""


def boxed_model_dir() -> Path:
    """The directory of the bundled model, in Hugging Face format."""
    return Path(pdserve.__file__).parent / "models" / "boxed"


def boxed_heads_dir() -> Path:
    """The directory of its Medusa heads, in vLLM's format."""
    return Path(pdserve.__file__).parent / "models" / "boxed_medusa"
