"""The activations of gated MLPs. Free of torch."""

from __future__ import annotations

import enum


class Activation(enum.Enum):
    """The activation of a gated MLP."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
