"""Llama, Mistral, Seed-OSS: the shared decoder as it is, biases and windows by configuration."""

from __future__ import annotations

from pdserve.models.decoder import Decoder


class LlamaForCausalLM(Decoder):
    """Touvron et al. 2023, and later members of the family; SmolLM and others use its form."""


class MistralForCausalLM(Decoder):
    """Jiang et al. 2023: every layer may have a sliding window."""


class SeedOssForCausalLM(Decoder):
    """ByteDance Seed 2025: Llama's form with biases on q, k and v."""
