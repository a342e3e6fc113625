"""Whether a checkpoint's stored output head may stand for its embedding."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pdserve.errors import ConfigError
from pdserve.models.weights import Slot

if TYPE_CHECKING:
    from pdserve.models.weights import Checkpoint

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def check_tied_head(checkpoint: Checkpoint) -> None:
    """Refuse a stored head that differs from the embedding, though config.json ties them.

    Both are compared as they are mapped; neither is copied.

    Raises:
        ConfigError: They differ, so transformers would not tie them.
    """
    slot = Slot((), lambda _: None)
    embeddings, heads = (checkpoint.tensors({name: slot}) for name in (_EMBEDDING, _HEAD))
    for (_, embedding), (_, head) in zip(embeddings, heads, strict=False):
        if embedding.dtype != head.dtype or not torch.equal(embedding, head):
            raise ConfigError(
                f"config.json: tie_word_embeddings is True, but {_HEAD} differs from {_EMBEDDING}: "
                "set it to false to use both, or remove the head",
                param="model",
            )
