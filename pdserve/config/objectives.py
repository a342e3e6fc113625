"""Objectives of requests by model name, as a deployment sets them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from pdserve.config.checks import require

if TYPE_CHECKING:
    from collections.abc import Sequence

MODEL_SLO: Final = "model-slo"
"""The flag."""
MIN_SLO_MS: Final = 1e-3
"""For any less, the cost of a decision would be infinite."""
_MAX_MS: Final = 1e8


class ModelObjectives(msgspec.Struct, frozen=True):
    """What requests for one model are to keep; None: what the deployment's others are.

    Attributes:
        ttft_s, itl_s: To the first token, and between two.
    """

    ttft_s: float | None = None
    itl_s: float | None = None


def objectives_by_model(words: Sequence[str]) -> dict[str, ModelObjectives]:
    """Read objectives as `chat=ttft:300` and `chat=itl:25`, in milliseconds; by the model's name.

    Raises:
        ConfigError: A word is none.
    """
    found: dict[str, ModelObjectives] = {}
    for word in words:
        model, _, objective = word.rpartition("=")
        kind, _, text = objective.partition(":")
        try:
            limit_ms = float(text)
        except ValueError:
            limit_ms = 0.0
        is_one = bool(model) and kind in ("ttft", "itl") and MIN_SLO_MS <= limit_ms <= _MAX_MS
        require(is_one, MODEL_SLO, word, "write it as MODEL=ttft:300 or MODEL=itl:25, in ms")
        before = found.get(model, ModelObjectives())
        known_s = before.ttft_s if kind == "ttft" else before.itl_s
        require(known_s is None, MODEL_SLO, word, f"the {kind} of {model} is given twice")
        found[model] = msgspec.structs.replace(before, **{f"{kind}_s": limit_ms / 1e3})
    return found
