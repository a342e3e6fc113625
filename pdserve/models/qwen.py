"""Qwen2: the shared decoder with biases on q, k and v, and upper layers that may slide."""

from __future__ import annotations

from pdserve.models.decoder import Decoder


class Qwen2ForCausalLM(Decoder):
    """Qwen team 2024."""
