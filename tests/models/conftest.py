"""Tiny random models in Hugging Face format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.tiny_models import CLASSES, FIELDS_OF, make_tiny_config, vary

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TINY: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
}
"""At this deviation tokens vary with the context; at 0.02 one token repeats."""


@pytest.fixture
def save_model(tmp_path: Path) -> Callable[..., Any]:
    """Make a random model of a family, save it to `tmp_path` and return it."""

    def save(family: str = "llama", *, max_shard_size: str = "1GB", **fields: Any) -> Any:
        import transformers

        torch.manual_seed(3)
        config = make_tiny_config(family, **{**TINY, **FIELDS_OF.get(family, {}), **fields})
        config._attn_implementation = "eager"
        model = getattr(transformers, CLASSES[family][1])(config).eval()
        vary(model)
        model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
        return model

    return save
