"""Qwen3-MoE: Qwen3 with experts in some or all layers."""

from __future__ import annotations

from pdserve.models.decoder import Decoder


class Qwen3MoeForCausalLM(Decoder):
    """Qwen team 2025, mixture-of-experts models."""
