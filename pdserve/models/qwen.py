"""Qwen: the shared decoder, biases, norms of q and k, windows and experts by configuration."""

from __future__ import annotations

from pdserve.models.decoder import Decoder


class Qwen2ForCausalLM(Decoder):
    """Qwen team 2024: biases on q, k and v; upper layers may slide."""


class Qwen3ForCausalLM(Decoder):
    """Qwen team 2025, dense models: norms on each head of q and k, no such biases."""


class Qwen3MoeForCausalLM(Decoder):
    """Qwen team 2025: Qwen3 with experts in some or all layers."""
