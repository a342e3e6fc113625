"""DeepSeek-V2 and V3: latent attention, and experts after the first layers; arch says the rest."""

from __future__ import annotations

from pdserve.models.decoder import Decoder


class DeepseekV2ForCausalLM(Decoder):
    """DeepSeek-AI 2024; DeepSeek-V2-Lite does without a compressed query."""


class DeepseekV3ForCausalLM(Decoder):
    """DeepSeek-AI 2024, section 2.1; Kimi-K2, Moonlight and others use its form."""
