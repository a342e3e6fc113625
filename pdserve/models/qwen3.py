"""Qwen3: the shared decoder with RMS norms on each head of q and k, and no qkv bias."""

from __future__ import annotations

from pdserve.models.decoder import Decoder


class Qwen3ForCausalLM(Decoder):
    """Qwen team 2025, dense models."""
