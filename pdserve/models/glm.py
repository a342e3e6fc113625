"""GLM-4.5 and its successors: experts as in DeepSeek-V3, under attention of two kinds."""

from __future__ import annotations

from pdserve.models.decoder import Decoder


class Glm4MoeForCausalLM(Decoder):
    """GLM-4.5 team 2025 (and 4.6, 4.7): grouped queries, of whose heads a half is rotated."""


class Glm4MoeLiteForCausalLM(Decoder):
    """GLM-4.7-Flash: latent attention as in DeepSeek-V3."""
